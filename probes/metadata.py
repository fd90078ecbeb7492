"""The metadata that installed distributions leave: RECORD, entry points, what runs when Python starts.

The standard library alone."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import os
import re
import stat
import sys
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

MAX_METADATA = 16 << 20


def parse_record(text: str) -> Dict[str, str]:
    """path -> sha256 in hex ("" where RECORD gives none) of a RECORD file (PEP 376)."""
    record = {}
    for row in csv.reader(io.StringIO(text)):
        if not row or row[0].endswith(".pyc"):
            continue
        value = row[1] if len(row) > 1 else ""
        digest = ""
        if value.startswith("sha256="):
            try:
                digest = base64.urlsafe_b64decode(value[7:] + "=" * (-len(value[7:]) % 4)).hex()
            except ValueError:
                digest = "unreadable"
        record[row[0].replace("\\", "/")] = digest
    return record


def parse_entry_points(text: str) -> Iterator[Tuple[str, str, str]]:
    """(group, name, value) of an entry_points.txt."""
    group = ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group and "=" in line and not line.startswith(("#", ";")):
            name, value = line.split("=", 1)
            yield group, name.strip(), value.split("[")[0].strip()


def read_text(path: str) -> str:
    """The text of a small file, "" when it isn't there."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        with open(path, "rb") as file:
            return file.read(MAX_METADATA).decode("utf-8", "replace")
    except OSError:
        return ""


def name_and_version(folder: str) -> Tuple[str, str]:
    """Name (normalized, PEP 503) and version that a dist-info folder's METADATA states, else the ones in its name."""
    name, _, version = os.path.basename(folder).rsplit(".", 1)[0].partition("-")
    for line in (read_text(folder + "/METADATA") or read_text(folder + "/PKG-INFO")).splitlines():
        if not line.strip():
            break
        if line.startswith("Name:"):
            name = line[5:].strip()
        elif line.startswith("Version:"):
            version = line[8:].strip()
    return re.sub(r"[-_.]+", "-", name).lower(), version


def distributions(path: Iterable[str]) -> Iterator[str]:
    """The metadata folders of the distributions on ``path``, the first of a name wins as it does for Python."""
    seen = set()
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                key = re.sub(r"[-_.]+", "-", name.rsplit(".", 1)[0].split("-")[0]).lower()
                if key not in seen:
                    seen.add(key)
                    yield os.path.join(folder, name)


def editable_of(metadata: str) -> str:
    """The line of a distribution's direct_url.json when it is installed in editable mode, else ""."""
    text = read_text(metadata + "/direct_url.json")
    if not re.search(r'"editable"\s*:\s*true', text):
        return ""
    url = re.search(r'"url"\s*:\s*"([^"]*)"', text)
    name = os.path.basename(metadata)
    return "%s: editable install of %s" % (
        name,
        re.sub(r"//[^/@]*@", "//", url.group(1)) if url else "an unnamed folder",
    )


def injected_by(path: Iterable[str]) -> Tuple[List[str], List[str]]:
    """(what runs when Python starts, as text; the modules named there): .pth lines that import, sitecustomize,
    usercustomize."""
    lines, modules = [], []
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith(".pth"):
                for line in read_text(os.path.join(folder, name)).splitlines():
                    if line.startswith(("import ", "import\t")):
                        lines.append("%s: %s" % (name, line.strip()[:300]))
                        modules += re.findall(r"\bimport\s+([A-Za-z_]\w*)", line) + re.findall(
                            r"__import__\(['\"](\w+)", line
                        )
            elif name in ("sitecustomize.py", "usercustomize.py"):
                lines.append(os.path.join(folder, name))
                modules.append(name[:-3])
    standard = getattr(
        sys, "stdlib_module_names", frozenset(sys.builtin_module_names) | {"os", "sys", "types", "importlib"}
    )
    return lines, [name for name in dict.fromkeys(modules) if name not in standard]


def where(name: str) -> Optional[Tuple[str, str]]:
    """(root, path below it) of an importable top-level package or module, found without importing it; None for
    namespaces and built-ins."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        folder = next(iter(spec.submodule_search_locations))
        return os.path.split(os.path.abspath(folder))
    if spec.origin and spec.origin.endswith(".py"):
        return os.path.split(os.path.abspath(spec.origin))
    return None
