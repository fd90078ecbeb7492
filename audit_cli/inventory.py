"""What a host or a file says about an install, checked, and made into the tree that the rules read.

Everything here came from outside: a value that is not what it should be is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from audit_cli.errors import host
from probes.inventory import is_binary
from reports.model import Record
from rules.tree import Binary, EntryPoint, InstallTree, SourceFile

MAX_FILES = 60_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Found:
    """One file of an install. ``place`` is its absolute path where it lies, exactly as the host gave it (used to ask
    for it only)."""

    path: str
    place: str
    size: int
    sha256: str
    origin: str
    stock: bool


@dataclass(frozen=True)
class Inventory:
    vllm: str
    site_packages: str
    files: tuple[Found, ...]
    failed: tuple[tuple[str, str], ...]
    record: Record
    entry_points: tuple[EntryPoint, ...]
    injected: tuple[str, ...]
    versions: Mapping[str, str]
    copies: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Mapping[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[Found, ...]:
        return tuple(found for found in self.files if found.path.endswith(".py"))

    @property
    def binaries(self) -> tuple[Found, ...]:
        return tuple(found for found in self.files if not found.path.endswith(".py"))


def parse(data: Any) -> Inventory:
    """The inventory that ``probes.inventory`` took. Raises DdauditError when it isn't one."""
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise host(
            "bad-inventory", "the host's answer makes no sense", str(error)[:200], "see what it says with -vv"
        ) from None


def _parse(data: Any) -> Inventory:
    files: list[Found] = []
    failed: list[tuple[str, str]] = []
    for tree in data["trees"]:
        root, origin = _text(tree["root"]), shown(_text(tree["origin"]))
        for path, size, digest, stock in tree["files"]:
            if not _SHA256.fullmatch(digest) or not isinstance(size, int) or size < 0:
                raise ValueError(f"no size or sha256 of {shown(path)}")
            if path.startswith("/") or ".." in path.split("/") or "\x00" in path:
                raise ValueError(f"not a path below its root: {shown(path)}")
            files.append(Found(shown(path), f"{root}/{path}" if root else path, size, digest, origin, bool(stock)))
        failed += [(shown(_text(path)), shown(_text(why))) for path, why in tree["failed"]]
    if len(files) > MAX_FILES:
        raise ValueError(f"{len(files)} files, more than {MAX_FILES}")
    record = data["record"]
    points = [EntryPoint(*(shown(_text(part)) for part in point)) for point in data["entry_points"]]
    return Inventory(
        vllm=shown(_text(data["vllm"])),
        site_packages=shown(_text(data["site_packages"])),
        files=tuple(files),
        failed=tuple(failed),
        record=Record(
            status=record["status"] if record["status"] in ("clean", "changed") else "unknown",
            changed=_texts(record["changed"]),
            missing=_texts(record["missing"]),
            orphans=_texts(record["orphans"]),
            files=int(record["files"]),
        ),
        entry_points=tuple(sorted(points, key=lambda p: (p.distribution, p.group, p.name))),
        injected=_texts(data["injected"]),
        versions={shown(_text(name)): shown(_text(version)) for name, version in data["versions"].items()},
        copies=_texts(data.get("copies", ())),
        lacking=_texts(data.get("lacking", ())),
        environment={shown(_text(name)): shown(_text(value)) for name, value in data.get("environment", {}).items()},
        python={shown(_text(name)): shown(_text(value)) for name, value in data.get("python", {}).items()},
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text expected, not {type(value).__name__}")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(shown(_text(value)) for value in values)


def shown(text: str) -> str:
    """``text`` as it can be printed anywhere: no control characters, no bytes that are not UTF-8."""
    if text.isprintable():
        return text
    clean = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in clean)


def tree_of(
    inventory: Inventory,
    read: Callable[[str], bytes],
    schemas: Mapping[str, tuple[str, ...] | None],
    unreadable: Mapping[str, str],
) -> InstallTree:
    """The install as the rules see it. ``schemas`` is by sha256; ``unreadable`` (sha256 -> why) are files that could
    not be fetched."""
    files = [
        SourceFile(f.path, f.sha256, f.size, f.origin, f.stock) for f in inventory.sources if f.sha256 not in unreadable
    ]
    lost = [(f.path, unreadable[f.sha256]) for f in inventory.sources if f.sha256 in unreadable]
    return InstallTree(
        vllm_version=inventory.versions.get("vllm", ""),
        files=tuple(sorted(files, key=lambda f: (f.origin != "vllm", f.origin, f.path))),
        read=read,
        binaries=tuple(
            Binary(f.path, f.sha256, f.size, schemas.get(f.sha256) if is_binary(f.path) else None)
            for f in inventory.binaries
        ),
        entry_points=inventory.entry_points,
        record=inventory.record,
        injected=inventory.injected,
        unreadable=(*inventory.failed, *lost),
        environment=dict(inventory.environment),
    )
