"""Audits that were made: kept in the state folder, readable by their owner alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

from audit_cli.console import Console
from audit_cli.disk import in_words, naming
from audit_cli.errors import usage
from audit_cli.store import write_atomic
from reports.model import Audit, audit_from_json, to_json


def keep(audit: Audit, folder: Path) -> Path:
    """Write the audit and return where. Its name is its id: time, target, and a number when there is one already."""
    stamp = re.sub(r"[-:]|\+00:00|\.\d+", "", audit.made.at).replace("T", "-")[:15]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", audit.target.spec.rstrip("/").rsplit("/", 1)[-1]).strip("-.")[:60]
    data = json.dumps(to_json(audit), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, number = folder / f"{stamp}-{slug}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stamp}-{slug}-{number}.json"
    write_atomic(path, data)
    return path


def keep_or_warn(audit: Audit, folder: Path, console: Console) -> Path | None:
    """``keep``, but a folder that can't be written costs only the copy, not the answer that was just made."""
    try:
        return keep(audit, folder)
    except OSError as error:
        said = in_words(error)
        console.warn(f"the audit is not kept: {said.what} ({said.why}); {said.hint}")
        return None


def find(name: str, folder: Path) -> Path:
    """The file of an audit: a path, ``last``, or the beginning of an id. Raises DdauditError (exit 2)."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    kept = sorted(folder.glob("*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name))
    if name == "last":
        if not kept:
            raise usage("there is no audit yet", f"{folder} is empty", "make one with `ddaudit scan TARGET`")
        return kept[-1]
    found = [path for path in kept if path.name.startswith(name)]
    exact = [path for path in found if path.stem == name]  # one id may be the beginning of another
    if exact or len(found) == 1:
        return (exact or found)[0]
    if found:
        raise usage(
            f"{len(found)} audits begin with {name}",
            ", ".join(p.stem for p in found[:5]),
            "write more of the one that you mean",
        )
    raise usage(
        f"no audit {name[:100]}",
        f"it is no file, and none in {folder} begins so",
        "`last`, or a .json file that --json made",
    )


def load(path: Path) -> Audit:
    """Raises DdauditError (exit 2) when the file is no audit."""
    try:
        return audit_from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise usage(
            f"{path} is not an audit", str(error)[:200], "give a file that `ddaudit scan --json` wrote"
        ) from None
