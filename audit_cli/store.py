"""Files by their sha256, shared by every target. A name from a host never becomes a name here."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from audit_cli.disk import naming

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Store:
    """``folder/ab/<sha256>``. Objects appear whole or not at all, so that scans can share it without locks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: set[str] = set()

    def path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise ValueError(f"not a sha256: {sha256[:80]!r}")
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def get(self, sha256: str) -> bytes:
        """The bytes. An object that is not what its name says (a damaged disk) is removed and counts as absent.
        Raises OSError."""
        path = self.path(sha256)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            path.unlink(missing_ok=True)
            raise OSError(f"the stored copy of {sha256[:12]} is damaged; it was dropped, scan again")
        return data

    def put(self, sha256: str, data: bytes) -> None:
        """Keep ``data`` under its hash. Raises ValueError when it isn't its hash, OSError when the disk is full."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError("bytes and sha256 differ")
        path = self.path(sha256)
        with naming(path):
            if sha256[:2] not in self._made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._made.add(sha256[:2])
            _write(path, data, 0o600)

    def objects(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("??/*") if _SHA256.fullmatch(path.name))


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, readable by its owner alone unless ``mode`` says more. Raises OSError that
    names ``path``."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, data, mode)


def _write(path: Path, data: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
