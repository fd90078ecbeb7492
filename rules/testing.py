"""Installs made from folders and from rule examples: what tests and ``ddaudit rules test`` judge."""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path

from reports.model import Record
from rules.base import Example
from rules.tree import EntryPoint, InstallTree, SourceFile


def tree_from_dir(site_packages: Path, *, pythonpath: Sequence[Path] = ()) -> InstallTree:
    """An unpacked site-packages folder (``vllm/`` and ``vllm-*.dist-info/``) as an InstallTree; binaries are not
    read. Other
    distributions in it count as plugins if they declare an entry point of a ``vllm.*`` group."""
    listed = _record(site_packages)
    where: dict[str, Path] = {}
    files: list[SourceFile] = []
    entry_points: list[EntryPoint] = []
    origins = {"vllm": "vllm"}
    for info in sorted(site_packages.glob("*.dist-info")):
        found = _entry_points(info)
        entry_points += found
        if found and not info.name.startswith("vllm-"):
            for top in {Path(row).parts[0] for row in _record(site_packages, info) if not row.startswith("..")}:
                origins.setdefault(top, f"plugin:{found[0].distribution}")
    for top, origin in sorted(origins.items()):
        for path in sorted((site_packages / top).rglob("*.py")) if (site_packages / top).is_dir() else []:
            files.append(_file(path, site_packages, origin, where, listed if origin == "vllm" else None))
    for number, folder in enumerate(pythonpath):
        for path in sorted(folder.rglob("*.py")):
            files.append(_file(path, folder, f"pythonpath:{number}", where, None))
    version = next((p.name.split("-")[1].removesuffix(".dist") for p in site_packages.glob("vllm-*.dist-info")), "")
    ours = [f for f in files if f.origin == "vllm"]
    changed = tuple(f.path for f in ours if f.path in listed and not f.stock)
    orphans = tuple(f.path for f in ours if f.path not in listed)
    missing = tuple(
        sorted(p for p in listed if p.endswith(".py") and p.startswith("vllm/") and not (site_packages / p).exists())
    )
    status = "unknown" if not listed else "changed" if changed or orphans or missing else "clean"
    return InstallTree(
        vllm_version=version,
        files=tuple(files),
        read=lambda sha: where[sha].read_bytes(),
        entry_points=tuple(entry_points),
        record=Record(status, changed, missing, orphans, len(ours)),  # type: ignore[arg-type]
    )


def tree_from_example(example: Example) -> InstallTree:
    """A rule's example as an InstallTree. Paths under ``vllm/`` are vLLM's; others belong to ``plugin:example`` if
    the example has
    entry points, to ``pythonpath:0`` if not."""
    contents = {hashlib.sha256(text.encode()).hexdigest(): text.encode() for text in example.files.values()}
    other = "plugin:example" if example.entry_points else "pythonpath:0"
    return InstallTree(
        vllm_version=example.vllm_version,
        files=tuple(
            SourceFile(
                path=path,
                sha256=hashlib.sha256(text.encode()).hexdigest(),
                size=len(text.encode()),
                origin="vllm" if path.startswith("vllm/") else other,
            )
            for path, text in sorted(example.files.items())
        ),
        read=lambda sha: contents[sha],
        entry_points=tuple(EntryPoint(g, n, v, "example", "0.0.0") for g, n, v in example.entry_points),
        record=Record("clean", files=sum(path.startswith("vllm/") for path in example.files)),
    )


def _file(path: Path, root: Path, origin: str, where: dict[str, Path], listed: dict[str, str] | None) -> SourceFile:
    data = path.read_bytes()
    sha = hashlib.sha256(data)
    where[sha.hexdigest()] = path
    name = path.relative_to(root).as_posix()
    encoded = base64.urlsafe_b64encode(sha.digest()).rstrip(b"=").decode()
    stock = listed is None or not listed or listed.get(name) == encoded
    return SourceFile(name, sha.hexdigest(), len(data), origin, stock)


def _record(site_packages: Path, info: Path | None = None) -> dict[str, str]:
    """path -> urlsafe base64 sha256, of one distribution's RECORD (vLLM's by default)."""
    folder = info or next(iter(site_packages.glob("vllm-*.dist-info")), None)
    if folder is None or not (folder / "RECORD").exists():
        return {}
    with (folder / "RECORD").open(newline="") as lines:
        return {row[0]: row[1].removeprefix("sha256=") for row in csv.reader(lines) if row}


def _entry_points(info: Path) -> list[EntryPoint]:
    if not (info / "entry_points.txt").exists():
        return []
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((info / "entry_points.txt").read_text())
    name, _, version = info.name.removesuffix(".dist-info").partition("-")
    groups = [g for g in parser.sections() if g.startswith("vllm.")]
    return [EntryPoint(g, key, value, name, version) for g in groups for key, value in parser.items(g)]
