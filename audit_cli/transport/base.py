"""What a way to a host has to do: run a command with some bytes on its input, within limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LOST = -1  # return code of a command that was killed, or whose link was lost


@dataclass(frozen=True)
class Limits:
    """``idle``: seconds without a byte; ``total``: seconds in all; ``max_bytes``: of standard output. Past any of
    them the command is ended."""

    idle: float = 60.0
    total: float = 900.0
    max_bytes: int = 64 << 20


@dataclass(frozen=True)
class Result:
    """``out`` is empty when a sink took it. ``err`` holds the last 64 kB. ``stopped`` names the limit that ended the
    command, else ""."""

    code: int
    out: bytes
    err: bytes
    stopped: str = ""


Sink = Callable[[bytes], None]
MAX_ERR = 64 << 10


class Transport(Protocol):
    """One connection. ``run`` keeps the command's input open until it has ended: our scripts end themselves when it
    closes."""

    name: str

    def run(
        self, argv: Sequence[str], stdin: bytes = b"", limits: Limits = Limits(), sink: Sink | None = None
    ) -> Result:
        """Run ``argv`` (words, quoted as needed) and wait. Raises DdauditError when the link fails; a command's
        failure is its code."""

    def close(self) -> None: ...
