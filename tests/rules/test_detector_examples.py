"""Every example of the rules about acceptance, trees and opaque code, and the shapes themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from rules.base import Example, Rule
from rules.cache import Cache
from rules.context import ScanContext
from rules.examples import CHAIN, ENTRY, REGISTERS, install, plugged_in
from rules.examples_walks import CHAINS, LOOKALIKES, WALKS
from rules.extraction import extract_one, units_of
from rules.facts.shapes import extract
from rules.loading import load_rules
from rules.testing import tree_from_example

IDS = ("tree-walk", "verifiers", "tree-build", "tree-mask", "tree-commit", "hybrid-tree-state", "opaque-code")
RULES = {rule.id: rule for rule in load_rules() if rule.id in IDS}
UNITS = units_of(list(RULES.values()))
CASES = [(rule, example) for rule in RULES.values() for example in (*rule.valid, *rule.invalid)]


@cache
def _facts(unit: int, path: str, source: bytes) -> Any:
    return extract_one(UNITS[unit], path, source)


def context(example: Example) -> ScanContext:
    tree = tree_from_example(example)
    rows = {
        file.sha256: {u.id: [u.sha, _facts(n, file.path, tree.read(file.sha256))] for n, u in enumerate(UNITS)}
        for file in tree.files
    }
    ctx = ScanContext(tree, rows, Cache(None), [])
    ctx.verdicts = {}
    return ctx


@pytest.mark.parametrize(("rule", "example"), CASES, ids=[f"{r.id}: {e.name}" for r, e in CASES])
def test_example(rule: Rule, example: Example) -> None:
    verdict = rule.judge(context(example))
    assert verdict.outcome == example.outcome, verdict.summary
    if example.items is not None:
        assert len(verdict.items) == example.items


def _kinds(source: str) -> set[str]:
    return {("weak " if fact.get("w") else "") + fact["k"] for fact in extract("x.py", source.encode())}


@pytest.mark.parametrize("name", WALKS)
def test_walk_is_seen_by_shape(name: str) -> None:
    assert "walk" in _kinds(WALKS[name])


@pytest.mark.parametrize("name", CHAINS)
def test_chain_is_a_chain(name: str) -> None:
    assert "chain" in _kinds(CHAINS[name])
    assert "walk" not in _kinds(CHAINS[name])


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalike_is_no_walk(name: str) -> None:
    assert "walk" not in _kinds(LOOKALIKES[name])


@pytest.mark.parametrize("name", ["knuth-morris-pratt", "union-find", "suffix-tree", "child-map", "beam-search"])
def test_lookalike_is_dismissed_with_a_reason(name: str) -> None:
    verdict = RULES["tree-walk"].judge(context(Example(name, install(LOOKALIKES[name]), "no")))
    assert any(d.file.endswith("accepting.py") and d.why for d in verdict.dismissed), verdict.dismissed


def test_names_decide_nothing() -> None:
    """The same walk with every name replaced is found, a chain in which every name says tree is not."""
    walk = WALKS["triton-child-and-sibling"]
    for old, new in (("last", "rejected"), ("hit", "flag"), ("c =", "position ="), ("accept", "chain_only")):
        walk = walk.replace(old, new) if old != "c =" else walk
    assert "walk" in _kinds(walk)
    assert "walk" not in _kinds(CHAINS["named-like-a-tree"])


def test_the_way_to_a_walk_is_told() -> None:
    example = Example("x", plugged_in(WALKS["objects"], REGISTERS["setattr on the runner"]), "yes", entry_points=ENTRY)
    verdict = RULES["tree-walk"].judge(context(example))
    assert verdict.items[0]["runner"] == "plugin"
    assert verdict.evidence[0].file == "extra/walking.py"
    assert "GPUModelRunner._sample" in " ".join(verdict.items[0]["via"])


def test_a_switch_that_is_off_is_named() -> None:
    example = next(e for e in RULES["tree-walk"].invalid if e.name == "environment is off")
    verdict = RULES["tree-walk"].judge(context(example))
    assert verdict.items[0]["off"] == "TREE"
    assert "TREE" in verdict.summary


def test_an_environment_that_switches_it_on_makes_it_a_yes() -> None:
    import dataclasses

    example = next(e for e in RULES["tree-walk"].invalid if e.name == "environment is off")
    ctx = context(example)
    ctx.tree = dataclasses.replace(ctx.tree, environment={"X_TREE": "1"})
    assert RULES["tree-walk"].judge(ctx).outcome == "yes"


def test_link_tables_of_a_compiled_op_make_it_unknown() -> None:
    import dataclasses

    from rules.tree import Binary

    source = CHAIN.replace("out = []", "import torch\n        torch.ops.kern.verify(a, b)\n        out = []")
    ctx = context(Example("op", install(source), "no"))
    schema = "kern::verify(Tensor! out, Tensor retrieve_next_token, Tensor retrieve_next_sibling, Tensor target) -> ()"
    ctx.tree = dataclasses.replace(ctx.tree, binaries=(Binary("kern.so", "0" * 64, 1, (schema,)),))
    assert RULES["tree-walk"].judge(ctx).outcome == "unknown"
    assert RULES["opaque-code"].judge(ctx).items[0]["state"] == "link tables"
