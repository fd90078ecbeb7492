"""The kernels compile for compute capability 8.0, 8.6, 8.9 and 9.0 at served sizes, within shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from ddtree.kernels import device
from tests.kernels.compiling import CASES, target


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("capability", device.SHARED_LIMIT)
def test_compiles_within_shared_memory(name, capability):
    with target(capability) as done:
        CASES[name]()
    assert done
    for one in done:
        assert one.cubin and one.shared <= device.SHARED_LIMIT[capability], f"{one.name}: {one.shared} bytes"


def test_the_limit_is_looked_at(monkeypatch):
    """A kernel with tiles that no block can hold is seen as such, so that the test above can fail."""
    from ddtree.kernels import attention

    huge = {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 4, "num_warps": 8}
    monkeypatch.setattr(attention, "config", lambda *_: dict(huge))
    with target(86) as done:
        CASES["attention-256"]()
    assert max(one.shared for one in done) > device.SHARED_LIMIT[86]
