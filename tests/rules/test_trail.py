"""The trail: real commands whose real output is what the report says, on releases and on installs made here."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from probes.op_schemas import Scanner
from reports.model import Evidence, Scope, TrailStep, Verdict
from rules import grep
from rules.testing import tree_from_dir
from rules.trail import RUNNERS, trail
from rules.tree import Binary, InstallTree
from tests.releases import judged, release, unpacked

RELEASES = ("0.20.2", "0.33.0")


class Ctx:
    """A context with verdicts made by hand: what the trail asks of one."""

    def __init__(self, tree: InstallTree, *verdicts: Verdict) -> None:
        self.tree = tree
        self.verdicts: Mapping[str, Verdict] = {v.id: v for v in verdicts}

    def file(self, path: str) -> Any:
        return next((f for f in self.tree.files if f.path == path), None)


def shell(command: str, folder: Path) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, env=environment, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [line.decode("utf-8", "backslashreplace") for line in done.stdout.split(b"\n")[:-1]]


def agrees(step: TrailStep, folder: Path) -> None:
    printed = shell(step.command, folder)
    assert len(printed) == step.hits, step.command
    assert len({line.split(":")[0] for line in printed}) == step.files, step.command
    assert {line[:300] for line in printed} >= set(step.sample), step.command
    assert bool(step.sample) is bool(step.hits)


@pytest.mark.wheel
@pytest.mark.parametrize("version", RELEASES)
def test_every_grep_prints_what_the_trail_says(version: str) -> None:
    steps = trail(Ctx(release(version)))  # type: ignore[arg-type]
    scopes = [step.scope for step in steps]
    assert (
        "`vllm/v1`" in scopes and "`spec_decode/`" in scopes and "`eagle/`" in scopes and "the whole install" in scopes
    )
    for step in steps:
        if step.scope != "binaries":
            agrees(step, unpacked(version))


@pytest.mark.wheel
def test_the_search_on_0_20_2() -> None:
    """Greps that print nothing, tree attention that is there, the walk that is not."""
    judgement = judged("0.20.2")
    verdicts = {v.id: v for v in judgement.verdicts}
    steps = {step.scope: step for step in judgement.trail}
    runner = steps["the model runner's file (V1)"]
    assert (runner.hits, runner.command.endswith(RUNNERS["V1"])) == (0, True)
    assert runner.proves.startswith("Nothing.")
    assert steps["`eagle/`"].hits == 0
    assert steps["the whole install, known names"].hits == 0
    engine = steps["`vllm/v1`"]
    assert engine.hits == 116 and "tree attention is there (`vllm/v1/attention/backends/tree_attn.py:" in engine.proves
    assert "a drafter does propose a tree (`vllm/v1/spec_decode/llm_base_proposer.py:" in steps["`spec_decode/`"].proves
    assert verdicts["tree-mask"].outcome == "yes" and verdicts["tree-build"].outcome == "yes"
    assert verdicts["tree-walk"].outcome == "no"
    assert verdicts["tree-walk"].summary in judgement.trail[-1].adds


@pytest.mark.wheel
def test_a_whole_install_is_read_fast() -> None:
    tree = release("0.33.0")
    best = 9.0
    for _ in range(3):
        grep._kept.clear()
        begun = time.process_time()
        trail(Ctx(tree))  # type: ignore[arg-type]
        best = min(best, time.process_time() - begun)
    assert best < 1.0  # 0.25 s where nothing else runs; this only catches a return to seconds


def _install(root: Path, files: Mapping[str, bytes]) -> InstallTree:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return tree_from_dir(root)


def test_odd_files_count_as_grep_counts_them(tmp_path: Path) -> None:
    tree = _install(
        tmp_path,
        {
            "vllm/v1/empty.py": b"",
            "vllm/v1/no_newline.py": b"x = 1\ntree = Tree(TREE)",
            "vllm/v1/crlf.py": b"# a tree\r\n\r\n# sub-TREE\r\n",
            "vllm/v1/latin.py": b"# \xe9\xff arbre, tree\n# tree \xff\n",
            "vllm/v1/nul.py": b"tree\x00\n\x00tree\n\n",
            "vllm/v1/cr.py": b"tree\rtree\ntree\n",
            "vllm/v1/spec_decode/blank.py": b"\n\n\n   tree\n\ntree\n\n",
            "vllm/treehouse/none.py": b"nothing here\n",
            "vllm/a tree.txt": b"tree\n",
        },
    )
    for step in trail(Ctx(tree)):  # type: ignore[arg-type]
        if step.scope != "binaries":
            agrees(step, tmp_path)


def test_plugins_are_counted_from_their_metadata(tmp_path: Path) -> None:
    info = tmp_path / "my_plugin-1.0.dist-info"
    files = {
        "vllm/__init__.py": b"",
        f"{info.name}/entry_points.txt": b"[console_scripts]\na = b:c\n\n[vllm.general_plugins]\nx = mine:go\n",
        f"{info.name}/RECORD": b"mine.py,,\n",
        f"{info.name}/METADATA": b"Name: my-plugin\nVersion: 1.0\n",
        "mine.py": b"def go(): ...\n",
    }
    tree = _install(tmp_path, files)
    step = next(s for s in trail(Ctx(tree)) if s.scope == "plugins")  # type: ignore[arg-type]
    agrees(step, tmp_path)
    assert step.hits == 1 and "can replace anything" in step.proves


def test_operators_are_judged_by_their_arguments(tmp_path: Path) -> None:
    import dataclasses

    tree = _install(tmp_path, {"vllm/__init__.py": b""})
    plain = Binary("vllm/_C.so", "0" * 64, 1, ("silu(Tensor a) -> Tensor",))
    links = Binary("vllm/_T.so", "1" * 64, 1, ("ns::go(Tensor! out, Tensor retrive_next_token) -> ()",))
    opaque = Binary("vllm/_X.so", "2" * 64, 1, None)

    def step(*binaries: Binary) -> TrailStep:
        return trail(Ctx(dataclasses.replace(tree, binaries=binaries)))[-1]  # type: ignore[arg-type]

    assert step().proves == "Nothing: this target has no compiled files."
    assert step(plain).hits == 0 and "none of the 1 operators" in step(plain).proves
    assert step(plain, links).hits == 1
    assert "1 library could not be read" in step(plain, opaque).proves


def test_operators_are_found_as_a_shell_finds_them(tmp_path: Path) -> None:
    import dataclasses

    body = b"\x7fELF\x00silu(Tensor a) -> Tensor\x00\x01go(Tensor! out, Tensor\n  retrive_next_token, int n) -> ()\x00"
    body += b"ns::walk(Tensor parent) -> Tensor\x00TreeVisitor2x(tree)\x00go_tree(Tensor a) -> ()\x00" * 2
    tree = _install(tmp_path, {"vllm/__init__.py": b"", "vllm/_C.so": body})
    scanner = Scanner()
    scanner.feed(body)
    binary = Binary("vllm/_C.so", "0" * 64, len(body), tuple(scanner.schemas()))
    step = trail(Ctx(dataclasses.replace(tree, binaries=(binary,))))[-1]  # type: ignore[arg-type]
    assert shell(step.command, tmp_path) == list(step.sample) and step.hits == 2


def test_what_a_hit_proves_follows_the_verdicts(tmp_path: Path) -> None:
    tree = _install(tmp_path, {"vllm/v1/attention/t.py": b"tree = 1\n", "vllm/v1/spec_decode/p.py": b"tree = 1\n"})
    where = Evidence("vllm/v1/attention/t.py", 1, 1, "t", "0" * 64, "")
    mask = Verdict("tree-mask", "yes", "there", evidence=(where,))
    build = Verdict("tree-build", "yes", "there", evidence=(where,))
    with_both = {s.scope: s for s in trail(Ctx(tree, mask, build))}  # type: ignore[arg-type]
    without = {s.scope: s for s in trail(Ctx(tree))}  # type: ignore[arg-type]
    assert "tree attention is there" in with_both["`vllm/v1`"].proves
    assert "tree attention" not in without["`vllm/v1`"].proves
    elsewhere = Verdict("tree-mask", "partial", "there", evidence=(Evidence("vllm/x.py", 3, 3, "t", "0" * 64, ""),))
    named = {s.scope: s for s in trail(Ctx(tree, elsewhere))}["`vllm/v1`"]  # type: ignore[arg-type]
    assert "under another name, tree attention is there in part (`vllm/x.py:3`)" in named.proves
    assert "does propose a tree" in with_both["`spec_decode/`"].proves
    assert "does propose a tree" not in without["`spec_decode/`"].proves


def test_the_last_step_says_what_grep_cannot(tmp_path: Path) -> None:
    tree = _install(tmp_path, {"vllm/__init__.py": b""})
    walk = Verdict(
        "tree-walk", "no", "no function walks.", scope=Scope(files_seen=2, files_parsed=2, functions_examined=1234)
    )
    last = trail(Ctx(tree, walk))[-1]  # type: ignore[arg-type]
    assert "1,234 functions of 2 files" in last.adds and "no function walks." in last.adds
