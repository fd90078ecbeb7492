"""What is reachable from the samplers that the runners construct."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slice:
    roots: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    not_examined: tuple[str, ...] = ()
    reached: dict[tuple[str, str], Any] = field(default_factory=dict)


def make_slice(ctx: Any) -> Slice:
    return Slice()
