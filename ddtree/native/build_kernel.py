"""Best-first tree from sorted top-k log-probabilities, written straight into its slot: one program per request.

Same trees as ``ddtree.tree.build_tree``, slot by slot (that is the twin): nodes are taken in the order (score
descending, depth, parent's slot, token rank). The frontier never holds more than one entry per node taken, since a
taken node brings at most two: its next sibling, in its own place, and its first child. So it is a vector of N+1 lanes,
a pop is one maximum over packed keys, and nothing is sorted. One warp: no barrier in the loop.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.native.step_kernels import Stored


@triton.jit
def _key(score, depth, parent, rank, lane):
    """int64 that is larger for what comes first: 32 bits of score, then the tie order; the lane breaks no tie."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 and 0.0 are one score
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    order = depth.to(tl.int64) * 65536 + parent.to(tl.int64) * 256 + rank.to(tl.int64)
    return ordered * 4294967296 + (8388607 - order) * 512 + (511 - lane.to(tl.int64))


@triton.jit
def _build(
    values, ids, root_tokens, slots, chains,
    s_tokens, s_parents, s_depth, s_words, draft,
    K: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r).to(tl.int64)
    v = values + r * K * T
    t = ids + r * K * T
    lane = tl.arange(0, BLOCK)
    root = tl.load(root_tokens + r).to(tl.int32)
    inside = lane < SIZE

    if tl.load(chains + r) != 0:
        token = tl.load(t + (lane - 1) * T, mask=(lane > 0) & (lane <= K) & inside, other=0).to(tl.int32)
        tl.store(s_tokens + slot * SIZE + lane, tl.where(lane == 0, root, token), mask=inside)
        tl.store(s_parents + slot * SIZE + lane, lane - 1, mask=inside)
        tl.store(s_depth + slot * SIZE + lane, lane, mask=inside)
        tl.store(draft + r * (SIZE - 1) + lane - 1, token.to(tl.int64), mask=(lane > 0) & inside)
        for w in tl.static_range(W):
            upto = lane - w * 64
            ones = tl.full((BLOCK,), 1, tl.int64)
            low = (ones << tl.minimum(tl.maximum(upto + 1, 0), 63).to(tl.int64)) - 1
            tl.store(s_words + (slot * SIZE + lane) * W + w, tl.where(upto >= 63, -ones, low), mask=inside)
        return

    lowest = -9223372036854775807
    zero = lane * 0
    first = tl.minimum(tl.load(v), 0.0)
    start = _key(first, zero + 1, zero, zero, lane)
    keys = tl.where((lane == 0) & (first + zero > float("-inf")), start, lowest)
    info = zero + 65536  # depth * 65536 + parent * 256 + rank, of the frontier entry in this lane
    parents = zero - 1
    depths = zero
    tokens = tl.where(lane == 0, root, 0)
    scores = zero.to(tl.float32)
    for n in range(1, SIZE):
        best = tl.max(keys, axis=0)
        alive = best > lowest
        at = 511 - (best & 511).to(tl.int32)
        packed = tl.sum(tl.where(lane == at, info, 0), axis=0)
        depth = packed // 65536
        parent = (packed // 256) % 256
        rank = packed % 256
        above = tl.sum(tl.where(lane == parent, scores, 0.0), axis=0)
        row = (depth - 1) * T
        score = above + tl.minimum(tl.load(v + row + rank, mask=alive, other=0.0), 0.0)
        token = tl.load(t + row + rank, mask=alive, other=0).to(tl.int32)
        mine = (lane == n) & (best + zero > lowest)
        parents = tl.where(mine, parent, parents)
        depths = tl.where(mine, depth, depths)
        tokens = tl.where(mine, token, tokens)
        scores = tl.where(mine, score, scores)
        # The next sibling takes the popped place, the first child lane n.
        more = alive & (rank + 1 < T)
        beside = above + tl.minimum(tl.load(v + row + rank + 1, mask=more, other=float("-inf")), 0.0)
        sibling = tl.where(
            more & (beside > float("-inf")), _key(beside, depth, parent, rank + 1, at), lowest
        )
        keys = tl.where((lane == at) & (best + zero > lowest), sibling, keys)
        info = tl.where((lane == at) & (best + zero > lowest), packed + 1, info)
        deeper = alive & (depth < K)
        below = score + tl.minimum(tl.load(v + row + T, mask=deeper, other=float("-inf")), 0.0)
        here = n + rank * 0
        child = tl.where(deeper & (below > float("-inf")), _key(below, depth + 1, here, rank * 0, here), lowest)
        keys = tl.where(lane == n, child, keys)
        info = tl.where(lane == n, (depth + 1) * 65536 + n * 256, info)

    tl.store(s_tokens + slot * SIZE + lane, tokens, mask=inside)
    tl.store(s_parents + slot * SIZE + lane, parents, mask=inside)
    tl.store(s_depth + slot * SIZE + lane, depths, mask=inside)
    tl.store(draft + r * (SIZE - 1) + lane - 1, tokens.to(tl.int64), mask=(lane > 0) & inside)
    # Ancestor words: K pointer steps up, all nodes at once.
    for w in tl.static_range(W):
        own = lane - w * 64
        one = tl.full((BLOCK,), 1, tl.int64)
        word = tl.where((own >= 0) & (own < 64), one << tl.minimum(tl.maximum(own, 0), 63).to(tl.int64), 0)
        node = parents
        for _ in tl.static_range(K):
            up = node - w * 64
            bit = one << tl.minimum(tl.maximum(up, 0), 63).to(tl.int64)
            word = word | tl.where((node >= 0) & (up >= 0) & (up < 64), bit, 0)
            node = tl.where(node >= 0, tl.gather(parents, tl.maximum(node, 0), 0), -1)
        tl.store(s_words + (slot * SIZE + lane) * W + w, word, mask=inside)


def build(values: Tensor, ids: Tensor, root_tokens: Tensor, slots: Tensor, chains: Tensor, stored: Stored) -> Tensor:
    """Build one tree per request into its slot.

    Args:
        values: float32 [R, K, T] descending log-probabilities, ids int64 [R, K, T] their tokens (contiguous).
        root_tokens: int [R]. slots: int32 [R]. chains: int32 [R], not 0 where the request needs a chain of the best
            tokens (then token 0 from depth K + 1 on).
    Returns:
        Draft tokens int64 [R, N], nodes in slot order.
    """
    count, depth, top = values.shape
    size = stored.parents.shape[1]
    draft = torch.empty(count, size - 1, dtype=torch.int64, device=values.device)
    _build[(count,)](
        values, ids, root_tokens, slots, chains,
        stored.tokens, stored.parents, stored.depth, stored.words, draft,
        K=depth, T=top, SIZE=size, W=stored.words.shape[2], BLOCK=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return draft
