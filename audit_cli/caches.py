"""``ddaudit cache``: what is kept, removing it, filling it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

from audit_cli.console import Console
from audit_cli.errors import DONE, usage
from audit_cli.paths import cache_dir

_PARTS = {
    "wheels": "published wheels",
    "files": "sources of hosts, by hash",
    "facts": "facts per file, and judgements",
    "schemas": "op schemas of binaries",
    "indexes": "what hosts, folders and wheels hold",
}


def info(as_json: bool) -> int:
    folder = cache_dir()
    parts = {}
    for name in _PARTS:
        files = [path.stat().st_size for path in (folder / name).rglob("*") if path.is_file()]
        parts[name] = {"files": len(files), "bytes": sum(files)}
    if as_json:
        print(json.dumps({"folder": str(folder), "parts": parts}, indent=2))
        return DONE
    print(folder)
    for name, meaning in _PARTS.items():
        print(f"  {name:8} {parts[name]['files']:>7,} files {parts[name]['bytes'] / 1e6:>9,.1f} MB  {meaning}")
    return DONE


def clear(wheels: bool) -> int:
    folder = cache_dir()
    if not folder.is_dir():
        print(f"nothing to clear: {folder} does not exist")
        return DONE
    for name in _PARTS:
        part = folder / name
        if (name == "wheels" and not wheels) or not part.is_dir():
            continue
        if part.is_symlink():
            print(f"{part} is a link: what it leads to is kept")
        else:
            shutil.rmtree(part)
    print(f"cleared {folder}" + ("" if wheels else " (wheels are kept: --wheels removes them too)"))
    return DONE


def warm(targets: Sequence[str], console: Console) -> int:
    """Judge each release once; the facts stay."""
    from audit_cli.opening import Options
    from audit_cli.scan import scan_target
    from audit_cli.targets import parse

    specs = [parse(text) for text in targets]
    for spec in specs:
        if spec.kind not in ("pypi", "wheel"):
            raise usage(
                f"{spec.text} is no release",
                "only releases and wheels are read ahead",
                "warm pypi:vllm==VERSION or wheel:FILE",
            )
    for spec in specs:
        audit = scan_target(spec, Options(cache_dir()), console)
        print(f"{spec.text}: {audit.made.files_parsed_now:,} files read in {audit.made.seconds:.1f} s")
    return DONE
