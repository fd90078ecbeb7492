"""Seams: the checker itself, then every adapter against the published source that it claims."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from ddtree.native.__main__ import main
from ddtree.native.adapters import SEAMS, fit, load_adapters, problem_of

SOURCE = '''
import os
if True:
    class Base: ...
class Runner(Base):
    positions: int
    def __init__(self, config, *, device=None):
        self.drafter = config
    def step(self, batch, **extra):
        self.prepare(batch)
        with open(batch):
            self.sample(self.forward(batch))
    @property
    def slots(self): return 1
'''


def seam(kind, qualname, **more):
    return {"file": "m.py", "kind": kind, "qualname": qualname, **more}


@pytest.mark.parametrize(
    "which, problem",
    [
        (seam("class", "Runner", bases=["Base"]), None),
        (seam("class", "Base"), None),
        (seam("class", "Runner", bases=["Mixin"]), "no longer derives from Mixin"),
        (seam("class", "Gone"), "Gone is gone"),
        (seam("method", "Runner.__init__", params=["self", "config", "*", "device"]), None),
        (seam("method", "Runner.__init__", params=["self", "config"]), r"takes \(self, config, \*, device\)"),
        (seam("method", "Runner.step", params=["self", "batch", "**extra"]), None),
        (seam("method", "Runner.stop"), "is gone"),
        (seam("attribute", "Runner.drafter"), None),
        (seam("attribute", "Runner.positions"), None),
        (seam("attribute", "Runner.slots"), None),
        (seam("attribute", "os"), None),
        (seam("attribute", "Runner.batch"), "Runner.batch is gone"),
        (seam("call", "Runner.step", calls=["prepare", "forward"]), None),
        (seam("call", "Runner.step", calls=["forward", "prepare"]), "in another order"),
        (seam("call", "Runner.step", calls=["prepare", "walk"]), "no longer calls walk"),
    ],
)
def test_one_seam(which, problem):
    found = problem_of(ast.parse(SOURCE), which)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(problem, found), found


def test_the_data_file_is_what_others_may_read():
    data = json.loads(SEAMS.read_text())
    assert data["schema"] == 1
    for adapter in data["adapters"]:
        assert {"line", "module", "proven", "seams"} <= set(adapter)
        for s in adapter["seams"]:
            assert s["kind"] in ("class", "method", "function", "attribute", "call")
            assert s["file"].startswith("vllm/") and s["qualname"]


@pytest.mark.wheel
@pytest.mark.parametrize(
    "version, line, proven",
    [
        ("0.23.0", "0.23.0", True),
        ("0.22.0", "0.22.0", False),
        ("0.24.0", "0.24.0", False),
        ("0.25.1", "0.24.0", False),
        ("0.20.2", "0.20.2", False),
        ("0.21.0", "0.20.2", False),
        ("0.26.0", "0.26.0", False),
        ("0.28.0", None, False),
        ("0.33.0", None, False),
    ],
)
def test_published_source(wheel_tree, version, line, proven):
    result = fit(wheel_tree(version))
    assert (result.version, result.line, result.proven) == (version, line, proven), result.missing
    assert bool(result.missing) == (line is None)


@pytest.mark.wheel
def test_a_moved_seam_is_named_and_the_exit_code_says_no(wheel_tree, tmp_path, capsys):
    """The real files with one call renamed: refused, and the sentence names file and function."""
    source = wheel_tree("0.23.0")
    files = {s["file"] for a in load_adapters() for s in a.seams}
    for name in files:
        if (source / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, tmp_path / name)
    shutil.copytree(source / "vllm-0.23.0.dist-info", tmp_path / "vllm-0.23.0.dist-info")
    assert main(["check", "--site", str(tmp_path)]) == 0
    runner = tmp_path / "vllm/v1/worker/gpu_model_runner.py"
    runner.write_text(runner.read_text().replace("def _prepare_inputs(", "def _prepare_all_inputs("))
    capsys.readouterr()
    assert main(["check", "--site", str(tmp_path), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["line"] is None
    assert any("GPUModelRunner._prepare_inputs is gone" in m for m in answer["missing"])
    runner.write_text("def broken(:\n")
    assert main(["check", "--site", str(tmp_path)]) == 1
    assert "missing or unreadable" in capsys.readouterr().out


def test_no_vllm_is_another_exit_code(tmp_path, capsys):
    assert main(["check", "--site", str(tmp_path)]) == 3
    assert "no vllm folder" in capsys.readouterr().err
    assert Path(SEAMS).is_file()
