"""Files that are whole or absent: atomic writes, content hashes, manifests, disk space."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddtree.training.errors import DataError, DiskError

MANIFEST = "manifest.json"
FORMAT = 1


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path that becomes ``path`` (file or folder) only if the body succeeds; durable when it does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    _remove(tmp)
    try:
        yield tmp
        for file in [tmp] if tmp.is_file() else sorted(p for p in tmp.rglob("*") if p.is_file()):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if path.is_dir():  # a folder cannot be replaced in one step: move the old one away first
            old = path.with_name(f"{path.name}.old-{os.getpid()}")
            path.rename(old)
            tmp.rename(path)
            _remove(old)
        else:
            tmp.replace(path)
    except BaseException:
        _remove(tmp)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write atomically."""
    with atomic(path) as tmp:
        tmp.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write atomically, keys in the given order."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises DataError when the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("file-missing", f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError("file-corrupt", f"{path} is not JSON: {error}") from None


def digest(data: bytes) -> str:
    """blake2b, 128 bits, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_digest(path: Path) -> str:
    """blake2b, 128 bits, hex, of a file's content."""
    h = hashlib.blake2b(digest_size=16)
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            h.update(chunk)
    return h.hexdigest()


def fingerprint(path: Path, sample: int = 1 << 20) -> str:
    """Identity of a large file without reading it whole: its size, first and last MiB."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        head = handle.read(sample)
        handle.seek(max(0, size - sample))
        return digest(str(size).encode() + head + handle.read(sample))


def write_manifest(folder: Path, kind: str, facts: dict[str, Any]) -> None:
    """The manifest is written last: a folder without one is unfinished."""
    write_json(folder / MANIFEST, {"format": FORMAT, "kind": kind, **facts})


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Raises DataError unless ``folder`` holds a manifest of this kind and format."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != kind or manifest.get("format") != FORMAT:
        raise DataError(
            "manifest-kind",
            f"{folder} is {manifest.get('kind')!r} format {manifest.get('format')!r}, not {kind!r} format {FORMAT}",
        )
    return dict(manifest)


def manifest_digest(folder: Path) -> str:
    """Hash that a child manifest records of its parent."""
    return file_digest(folder / MANIFEST)


def human_bytes(n: float) -> str:
    """1536 -> '1.5 KB' (decimal units, as disks are sold)."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def require_space(folder: Path, needed: int, arithmetic: str, reserve: float = 0.05) -> None:
    """Refuse to fill the disk: DiskError with the arithmetic unless ``needed`` bytes fit with ``reserve`` left over."""
    folder.mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(folder)
    spare = usage.free - int(reserve * usage.total)
    if needed > spare:
        raise DiskError(
            "disk-would-fill",
            f"{human_bytes(needed)} needed ({arithmetic}), {human_bytes(max(spare, 0))} usable on {folder} "
            f"({human_bytes(usage.free)} free, {reserve:.0%} of the disk kept)",
            "set a smaller budget or another folder",
        )
