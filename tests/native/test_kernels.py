"""Each kernel of the native path against its plain-torch twin (Triton's interpreter where there is no GPU)."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from ddtree.native import attend as A
from ddtree.native import step_kernels as K
from ddtree.tree import build_tree

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(budget: int, drafts: list[int], prefill: list[int], seed: int = 0):
    """A mixed batch: `drafts[r]` scheduled draft tokens, or a prefill of `prefill[r]` rows where that is not 0."""
    gen = torch.Generator().manual_seed(seed)
    count, vocab, depth = len(drafts), 40, 5
    logprobs = torch.randn(count, depth, vocab, generator=gen).mul(3).log_softmax(-1)
    tree = build_tree(logprobs, torch.arange(count), budget)
    perm = torch.randperm(count + 2, generator=gen)[:count]
    slots = torch.where(torch.rand(count, generator=gen) < 0.8, perm, -1).int()
    size, width = tree.parents.shape[1], tree.words.shape[2]
    stored = K.Stored(
        torch.zeros(count + 2, size, dtype=torch.int32),
        torch.zeros(count + 2, size, dtype=torch.int32),
        torch.zeros(count + 2, size, dtype=torch.int32),
        torch.zeros(count + 2, size, width, dtype=torch.int64),
    )
    for name in ("tokens", "parents", "depth", "words"):
        getattr(stored, name)[perm] = getattr(tree, name).to(getattr(stored, name).dtype)
    rows = [p or d + 1 for d, p in zip(drafts, prefill, strict=True)]
    start = torch.tensor([0, *rows]).cumsum(0).int()
    total = int(start[-1])
    pad = count + 3
    step = K.Step(
        torch.zeros(total + 4, width, dtype=torch.int64),
        torch.zeros(pad, size, dtype=torch.int32),
        torch.full((pad,), 7, dtype=torch.int32),
        torch.full((pad,), 7, dtype=torch.int32),
        torch.zeros(total + 4, dtype=torch.int64),
    )
    computed = torch.randint(0, 50, (count,), generator=gen).int()
    ids = torch.randint(-1, vocab, (total + 4,), generator=gen).int()
    positions = torch.zeros(total + 4, dtype=torch.int64)
    for r in range(count):
        positions[start[r] : start[r + 1]] = computed[r] + torch.arange(rows[r])
    return stored, step, slots, torch.tensor(drafts).int(), start, computed, ids, positions


def on(device: str, thing):
    if isinstance(thing, torch.Tensor):
        return thing.clone().to(device)
    if isinstance(thing, (K.Stored, K.Step)):
        return type(thing)(**{k: on(device, v) for k, v in vars(thing).items()})
    return thing


CASES = [
    (8, [8, 8, 8], [0, 0, 0]),
    (16, [16, 5, 0, 16, 0], [0, 0, 0, 0, 40]),
    (64, [64, 64, 30, 0, 0], [0, 0, 0, 65, 3]),
    (130, [130, 12], [0, 0]),
]


@pytest.mark.parametrize("budget, drafts, prefill", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prepare_and_walk(budget, drafts, prefill, seed):
    made = batch(budget, drafts, prefill, seed)
    ours, twin = [on(DEVICE, x) for x in made], [on("cpu", x) for x in made]
    K.prepare(*ours, len(drafts))
    K.prepare_twin(*twin, len(drafts))
    start = made[4]
    live = int(start[-1])
    small = [r for r in range(len(drafts)) if int(start[r + 1] - start[r]) <= budget + 1]
    rows = torch.cat([torch.arange(int(start[r]), int(start[r + 1])) for r in small])
    assert torch.equal(ours[1].tree_len.cpu(), twin[1].tree_len)
    assert torch.equal(ours[1].context_len.cpu(), twin[1].context_len)
    assert torch.equal(ours[1].words.cpu()[rows], twin[1].words[rows])
    assert torch.equal(ours[6].cpu(), twin[6])
    assert torch.equal(ours[7].cpu(), twin[7])
    for r, n in enumerate(drafts):
        assert torch.equal(ours[1].parents.cpu()[r, : n + 1], twin[1].parents[r, : n + 1])

    # The target agrees with a node's child most of the time, so that paths are long.
    gen = torch.Generator().manual_seed(seed + 10)
    end = (torch.tensor(drafts) + 1).cumsum(0).int()
    chosen = torch.randint(0, 40, (int(end[-1]),), generator=gen)
    for r, n in enumerate(drafts):
        root, logit = int(start[r + 1]) - n - 1, int(end[r]) - n - 1
        for c in range(n, 0, -1):
            p = int(twin[1].parents[r, c])
            if p >= 0 and torch.rand((), generator=gen) < 0.9:
                chosen[logit + p] = twin[6][root + c].long()
    args = (chosen, twin[6], start, end, twin[3], twin[1].parents)
    rows_ours, rows_twin = torch.arange(live, device=DEVICE), torch.arange(live)
    got = K.walk(*[on(DEVICE, a) for a in args], rows_ours, 6)
    want = K.walk_twin(*args, rows_twin, 6)
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])
    assert torch.equal(rows_ours.cpu(), rows_twin)
    assert int((want[1] > 0).sum()) > 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_commit(layout):
    gen = torch.Generator().manual_seed(3)
    blocks, block, heads, head, layers = 6, 4, 3, 8, 2
    shape = (blocks, 2, block, heads, head) if layout == "NHD" else (blocks, 2, heads, block, head)
    views = []
    for _ in range(layers):
        cache = torch.randn(shape, generator=gen).to(torch.bfloat16)
        views.append((cache if layout == "NHD" else cache.transpose(2, 3)).to(DEVICE))
    before = [v.clone() for v in views]
    nodes = torch.tensor([[0, 2, 3, 6], [0, 1, 2, -1], [0, -1, -1, -1]]).int()
    start, drafts = torch.tensor([0, 8, 13, 14]).int(), torch.tensor([7, 4, 0]).int()
    slots = torch.randperm(blocks * block, generator=gen)[:14]
    pointers = torch.tensor([v.data_ptr() for v in views], device=DEVICE)
    K.commit(K.CacheGroup(pointers, tuple(views), 0), *[on(DEVICE, x) for x in (nodes, start, drafts, slots)])
    expected = tuple(b.cpu().clone() for b in before)
    K.commit_twin(K.CacheGroup(pointers.cpu(), expected, 0), nodes, start, drafts, slots)
    for view, want, old in zip(views, expected, before, strict=True):
        assert torch.equal(view.cpu(), want)
        assert not torch.equal(want, old.cpu())


@pytest.mark.parametrize("budget, drafts, prefill", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend(budget, drafts, prefill, dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's dot is float32 only")
    made = batch(budget, drafts, prefill, 5)
    K.prepare_twin(*made, len(drafts))
    step, start = made[1], made[4]
    gen = torch.Generator().manual_seed(1)
    total, heads, kv, head = int(start[-1]), 4, 2, 24
    q, context = torch.randn(2, total, heads, head, generator=gen).to(dtype)
    k, v = torch.randn(2, total, kv, head, generator=gen).to(dtype)
    lse = torch.randn(heads, total, generator=gen)
    step.context_len[0] = 0  # a request with nothing cached
    pad = step.tree_len.shape[0] - start.shape[0] + 1
    start = torch.cat([start, start[-1:].expand(pad)])
    out = torch.full((total, heads, head), 9.0, dtype=dtype)
    args = (q, k, v, context, lse, step.words, start, step.tree_len, step.context_len)
    ours, twin = out.clone().to(DEVICE), out.clone()
    A.attend(*[on(DEVICE, a) for a in args], ours, head**-0.5, budget + 1)
    A.attend_twin(*args, twin, head**-0.5, budget + 1)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-3  # a GPU multiplies float32 as tf32
    torch.testing.assert_close(ours.cpu().float(), twin.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["2B", "B2", "packed"])
def test_commit_in_every_layout_of_vllm(kind):
    """One view for three layouts: what is written through it lands where that vLLM's own code reads it."""
    blocks, block, heads, head = 3, 4, 2, 8

    def kv_view(cache):  # as ddtree.native.v1.attention.kv_view, which needs vLLM to be imported
        if kind == "packed":
            return cache.view(*cache.shape[:-1], 2, head).permute(0, 3, 2, 1, 4)
        return cache.transpose(0, 1) if kind == "2B" else cache

    shape = {"2B": (2, blocks, block, heads, head), "B2": (blocks, 2, block, heads, head),
             "packed": (blocks, heads, block, 2 * head)}[kind]  # fmt: skip
    cache = torch.randn(shape).to(torch.bfloat16).to(DEVICE)
    before = cache.cpu().clone()
    nodes, start, drafts = torch.tensor([[0, 3, -1]]).int(), torch.tensor([0, 5]).int(), torch.tensor([4]).int()
    slots = torch.tensor([2, 3, 8, 11, 5])
    view = kv_view(cache)
    pointers = torch.tensor([view.data_ptr()], device=DEVICE)
    K.commit(K.CacheGroup(pointers, (view,), 0), *[on(DEVICE, x) for x in (nodes, start, drafts, slots)])
    after = cache.cpu()
    if kind == "packed":
        keys, values = after.transpose(1, 2).split(head, dim=-1)
        old_keys, old_values = before.transpose(1, 2).split(head, dim=-1)
    else:
        keys, values = after.unbind(0 if kind == "2B" else 1)
        old_keys, old_values = before.unbind(0 if kind == "2B" else 1)
    for new, old in ((keys, old_keys), (values, old_values)):
        assert torch.equal(new[0, 3], old[2, 3])  # slot 3 (row 1) now holds slot 11 (row 3)
        rest = torch.ones(blocks, block, dtype=torch.bool)
        rest[0, 3] = False
        assert torch.equal(new[rest], old[rest])


def test_attention_of_a_chain_is_causal_attention():
    """Whole rows: context split off and merged back equals one causal attention, for every split."""
    gen = torch.Generator().manual_seed(2)
    length, heads, head = 21, 2, 16
    q, k, v = torch.randn(3, length, heads, head, generator=gen).unbind(0)
    whole = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    for cached in (0, 1, 12):
        rows = length - cached
        query = q[cached:].transpose(0, 1)
        score = query @ k[:cached].permute(1, 2, 0) * head**-0.5
        context = (score.softmax(-1) @ v[:cached].transpose(0, 1)).transpose(0, 1).contiguous()
        words = K.pack(torch.tril(torch.ones(rows, rows, dtype=torch.bool)), 1)
        out = torch.zeros(rows, heads, head, device=DEVICE)
        one = torch.tensor([rows]).int()
        args = (q[cached:], k[cached:], v[cached:], context, score.logsumexp(-1).contiguous(), words)
        lens = (torch.tensor([0, rows]).int(), one, torch.tensor([cached]).int())
        A.attend(*[on(DEVICE, a) for a in (*args, *lens)], out, head**-0.5, rows)
        torch.testing.assert_close(out.cpu(), whole[cached:], atol=2e-3, rtol=2e-3)
