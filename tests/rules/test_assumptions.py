"""Each assumption is held against the verdicts: the result must follow them, and never claim more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reports.model import Assumption, Evidence, Scope, Verdict
from rules.assumptions import assumptions
from rules.testing import tree_from_dir
from rules.trail import RUNNERS
from rules.tree import InstallTree, SourceFile
from tests.releases import judged

SAMPLER = "vllm/v1/sample/rejection_sampler.py"
V2_SAMPLER = "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py"


class Ctx:
    def __init__(self, tree: InstallTree, *verdicts: Verdict) -> None:
        self.tree = tree
        self.verdicts: Mapping[str, Verdict] = {v.id: v for v in verdicts}

    def file(self, path: str) -> SourceFile | None:
        return next((f for f in self.tree.files if f.path == path), None)

    def evidence(self, file: SourceFile, line: int, end_line: int, symbol: str) -> Evidence:
        return Evidence(file.path, line, end_line, symbol, file.sha256, "")


@pytest.fixture
def tree(tmp_path: Path) -> InstallTree:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/a.py").write_text("class TreeThing:\n    def in_tree(self): ...\n# tree\ndef other(): ...\n")
    return tree_from_dir(tmp_path)


def five(tree: InstallTree, *verdicts: Verdict) -> tuple[Assumption, ...]:
    return assumptions(Ctx(tree, *verdicts))  # type: ignore[arg-type]


def verifiers(*items: dict[str, Any]) -> Verdict:
    return Verdict("verifiers", "yes", "found", items=items)


def function(symbol: str = "kernel", file: str = SAMPLER, runner: str = "V1", shape: str = "chain") -> dict[str, Any]:
    return {
        "symbol": symbol,
        "file": file,
        "line": 1,
        "shape": shape,
        "runner": runner,
        "reachable": True,
        "accepts": "greedy",
    }


def force(*runners: str) -> Verdict:
    return Verdict(
        "runner-in-force", "yes", "as said", items=tuple({"target": str(n), "runner": r} for n, r in enumerate(runners))
    )


def test_without_verdicts_nothing_is_claimed(tree: InstallTree) -> None:
    found = five(tree)
    assert len(found) == 5 and {a.holds for a in found} == {"unknown"}
    assert all(a.assumption and a.test and a.result for a in found)


@pytest.mark.parametrize(
    ("walk", "commit", "holds"),
    [
        ("no", "no", "no"),
        ("partial", "no", "no"),
        ("unknown", "no", "unknown"),
        ("yes", "yes", "yes"),
        ("yes", "no", "no"),
        ("yes", "unknown", "unknown"),
    ],
)
def test_existence(tree: InstallTree, walk: Any, commit: Any, holds: str) -> None:
    scope = Scope(files_parsed=3, functions_examined=1234)
    first = five(tree, Verdict("tree-walk", walk, "why", scope=scope), Verdict("tree-commit", commit, "why"))[0]
    assert first.holds == holds and "1,234 functions of 3 files" in first.test


def test_a_sentence_that_begins_with_a_path_keeps_it(tree: InstallTree) -> None:
    first, plain = (
        five(tree, Verdict("tree-walk", "yes", said))[0] for said in ("evil_plug/__init__.py:3 walks", "none walks")
    )
    assert first.result == "evil_plug/__init__.py:3 walks." and plain.result == "None walks."


def test_place(tree: InstallTree) -> None:
    assert five(tree, verifiers(function(), function(file=RUNNERS["V1"])))[1].holds == "no"
    assert five(tree, verifiers(function(file=RUNNERS["V1"])))[1].holds == "yes"
    assert five(tree, verifiers())[1].holds == "unknown"
    unreached = {**function(file=RUNNERS["V1"]), "reachable": False}
    assert five(tree, verifiers(unreached))[1].holds == "unknown"


@pytest.mark.parametrize(
    ("mask", "walk", "holds"),
    [
        ("yes", "no", "no"),
        ("partial", "no", "no"),
        ("no", "no", "unknown"),
        ("yes", "yes", "unknown"),
        ("yes", "unknown", "unknown"),
    ],
)
def test_mask_and_walk(tree: InstallTree, mask: Any, walk: Any, holds: str) -> None:
    assert five(tree, Verdict("tree-mask", mask, "m"), Verdict("tree-walk", walk, "w"))[2].holds == holds


def test_names(tree: InstallTree) -> None:
    chain = five(tree, verifiers(function(), function("tree_like")))[3]
    assert (
        chain.holds == "no"
        and chain.result.startswith("2 definitions")
        and "1 of the 2 accept functions" in chain.result
    )
    assert [e.symbol for e in chain.evidence] == ["TreeThing", "in_tree"]
    assert five(tree, verifiers(function("k3", shape="tree")))[3].holds == "no"
    assert five(tree, verifiers(function("verify_tree", shape="tree")))[3].holds == "yes"


def test_folder(tree: InstallTree) -> None:
    both = verifiers(function(), function(file=V2_SAMPLER, runner="V2"))
    stale = five(tree, both, force("V2", "V2"))[4]
    assert stale.holds == "no" and SAMPLER in stale.result and "serve V1" in stale.result
    assert five(tree, both, force("V1", "V2"))[4].holds == "no"
    assert five(tree, verifiers(function()), force("V1", "V1"))[4].holds == "yes"
    assert five(tree, both, Verdict("runner-in-force", "unknown", "?"))[4].holds == "unknown"


@pytest.mark.wheel
def test_on_releases() -> None:
    old = judged("0.20.2").assumptions
    assert [a.holds for a in old] == ["no", "no", "no", "no", "no"]
    assert "tree-mask: yes, tree-walk: no" in old[2].result and old[2].evidence[0].file.endswith("tree_attn.py")
    new = judged("0.33.0").assumptions
    assert [a.holds for a in new] == ["no", "no", "no", "no", "no"]
    assert "serve V1, which is not in force" in new[4].result
