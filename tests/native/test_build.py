"""The tree-building kernel against ``ddtree.tree.build_tree``: equal slot by slot, ties included."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from ddtree.native.build_kernel import build
from ddtree.native.state import chained
from ddtree.native.step_kernels import Stored
from ddtree.tree import build_tree, n_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sources(kind: str, count: int, depth: int, vocab: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, depth, vocab, generator=gen) * (4.0 if kind == "sharp" else 1.0)
    logprobs = logits.log_softmax(-1)
    if kind == "ties":
        logprobs = (logprobs * 2).round() / 2  # many equal scores, across depths too
        logprobs[:, :, 0] = 0.0
        logprobs[:, :, 1] = 0.0
    if kind == "few":
        logprobs[:, :, 3:] = float("-inf")  # fewer nodes than the budget
    return logprobs


@pytest.mark.parametrize("kind", ["sharp", "flat", "ties", "few"])
@pytest.mark.parametrize("budget, depth, top", [(1, 1, 1), (8, 5, 4), (16, 15, 16), (64, 15, 16), (130, 7, 40)])
def test_same_tree_as_the_twin(kind, budget, depth, top):
    count = 3
    logprobs = sources(kind, count, depth, 48, budget)
    values, ids = logprobs.topk(top, dim=-1)
    root = torch.tensor([5, 6, 7])
    want = build_tree((values, ids), root, budget)
    slots = torch.tensor([4, 0, 2]).int()
    width = n_words(budget + 1)
    shape = (5, budget + 1)
    stored = Stored(
        *(torch.full(shape, 9, dtype=torch.int32, device=DEVICE) for _ in range(3)),
        torch.full((*shape, width), 9, dtype=torch.int64, device=DEVICE),
    )
    inputs = [x.to(DEVICE).contiguous() for x in (values, ids, root, slots, torch.zeros(3).int())]
    draft = build(*inputs, stored)
    at = slots.long()
    for name in ("parents", "depth", "tokens", "words"):
        assert torch.equal(getattr(stored, name).cpu()[at].long(), getattr(want, name).long()), name
    assert torch.equal(draft.cpu(), want.tokens[:, 1:])
    assert (stored.parents.cpu()[[1, 3]] == 9).all()


@pytest.mark.parametrize("budget", [8, 64])
def test_chains_among_trees(budget):
    logprobs = sources("sharp", 3, 15, 48, 1)
    values, ids = logprobs.topk(8, dim=-1)
    root = torch.tensor([5, 6, 7])
    flags = torch.tensor([0, 1, 0]).int()
    want = chained(build_tree((values, ids), root, budget), ids[:, :, 0], flags.bool())
    stored = Stored(
        *(torch.zeros(3, budget + 1, dtype=torch.int32, device=DEVICE) for _ in range(3)),
        torch.zeros(3, budget + 1, n_words(budget + 1), dtype=torch.int64, device=DEVICE),
    )
    draft = build(*[x.to(DEVICE) for x in (values, ids, root, torch.arange(3).int(), flags)], stored)
    for name in ("parents", "depth", "tokens", "words"):
        assert torch.equal(getattr(stored, name).cpu().long(), getattr(want, name).long()), name
    assert torch.equal(draft.cpu(), want.tokens[:, 1:])
