"""Attention of a token tree over a context cache, in plain torch: the definition that the Triton kernels are tested
against.

A step has `N1` nodes per request (root first, every parent before its children). A node sees the whole context and, of
the step's own tokens, its ancestors and itself: the bit words of `ddtree.tree.Tree.words`. A node's position is context
length + depth, so a sliding window is counted in depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree import NEG_INF, dense_mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Grouped-query attention with an explicit mask, in float32 (float64 stays float64).

    q [R, M, HQ, D], k and v [R, S, HK, D] with HQ a multiple of HK, mask bool [R, M, S] (true: seen).
    Returns out [R, M, HQ, D] in q's dtype and lse [R, M, HQ], the natural log of the softmax denominator.
    A row that sees nothing gives out 0 and lse -inf.
    """
    requests, rows, q_heads, dim = q.shape
    kv_heads = k.shape[2]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(work).view(requests, rows, kv_heads, q_heads // kv_heads, dim)
    scores = torch.einsum("rmhgd,rshd->rmhgs", grouped, k.to(work)) * (dim**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask[:, :, None, None, :], NEG_INF)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.masked_fill(lse == NEG_INF, 0.0)[..., None]).exp()
    # An unseen row may hold anything in a cache (stale or never written, NaN included): weight 0 is not enough.
    values = v.to(work).masked_fill(~mask.any(1)[:, :, None, None], 0.0)
    out = torch.einsum("rmhgs,rshd->rmhgd", weights, values)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(requests, rows, q_heads)


def tree_mask(lengths: Tensor, words: Tensor, slots: int, depth: Tensor | None = None, window: int = 0) -> Tensor:
    """What each node sees of a cache of `slots` rows whose rows [length, length + N1) are the step's own tokens.

    lengths int32 [R], words int64 [R, N1, W], depth int32 [R, N1] (needed only for a window). `window` > 0: a node at
    position p sees keys at positions > p - window. Returns bool [R, N1, slots].
    """
    nodes = words.shape[1]
    slot = torch.arange(slots, device=words.device)
    node = slot[None, :] - lengths.long()[:, None]
    inside = (node >= 0) & (node < nodes)
    own = dense_mask(words).gather(2, node.clamp(0, nodes - 1)[:, None, :].expand(-1, nodes, -1))
    mask = (node < 0)[:, None, :] | (own & inside[:, None, :])
    if window > 0:
        if depth is None:
            raise ValueError("a sliding window needs the depth of every node")
        key_depth = torch.where(node < 0, node, depth.long().gather(1, node.clamp(0, nodes - 1)))
        mask &= depth.long()[:, :, None] - key_depth[:, None, :] < window
    return mask


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    words: Tensor | None,
    *,
    depth: Tensor | None = None,
    window: int = 0,
    scale: float | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention of all nodes over context and tree; the step's own keys are already in the cache at rows [length,
    length + N1).

    q [R, N1, HQ, D]; k_cache, v_cache [R, S, HK, D], or with `block_table` int32 [R, blocks] paged [blocks, block size,
    HK, D] (any strides); lengths int32 [R], the context length without the step's own tokens; words int64 [R, N1, W].
    `words=None` lets every node see every other (a block-diffusion drafter's own block). Returns [R, N1, HQ, D].
    """
    requests, nodes = q.shape[:2]
    if block_table is not None:
        k_cache = k_cache[block_table.long()].flatten(1, 2)
        v_cache = v_cache[block_table.long()].flatten(1, 2)
    if words is None:
        words = torch.full((requests, nodes, -(-nodes // 64)), -1, dtype=torch.int64, device=q.device)
    mask = tree_mask(lengths, words, k_cache.shape[1], depth, window)
    return attend(q, k_cache, v_cache, mask, scale)[0]


def tree_part(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, words: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention among a step's own tokens alone: the second half of the two-part form (context by a stock kernel, then
    `merge`).

    q [T, HQ, D], k and v [T, HK, D], requests one after another with bounds cu_seqlens int32 [R + 1]; words int64 [T,
    W] with bits counted from the request's own first token. Returns out [T, HQ, D] and lse float32 [HQ, T].
    """
    total = q.shape[0]
    row = torch.arange(total, device=q.device)
    request = torch.searchsorted(cu_seqlens[1:].contiguous().long(), row, right=True)
    local = row - cu_seqlens.long()[request.clamp(max=cu_seqlens.shape[0] - 2)]
    word = words.gather(1, (local // 64).expand(total, total).clamp(max=words.shape[1] - 1))
    mask = ((word >> (local % 64)) & 1).bool() & (request[:, None] == request[None, :])
    mask &= (local < 64 * words.shape[1]) & (request < cu_seqlens.shape[0] - 1)[:, None]
    out, lse = attend(q[None], k[None], v[None], mask[None], scale)
    return out[0], lse[0].T.contiguous()


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys: out [T, HQ, D], lse [HQ, T] of each. A part that saw nothing has
    lse -inf (+inf is read as the same: some kernels write that for an empty context). Returns out in out_a's dtype and
    lse float32."""
    lse_a, lse_b = (x.float().masked_fill(x == float("inf"), NEG_INF) for x in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == NEG_INF, 0.0)
    weight_a, weight_b = ((x - safe).exp().T[..., None] for x in (lse_a, lse_b))
    # A part with weight 0 may hold NaN (0/0 of an empty softmax).
    joined = out_a.float().where(weight_a > 0, 0.0) * weight_a + out_b.float().where(weight_b > 0, 0.0) * weight_b
    return joined.to(out_a.dtype), lse
