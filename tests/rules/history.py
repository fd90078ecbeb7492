"""Real releases for the history rules: an unpacked vLLM wheel, one file of it edited, and the answers of the rules
asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import platformdirs

from reports.model import VERDICT_IDS, Scope, Verdict
from rules.base import Rule
from rules.cache import Cache, Row
from rules.context import ScanContext
from rules.extraction import Unit, extract_one, is_known
from rules.loading import load_rules
from rules.testing import tree_from_dir
from rules.tree import InstallTree

#: The rules that look at the history of fixes, in the order of a report.
HISTORY = (
    "record-integrity",
    "plugins",
    "runner-in-force",
    "spec-methods",
    "dflash-support",
    "aux-layer-offset",
    "drafter-sliding-window",
    "own-lm-head",
    "eagle-block-drop",
    "gdn-gate-gather",
    "uniform-decode-guard",
    "mamba-drop-flag",
    "lossless-only",
    "native-adapter",
)
_NEEDS = ("runner-in-force", "dflash-support")  # answers that others build on
_rows: dict[str, Row] = {}  # facts of files that many installs share
# Kept between test runs, like the wheels: a row counts only for the source of the rule that made it.
_kept = Cache(
    Path(os.environ.get("DDAUDIT_TEST_CACHE") or platformdirs.user_cache_dir("ddaudit", appauthor=False)) / "test-facts"
)


class _Context(ScanContext):
    """A scan's context without the acceptance slice, which no history rule looks at."""

    def scope(self, **changes: object) -> Scope:
        return Scope(files_seen=len(self.tree.files))


@cache
def _rules() -> dict[str, Rule]:
    return {rule.id: rule for rule in load_rules()}


def answers(tree: InstallTree, ids: Sequence[str] = HISTORY) -> dict[str, Verdict]:
    """The verdicts of these rules; facts are made for files not seen before."""
    wanted = [i for i in VERDICT_IDS if i in ids or i in _NEEDS]
    rules = [_rules()[i] for i in wanted]
    units = [Unit(r.id, r.source_sha256, r.extract, r.needles, r.paths) for r in rules if r.extract is not None]
    unseen = {file.sha256 for file in tree.files} - set(_rows)
    _rows.update(_kept.rows(unseen))
    fresh: dict[str, Row] = {}
    for file in tree.files:
        row = _rows.setdefault(file.sha256, {})
        missing = [unit for unit in units if not is_known(row, unit)]
        if missing:
            source = tree.read(file.sha256)
            for unit in missing:
                facts = extract_one(unit, file.path, source)
                assert not isinstance(facts, dict), f"{unit.id} failed on {file.path}: {facts}"
                row[unit.id] = [unit.sha, facts]
            fresh[file.sha256] = row
    _kept.put(fresh)
    context = _Context(tree, _rows, Cache(None), [])
    verdicts: dict[str, Verdict] = {}
    context.verdicts = verdicts
    for rule in rules:
        verdicts[rule.id] = rule.judge(context)
    return verdicts


@cache
def _tree(folder: Path) -> InstallTree:
    return tree_from_dir(folder)


def release(wheel_tree: Callable[[str], Path], version: str) -> InstallTree:
    """The published wheel of a version."""
    return _tree(wheel_tree(version))


def edited(tree: InstallTree, path: str, *changes: tuple[str, str]) -> InstallTree:
    """The install with ``old`` replaced by ``new`` in one file; each ``old`` must be there."""
    file = next(f for f in tree.files if f.path == path)
    text = tree.read(file.sha256).decode()
    for old, new in changes:
        assert old in text, f"{path} no longer holds {old!r}"
        text = text.replace(old, new)
    return with_file(tree, path, text)


def with_file(tree: InstallTree, path: str, text: str) -> InstallTree:
    """The install with this file in place of (or besides) what is there."""
    data = text.encode()
    sha = hashlib.sha256(data).hexdigest()
    base = next((f for f in tree.files if f.path == path), dataclasses.replace(tree.files[0], path=path))
    fresh = dataclasses.replace(base, sha256=sha, size=len(data), stock=False)
    read = tree.read
    return dataclasses.replace(
        tree,
        files=(*(f for f in tree.files if f.path != path), fresh),
        read=lambda wanted: data if wanted == sha else read(wanted),
    )


def without_file(tree: InstallTree, path: str) -> InstallTree:
    assert any(f.path == path for f in tree.files)
    return dataclasses.replace(tree, files=tuple(f for f in tree.files if f.path != path))


def in_environment(tree: InstallTree, **variables: str) -> InstallTree:
    return dataclasses.replace(tree, environment=variables)
