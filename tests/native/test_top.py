"""Top log-probabilities in two launches against the torch twin."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from ddtree.native.top_kernel import top_logprobs
from ddtree.tree import top_logprobs as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocabulary, count", [(50, 1), (2048, 5), (5000, 16), (9001, 8)])
def test_same_as_the_twin(vocabulary, count):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(count)) * 6
    logits[1, :7] = float("nan")
    logits[2, count:] = float("-inf")
    values, ids = top_logprobs(logits.to(DEVICE), count)
    want, at = twin(logits, count)
    torch.testing.assert_close(values.cpu(), want, atol=1e-4, rtol=1e-5)
    assert torch.equal(ids.cpu(), at)


def test_equal_logits_come_in_order_of_their_ids():
    logits = torch.zeros(2, 4100)
    logits[1, [4099, 3, 2050]] = 1.0
    values, ids = top_logprobs(logits.to(DEVICE), 5)
    assert ids.cpu().tolist() == [[0, 1, 2, 3, 4], [3, 2050, 4099, 0, 1]]
    assert values[0].cpu().tolist() == pytest.approx([-torch.tensor(4100.0).log().item()] * 5, abs=1e-5)


def test_rows_of_a_wider_tensor():
    whole = torch.randn(3, 700)
    values, ids = top_logprobs(whole[:, :600].to(DEVICE), 4)
    want, at = twin(whole[:, :600], 4)
    torch.testing.assert_close(values.cpu(), want, atol=1e-4, rtol=1e-5)
    assert torch.equal(ids.cpu(), at)
