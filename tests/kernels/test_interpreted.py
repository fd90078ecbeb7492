"""Every kernel against its twin in Triton's interpreter, in a process of its own: the mode is fixed at import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.interpret import CHECKS

pytest.importorskip("triton")


@pytest.mark.parametrize("name", CHECKS)
def test_kernel_equals_its_twin(name):
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, "-m", "tests.kernels.interpret", name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_kernel_equals_its_twin_on_the_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    command = [sys.executable, "-m", "tests.kernels.interpret", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
