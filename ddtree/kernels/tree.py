"""Build a draft tree and walk it, one program per request: twins `ddtree.tree.build_tree` and `ddtree.walk.walk`.

Build is best-first search with one warp. The order of the twin (score descending, depth, parent's place, rank) puts a
node after its parent and after its better siblings, so the best node whose parent and left sibling are already in the
tree is always the next slot. The frontier holds one such candidate per expanded slot; a step takes the largest, puts
that node's next sibling in its place and its first child in a new one. The key is two int32: the score, mapped so that
integers order as floats do, and depth, parent and rank packed so that an earlier place is a larger number. A 32-bit
maximum over a warp is one instruction on compute capability 8.0 and newer.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.tree import Tree, check_budget, n_words
from ddtree.walk import Path

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(score):
    """float32 -> int32 of the same order (-0.0 counts as 0.0)."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _build(
    values, ids, root_tokens, tokens, parents, depth, words, scores, n_nodes,
    value_row, value_depth, id_row, id_depth,
    BUDGET: tl.constexpr, DEPTHS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    FRONTIER: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = BUDGET + 1
    values += request * value_row
    ids += request * id_row
    tokens += request * SIZE
    parents += request * SIZE
    depth += request * SIZE
    scores += request * SIZE
    words += request * SIZE * W
    w = tl.arange(0, W_PAD)
    tl.store(tokens, tl.load(root_tokens + request).to(tl.int64))
    tl.store(parents, -1)
    tl.store(depth, 0)
    tl.store(scores, 0.0)
    tl.store(words + w, tl.where(w == 0, 1, 0).to(tl.int64), mask=w < W)
    place = tl.arange(0, FRONTIER)
    # Payload: 31 - depth, 2047 - parent, 1023 - rank in 5, 11 and 10 bits; each counts down, so earlier is larger.
    start = tl.minimum(tl.load(values), 0.0)
    first = (30 << 21) | (2047 << 10) | 1023
    high = tl.where(place == 0, _ordered(start), LOWEST)
    low = tl.where(place == 0, first, -1)
    tl.debug_barrier()
    found = 0
    for slot in range(1, SIZE):
        best = tl.max(high, axis=0)
        tie = tl.max(tl.where(high == best, low, -1), axis=0)
        level = 31 - (tie >> 21)
        parent = 2047 - ((tie >> 10) & 2047)
        rank = 1023 - (tie & 1023)
        mine = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        real = (tie >= 0) & (mine > float("-inf"))
        found += real.to(tl.int32)
        chosen = tie >= 0
        safe_level = tl.where(chosen, level, 1)
        safe_parent = tl.where(chosen, parent, 0)
        # The next sibling shares the parent's score; the first child starts from this node's.
        above = tl.load(scores + safe_parent)
        sibling_in = chosen & (rank + 1 < RANKS)
        sibling = tl.load(values + (safe_level - 1) * value_depth + rank + 1, mask=sibling_in, other=float("-inf"))
        sibling = above + tl.minimum(sibling, 0.0)
        child_in = chosen & (safe_level < DEPTHS)
        child = tl.load(values + safe_level * value_depth, mask=child_in, other=float("-inf"))
        child = mine + tl.minimum(child, 0.0)
        token = tl.load(ids + (safe_level - 1) * id_depth + rank, mask=real, other=0)
        tl.store(tokens + slot, tl.where(real, token.to(tl.int64), 0))
        tl.store(parents + slot, tl.where(real, safe_parent, -1))
        tl.store(depth + slot, tl.where(real, safe_level, 0))
        tl.store(scores + slot, tl.where(real, mine, float("-inf")))
        chain = tl.load(words + safe_parent * W + w, mask=(real & (w < W)) != 0, other=0)
        own = tl.where(w == slot // 64, 1, 0).to(tl.int64) << (slot % 64)
        tl.store(words + slot * W + w, chain | own, mask=w < W)
        # In place of the node taken: its next sibling. In a new place: its first child.
        taken = (low == tie) & chosen
        sibling_key = tl.where(sibling_in, _ordered(sibling), LOWEST)
        sibling_low = tl.where(sibling_in, tie - 1, -1)
        child_key = tl.where(child_in, _ordered(child), LOWEST)
        child_low = tl.where(child_in, ((30 - level) << 21) | ((2047 - slot) << 10) | 1023, -1)
        high = tl.where(taken, sibling_key, tl.where(place == slot, child_key, high))
        low = tl.where(taken, sibling_low, tl.where(place == slot, child_low, low))
        tl.debug_barrier()  # the next step reads scores and words that this one stored
    tl.store(n_nodes + request, found)


def build_tree(logprobs: Tensor | tuple[Tensor, Tensor], root_tokens: Tensor, budget: int) -> Tree:
    """As `ddtree.tree.build_tree`, slot by slot, ties included. At most 30 drafted positions (ValueError)."""
    check_budget(budget)
    if isinstance(logprobs, Tensor):
        logprobs = logprobs.float().topk(min(budget, logprobs.shape[-1]), dim=-1)
    values, ids = logprobs
    requests, depths, ranks = values.shape
    if depths > 30:
        raise ValueError(f"{depths} drafted positions: the kernel takes 30")
    values, ids = (x if x.stride(2) == 1 else x.contiguous() for x in (values.float(), ids))
    device, size, width = values.device, budget + 1, n_words(budget + 1)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(requests, *shape, dtype=dtype, device=device)

    tree = Tree(
        tokens=new(torch.int64, size),
        parents=new(torch.int32, size),
        depth=new(torch.int32, size),
        words=new(torch.int64, size, width),
        scores=new(torch.float32, size),
        n_nodes=new(torch.int32),
        max_depth=depths,
    )
    _build[(requests,)](
        values, ids, root_tokens, tree.tokens, tree.parents, tree.depth, tree.words, tree.scores, tree.n_nodes,
        values.stride(0), values.stride(1), ids.stride(0), ids.stride(1),
        BUDGET=budget, DEPTHS=depths, RANKS=min(ranks, budget), W=width, W_PAD=triton.next_power_of_2(width),
        FRONTIER=max(32, triton.next_power_of_2(size)), num_warps=1,
    )  # fmt: skip
    return tree


@triton.jit
def _walk(
    tokens, parents, depth, words, chosen, nodes, count, bonus, out,
    SIZE: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    base = request * SIZE
    slot = tl.arange(0, PAD)
    there = slot < SIZE
    parent = tl.load(parents + base + slot, mask=there, other=-1)
    descends = (there & (parent >= 0)) != 0
    wanted = tl.load(chosen + base + parent, mask=descends, other=-1)
    token = tl.load(tokens + base + slot, mask=there, other=-2)
    match = (descends & (token == wanted)) | (slot == 0)
    # A slot is accepted when no ancestor-or-self failed; distinct bits, so a sum is an or.
    accepted = (slot < SIZE) & match
    for w in tl.static_range(W):
        bit = tl.where((slot // 64 == w) & (match == 0) & there, 1, 0).to(tl.int64) << (slot % 64).to(tl.int64)
        failed = tl.sum(bit, axis=0)
        accepted = accepted & ((tl.load(words + (base + slot) * W + w, mask=there, other=-1) & failed) == 0)
    level = tl.load(depth + base + slot, mask=there, other=0)
    step = tl.arange(0, STEPS_PAD)
    path = tl.max(tl.where(accepted[:, None] & (level[:, None] == step[None, :]), slot[:, None], -1), axis=0)
    end = tl.max(tl.where(accepted, level, 0), axis=0)
    last = tl.max(tl.where(accepted & (level == end), slot, 0), axis=0)
    more = tl.load(chosen + base + last)
    row = request * STEPS
    keep = step < STEPS
    tl.store(nodes + row + step, path, mask=keep)
    tl.store(count + request, end)
    tl.store(bonus + request, more)
    # The target's choice at every node of the path is the next token: the next node's own, or the bonus.
    draft = tl.load(chosen + base + path, mask=(keep & (path >= 0)) != 0, other=-1)
    tl.store(out + row + step, draft, mask=keep)


def walk(tree: Tree, chosen: Tensor) -> Path:
    """As `ddtree.walk.walk`."""
    requests, size = tree.tokens.shape
    steps, width = tree.max_depth + 1, tree.words.shape[2]
    device = chosen.device
    path = Path(
        nodes=torch.empty(requests, steps, dtype=torch.int32, device=device),
        count=torch.empty(requests, dtype=torch.int32, device=device),
        bonus=torch.empty(requests, dtype=torch.int64, device=device),
        tokens=torch.empty(requests, steps, dtype=torch.int64, device=device),
    )
    _walk[(requests,)](
        tree.tokens.contiguous(), tree.parents.contiguous(), tree.depth.contiguous(), tree.words.contiguous(),
        chosen.long().contiguous(), path.nodes, path.count, path.bonus, path.tokens,
        SIZE=size, PAD=triton.next_power_of_2(size), W=width, STEPS=steps, STEPS_PAD=triton.next_power_of_2(steps),
        num_warps=1 if size <= 128 else 4,
    )  # fmt: skip
    return path
