"""Fused kernels: equal to their twins in Triton's interpreter (tests/kernels compiles them for four GPUs)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


# A hybrid's rounds (kernel_rounds_check.py qwen3_5) take minutes in the interpreter: they are for a GPU.
@pytest.mark.parametrize("command", [["fused_check.py"], ["kernel_rounds_check.py", "qwen3-sliding"]])
def test_kernels_equal_plain_torch_in_the_interpreter(command: list[str]) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    argv = [sys.executable, str(HERE / command[0]), *command[1:]]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
