"""The facts of known releases, shipped with the package, so that a stock install is answered without parsing anything.

``python -m rules.pack [--cache=DIR] SITE_PACKAGES...`` makes it anew: one unpacked wheel a folder; what DIR holds
isn't made again. A unit's facts are used only while its source is the
one that they were made with (rules.extraction.read_pack), so an old pack costs time, never correctness."""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rules.cache import Cache
from rules.engine import judge
from rules.extraction import PACK, graph_unit, units_of
from rules.loading import load_rules
from rules.testing import tree_from_dir


def make_pack(folders: Sequence[Path], cache: Path) -> bytes:
    """The pack of these installs. ``cache`` keeps facts between attempts."""
    units = {u.id: u.sha for u in [*units_of(load_rules()), graph_unit()]}
    seen: dict[str, str] = {}
    facts: dict[str, dict[str, Any]] = {}
    for folder in folders:
        tree = tree_from_dir(folder)
        judge(tree, cache=cache)
        store = Cache(cache)
        rows = store.rows({f.sha256 for f in tree.files})
        store.close()
        for file in tree.files:
            row = rows.get(file.sha256, {})
            if "graph" in row and isinstance(row["graph"][1], list):
                row["graph"][1] = [_slim(row["graph"][1][0])]
            short = file.sha256[:16]
            found = {name: entry[1] for name, entry in row.items() if units.get(name) == entry[0] and entry[1]}
            seen[short] = file.path
            if found:
                facts[short] = found
    order = sorted(seen, key=lambda short: (seen[short], short))  # versions of one file side by side pack best
    body = {"units": units, "seen": order, "facts": {short: facts[short] for short in order if short in facts}}
    text = json.dumps(body, separators=(",", ":")).encode()
    return lzma.compress(text, preset=9)


def _slim(graph: dict[str, Any]) -> dict[str, Any]:
    """A file's graph without what following it does not need: lines of calls, references that repeat a call, long
    constants."""
    functions: dict[str, Any] = {}
    for qual, function in graph["functions"].items():
        calls = {(name, tuple(under)): [name, 0, under] for name, _, under in function["c"]}
        refs = {(name, tuple(under)): [name, 0, under] for name, _, under in function["r"]}
        kept = [ref for key, ref in refs.items() if key not in calls]
        functions[qual] = {"c": list(calls.values()), "r": kept} | {k: function[k] for k in ("o", "x") if k in function}
    consts = {name: text for name, text in graph["consts"].items() if len(text) < 80}
    return {"imports": graph["imports"], "classes": graph["classes"], "consts": consts, "functions": functions}


def main(folders: list[str]) -> int:
    if not folders:
        print("usage: python -m rules.pack [--cache=DIR] SITE_PACKAGES...", file=sys.stderr)
        return 2
    kept = Path(folders.pop(0).removeprefix("--cache=")) if folders[0].startswith("--cache=") else None
    with tempfile.TemporaryDirectory() as scratch:
        packed = make_pack([Path(f) for f in folders], kept or Path(scratch))
    PACK.parent.mkdir(exist_ok=True)
    PACK.write_bytes(packed)
    print(f"{PACK}: {len(packed):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
