"""The kernels compile for compute capability 8.0, 8.6, 8.9 and 9.0 at served sizes, within shared memory.

Each case has a process of its own: whether Triton compiles or interprets is fixed at import; other tests interpret."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from ddtree.kernels import device
from tests.kernels.compiling import CASES

ENV = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
#: Minutes of ptxas each; the same kernels compile at smaller sizes in the other cases.
LONG = {"gdn-257-bf16-state", "attention-128-float32", "tree-256"}
HUGE = """
from ddtree.kernels import attention, device
from tests.kernels.compiling import CASES, target
attention.config = lambda *_: {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 4, "num_warps": 8}
with target(86) as done:
    CASES["attention-256"]()
assert max(one.shared for one in done) > device.SHARED_LIMIT[86]
"""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CASES])
def test_compiles_within_shared_memory(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", name], env=ENV, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"ok   sm_{capability} {name}" in done.stdout for capability in device.SHARED_LIMIT), done.stdout


def test_the_limit_is_looked_at() -> None:
    """A kernel with tiles that no block can hold is seen as such, so that the test above can fail."""
    done = subprocess.run([sys.executable, "-c", HUGE], env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
