"""Op schema strings of compiled files: ``TORCH_LIBRARY`` keeps "name(Tensor a, ...) -> ..." in the binary, argument
names included.

Found by searching bytes, not by a regular expression over the file (that takes minutes): every ") -> " is a
candidate, the string around it
ends at the next byte that is not text on either side. The standard library alone; one pass in blocks, so that memory
stays bounded.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Dict, Iterable, List, Optional, Set

MAX_BINARY = 8 << 30
MAX_SCHEMA = 8192
MAX_SCHEMAS = 5000
BLOCK = 4 << 20
NEEDLE = b") -> "
_NOT_TEXT = re.compile(rb"[^\x20-\x7e\n]")
_SCHEMA = re.compile(r"(?:[A-Za-z_]\w*::)?[A-Za-z_]\w*(?:\.\w+)?\s*\(.*\)\s*->\s*\S.*", re.S)
_TYPES = re.compile(r"\b(?:Tensor|int|SymInt|float|bool|str|Scalar|Generator|Device|ScalarType)\b")


class Scanner:
    """Give it the blocks of a binary in order, then ask for ``schemas()``."""

    def __init__(self) -> None:
        self._found: Set[str] = set()
        self._rest = b""
        self._skip = 0  # bytes at the start of _rest that only serve as what stands before

    def feed(self, block: bytes) -> None:
        data = self._rest + block
        self._scan(data, len(data) - MAX_SCHEMA)
        keep = min(len(data), 2 * MAX_SCHEMA)
        self._skip = max(0, keep - MAX_SCHEMA)
        self._rest = data[len(data) - keep :]

    def schemas(self) -> List[str]:
        self._scan(self._rest, len(self._rest))
        self._rest = b""
        return sorted(self._found)

    def _scan(self, data: bytes, end: int) -> None:
        at = data.find(NEEDLE, self._skip, max(0, end))
        while at >= 0 and len(self._found) < MAX_SCHEMAS:
            before = data[max(0, at - MAX_SCHEMA) : at]
            cut = 0
            for match in _NOT_TEXT.finditer(before):
                cut = match.end()
            after = data[at : at + MAX_SCHEMA]
            stop = _NOT_TEXT.search(after)
            length = stop.start() if stop else len(after)
            text = " ".join((before[cut:] + after[:length]).decode("ascii", "replace").split())
            if _SCHEMA.fullmatch(text) and _TYPES.search(text):
                self._found.add(text)
            at = data.find(NEEDLE, at + max(length, len(NEEDLE)), max(0, end))


def in_blocks(blocks: Iterable[bytes]) -> List[str]:
    """The schemas in the blocks of one binary, sorted, each once."""
    scanner = Scanner()
    for block in blocks:
        scanner.feed(block)
    return scanner.schemas()


def in_file(path: str) -> Optional[List[str]]:
    """The schemas in a file; None when it can't be read, is larger than the limit, or is no regular file."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb", buffering=0) as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BINARY:
                return None
            return in_blocks(iter(lambda: file.read(BLOCK), b""))
    except OSError:
        return None


def take(paths: List[str]) -> Dict[str, Optional[List[str]]]:
    """path -> schemas, for a list of absolute paths."""
    return {path: in_file(path) for path in paths}
