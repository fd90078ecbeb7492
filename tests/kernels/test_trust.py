"""The kernels' check of themselves: it passes when they are right, fails when they are not, and then the twin
serves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ddtree import gdn as twin

pytest.importorskip("triton")

from ddtree.kernels import gdn, trust

RUN = """
import torch
from ddtree.kernels import gdn, trust
{change}
trust.check(torch.device("cpu"))
"""


def run(change=""):
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    return subprocess.run([sys.executable, "-c", RUN.format(change=change)], env=env, capture_output=True, text=True)


def test_right_kernels_pass():
    done = run()
    assert done.returncode == 0, done.stderr


def test_a_wrong_kernel_is_caught():
    wrong = "right = gdn.launch_verify\ngdn.launch_verify = lambda *a: (right(*a)[0] * 1.0001, right(*a)[1])"
    done = run(wrong)
    assert done.returncode == 1
    assert "ArithmeticError: outputs of a 1-node tree are off by 1.0e-04" in done.stderr


def test_a_failed_check_is_said_once_and_the_twin_serves(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Test GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    trust.distrust.cache_clear()
    device = torch.device("cuda", 7)  # no such card here: the child fails for real
    try:
        assert not gdn.trusted(device)
        assert not gdn.trusted(device)
    finally:
        trust.distrust.cache_clear()
    said = capsys.readouterr().err
    assert said.count("ddtree: GDN layers in plain torch") == 1 and "Test GPU" in said
    assert not list(tmp_path.iterdir())

    called = []
    monkeypatch.setattr(gdn, "trusted", lambda _: False)
    monkeypatch.setattr(twin, "commit", lambda *a: called.append(a))
    gdn.commit(None, torch.zeros(1), torch.zeros(1), None, None)
    assert len(called) == 1
