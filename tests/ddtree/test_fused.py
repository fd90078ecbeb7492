"""Fused kernels: equal to their twins in Triton's interpreter, and compiled for the GPUs that people have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
HERE = Path(__file__).parent


# A hybrid's rounds (kernel_rounds_check.py qwen3_5) take minutes in the interpreter: they are for a GPU.
@pytest.mark.parametrize("command", [["fused_check.py"], ["kernel_rounds_check.py", "qwen3-sliding"]])
def test_kernels_equal_plain_torch_in_the_interpreter(command: list[str]) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    argv = [sys.executable, str(HERE / command[0]), *command[1:]]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_kernels_compile_within_shared_memory(capability: int) -> None:
    from ddtree.kernels import fused
    from ddtree.kernels.device import SHARED_LIMIT
    from tests.kernels.compiling import target

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    with target(capability) as compiled:
        for width in (576, 5120):
            fused.add_norm(new(1, 3, width), new(1, 3, width), new(width, dtype=torch.float32), 1e-6)
            fused.add_norm(new(1, 3, width), None, new(width, dtype=torch.float32), 1e-6)
        fused.swiglu(new(1, 3, 2 * 17408))
        fused.gated_norm(new(1, 3, 48, 128), new(1, 3, 48 * 128), new(128, dtype=torch.float32), 1e-6)
        for heads, gated, hd, rot in ((32, False, 128, 128), (24, True, 256, 64), (0, False, 64, 64)):
            weight = new(hd, dtype=torch.float32)
            turn, cache = new(1, 3, 1, rot, dtype=torch.float32), new(1, 9, 4, hd)
            qgkv = new(1, 3, (heads * (1 + gated) + 8) * hd)
            rows = torch.zeros(1, 3, dtype=torch.int64)
            for norm in (weight, None):
                fused.rotate_and_write(qgkv, heads, gated, norm, norm, 1e-6, turn, turn, rows, cache, cache.clone())
    assert len(compiled) >= 8 and all(c.shared <= SHARED_LIMIT[capability] for c in compiled)
