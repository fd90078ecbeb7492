"""The files that the store lacks, in one stream. Nothing is extracted by name: each file is checked against its
sha256 and stored under it."""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Callable, Sequence

from audit_cli.disk import in_words
from audit_cli.errors import host
from audit_cli.inventory import Found
from audit_cli.remote import failed, literal, stream
from audit_cli.store import Store
from audit_cli.transport.base import Limits, Transport
from probes.send_files import LAST, UNREADABLE

MAX_FETCH = 4 << 30
_HEAD = struct.Struct(">IQ")
_PIECE = 4 << 20


class Receiver:
    """Takes the stream as it comes; keeps each file as soon as it is whole, so that a link that breaks loses only
    the last one."""

    def __init__(self, nonce: str, wanted: Sequence[Found], store: Store, progress: Callable[[int, int], None]) -> None:
        self._mark = f"\x1eDD{nonce} stream\n".encode()
        self._wanted, self._store, self._progress = wanted, store, progress
        self._noise, self._data = b"", bytearray()
        self._unpack: zlib._Decompress | None = None
        self._budget = sum(found.size + _HEAD.size for found in wanted) + _HEAD.size
        self.finished, self.got = False, 0
        self.lost: dict[str, str] = {}  # sha256 -> why

    def __call__(self, block: bytes) -> None:
        if self._unpack is None:
            self._noise += block
            at = self._noise.find(self._mark)
            if at < 0:
                self._noise = self._noise[-65536:]
                return
            block, self._noise = self._noise[at + len(self._mark) :], b""
            self._unpack = zlib.decompressobj()
        while not self.finished:
            try:
                piece = self._unpack.decompress(block, _PIECE)
            except zlib.error as error:
                raise host(
                    "bad-answer", "the stream of files is damaged", str(error), "try again: what arrived is kept"
                ) from None
            self._budget -= len(piece)
            if self._budget < 0:
                raise host(
                    "too-much",
                    "the host sent more than it was asked for",
                    "the stream was dropped",
                    "do not trust this host's answers",
                )
            self._data += piece
            self._take()
            block = self._unpack.unconsumed_tail
            if not block and len(piece) < _PIECE:
                return

    def _take(self) -> None:
        at = 0
        while len(self._data) - at >= _HEAD.size:
            number, size = _HEAD.unpack_from(self._data, at)
            if number == LAST:
                self.finished = True
                break
            if number >= len(self._wanted) or (size != UNREADABLE and size > self._wanted[number].size):
                raise host(
                    "bad-answer",
                    "the host sent a file that nobody asked for",
                    "the stream was dropped",
                    "do not trust this host's answers",
                )
            found = self._wanted[number]
            if size == UNREADABLE:
                self.lost[found.sha256] = "could not be read"
                at += _HEAD.size
                continue
            if len(self._data) - at - _HEAD.size < size:
                break
            at += _HEAD.size
            try:
                self._store.put(found.sha256, bytes(self._data[at : at + size]))
            except ValueError:
                self.lost[found.sha256] = "it changed while the scan ran"
            except OSError as error:
                raise in_words(error) from None
            at += size
            self.got += 1
            self._progress(self.got, len(self._wanted))
        del self._data[:at]


def fetch(
    transport: Transport,
    python: str,
    wanted: Sequence[Found],
    store: Store,
    progress: Callable[[int, int], None],
    limits: Limits | None = None,
) -> dict[str, str]:
    """Get ``wanted`` into the store. Returns what could not be had (sha256 -> why). Raises DdauditError; what
    arrived stays."""
    total = sum(found.size for found in wanted)
    if total > MAX_FETCH:
        raise host(
            "too-much",
            f"{total // 2**20} MB of Python to fetch",
            f"more than {MAX_FETCH // 2**20} MB is no vLLM",
            "look at --pythonpath and the plugins",
        )
    nonce = secrets.token_hex(8)
    receiver = Receiver(nonce, wanted, store, progress)
    files = literal([[number, found.place, found.size] for number, found in enumerate(wanted)])
    limits = limits or Limits(idle=60, total=3600, max_bytes=total + (64 << 20))
    result = stream(transport, python, ["send_files"], f"send({nonce!r}, {files}, 1)", receiver, limits)
    if not receiver.finished:
        raise failed(result, transport, python)
    return receiver.lost
