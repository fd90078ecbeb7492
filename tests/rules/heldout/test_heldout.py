"""Held-out check of the tree-walk answer by somebody who has not read the detector: walks, dead walks, look-alikes."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from heldout_install import MOUNTS, Mount, base, dead, lookalike
from heldout_lookalikes import LOOKALIKES, LookAlike
from heldout_unreachable import DEAD, Dead
from heldout_walks import RANDOM_WALKS, WALKS, Walk

from reports.model import Verdict
from rules.engine import judge
from rules.tree import InstallTree

WheelFile = Callable[[str], Path]
VERSIONS = ("0.20.2", "0.23.0", "0.33.0")

#: Cases that the detector gets wrong today, with what is known about them: strict, so that a repair shows.
KNOWN: dict[str, str] = {
    "callbacks-over-three-files-subclass_registered-0.20.2": "no: a loop that is handed a closure which searches",
    "sentinel-iterator-inline-0.20.2": "no: iter(object, sentinel), where calling the object moves it along the tree",
    "named-trie-of-bad-words": "rightly no, but the trie that is followed beside the draft tokens is not dismissed",
}


def _marked(case: str, *values: Any) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=KNOWN[case])] if case in KNOWN else []
    return pytest.param(*values, id=case, marks=[*marks, pytest.mark.wheel])


def _mounted() -> list[Any]:
    """Every walk in one place; every place with two or three walks."""
    cases = []
    for number, walk in enumerate((*WALKS, *RANDOM_WALKS)):
        usable = [m for m in MOUNTS if not (walk.helpers and m[1].__name__ in ("inline", "pythonpath_shadow"))]
        version, mount = usable[number % len(usable)]
        cases.append(_marked(f"{walk.name}-{mount.__name__}-{version}", walk, mount, version))
    return cases


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One facts cache for all cases: a case parses only what it changes."""
    return tmp_path_factory.mktemp("heldout-facts")


def _verdicts(tree: InstallTree, facts: Path) -> dict[str, Verdict]:
    return {verdict.id: verdict for verdict in judge(tree, cache=facts).verdicts}


def _told(verdicts: dict[str, Verdict]) -> str:
    walk = verdicts["tree-walk"]
    places = [f"{e.file}:{e.line} {e.symbol}" for e in walk.evidence]
    return (
        f"{walk.outcome}: {walk.summary} {places} dismissed: {[(d.file, d.symbol, d.why) for d in walk.dismissed][-4:]}"
    )


@pytest.mark.wheel
@pytest.mark.parametrize("version", VERSIONS)
def test_release_has_no_walk(version: str, wheel_file: WheelFile, facts: Path) -> None:
    verdicts = _verdicts(base(version, wheel_file(version)).tree(), facts)
    assert verdicts["tree-walk"].outcome == "no", _told(verdicts)


@pytest.mark.parametrize(("walk", "mount", "version"), _mounted())
def test_walk_is_found(walk: Walk, mount: Mount, version: str, wheel_file: WheelFile, facts: Path) -> None:
    verdicts = _verdicts(mount(base(version, wheel_file(version)), walk).tree(), facts)
    assert verdicts["tree-walk"].outcome == "yes", _told(verdicts)


#: What is asked here is whether the walk can run, so these are walks whose shape is in every textbook.
PLAIN_WALKS = [
    walk
    for walk in WALKS
    if walk.name
    in ("triton-child-sibling-terse", "generator-over-dicts", "pointer-doubling", "edge-dictionary", "node-objects")
]
DEAD_WALKS = [(way, PLAIN_WALKS[number % len(PLAIN_WALKS)]) for number, way in enumerate(DEAD)]


@pytest.mark.parametrize(
    ("way", "walk", "version"),
    [
        _marked(f"{way.name}-{walk.name}", way, walk, VERSIONS[number % 3])
        for number, (way, walk) in enumerate(DEAD_WALKS)
    ],
)
def test_dead_walk_is_partial(way: Dead, walk: Walk, version: str, wheel_file: WheelFile, facts: Path) -> None:
    verdicts = _verdicts(dead(base(version, wheel_file(version)), walk, way).tree(), facts)
    assert verdicts["tree-walk"].outcome == "partial", _told(verdicts)


@pytest.mark.parametrize(
    ("like", "version"), [_marked(like.name, like, VERSIONS[n % 3]) for n, like in enumerate(LOOKALIKES)]
)
def test_lookalike_is_no(like: LookAlike, version: str, wheel_file: WheelFile, facts: Path) -> None:
    install, _ = lookalike(base(version, wheel_file(version)), like)
    verdicts = _verdicts(install.tree(), facts)
    assert verdicts["tree-walk"].outcome == "no", _told(verdicts)


@pytest.mark.parametrize(
    ("like", "version"),
    [_marked(f"named-{like.name}", like, VERSIONS[n % 3]) for n, like in enumerate(LOOKALIKES) if like.named],
)
def test_lookalike_is_named(like: LookAlike, version: str, wheel_file: WheelFile, facts: Path) -> None:
    install, path = lookalike(base(version, wheel_file(version)), like)
    verdicts = _verdicts(install.tree(), facts)
    named = {d.file for verdict in verdicts.values() for d in verdict.dismissed}
    named |= {str(item.get("file")) for item in verdicts["verifiers"].items}
    assert path in named, _told(verdicts)


@dataclass
class Links:
    """The tables that the walks read, for a batch of random trees."""

    draft: Any
    best: Any
    answer: list[list[int]]
    tables: types.SimpleNamespace


def _forest(seed: int, rows: int, nodes: int) -> Links:
    torch = pytest.importorskip("torch")
    dice = random.Random(seed)
    parent, depth, tokens, kids = [], [], [], []
    for _ in range(rows):
        up, deep, token, below = [-1], [0], [50], [{}]
        while len(up) < nodes:
            at, word = dice.randrange(len(up)), dice.randrange(3)
            if deep[at] < 4 and word not in below[at]:
                below[at][word] = len(up)
                up.append(at)
                deep.append(deep[at] + 1)
                token.append(word)
                below.append({})
        parent.append(up), depth.append(deep), tokens.append(token), kids.append(below)
    best = [[dice.randrange(3) for _ in range(nodes)] for _ in range(rows)]
    answer = []
    for row in range(rows):
        node, line = 0, []
        while node is not None:
            line.append(best[row][node])
            node = kids[row][node].get(best[row][node])
        answer.append(line)
    first, following = torch.full((rows, nodes), -1), torch.full((rows, nodes), -1)
    wide = torch.full((rows, nodes, 3), -1)
    mask = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    leaves = []
    for row in range(rows):
        lines = []
        for node in range(nodes):
            children = sorted(kids[row][node].values())
            wide[row, node, : len(children)] = torch.tensor(children, dtype=torch.long)
            for a, b in zip([None, *children], children, strict=False):
                if a is None:
                    first[row, node] = b
                else:
                    following[row, a] = b
            line, at = [], node
            while at >= 0:
                mask[row, node, at] = True
                line.append(at)
                at = parent[row][at]
            if not children:
                lines.append(line[::-1])
        leaves.append(lines)
    paths = torch.full((rows, max(map(len, leaves)), 6), -1)
    for row, lines in enumerate(leaves):
        for number, line in enumerate(lines):
            paths[row, number, : len(line)] = torch.tensor(line)
    tables = types.SimpleNamespace(
        parent=torch.tensor(parent),
        depth=torch.tensor(depth),
        child=first,
        sibling=following,
        kids=wide,
        mask=mask,
        paths=paths,
        tries=kids,
    )
    return Links(torch.tensor(tokens), torch.tensor(best), answer, tables)


@pytest.mark.parametrize("walk", [pytest.param(walk, id=walk.name) for walk in WALKS if not walk.gpu])
def test_walk_is_a_walk(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests call a tree walk returns what the tree and the target say."""
    monkeypatch.setitem(sys.modules, "heldout_links", types.ModuleType("heldout_links"))
    for name, text in [*walk.helpers.items(), ("core", walk.source)]:
        module = types.ModuleType(f"heldout_links.{name}")
        module.__package__ = "heldout_links"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, f"{walk.name}/{name}.py", "exec"), module.__dict__)
    accept = sys.modules["heldout_links.core"].__dict__[walk.entry]
    for seed in range(20):
        links = _forest(seed, rows=3, nodes=12)
        rows = accept(links.draft.clone(), links.best.clone(), links.tables).tolist()
        assert [[token for token in row if token >= 0] for row in rows] == links.answer
