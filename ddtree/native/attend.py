"""Ancestor-masked attention among a step's own rows, merged with the attention over the cached context.

The context part is an ordinary non-causal paged call (every row sees all of it): full speed in whatever kernel the
host has. It returns an output and a log-sum-exp. This kernel adds the at most N+1 rows of the tree, where
row i sees row j iff bit j of its ancestor words is set, and merges the two softmaxes exactly:
out = (out_c exp(lse_c) + out_t exp(lse_t)) / (exp(lse_c) + exp(lse_t))  (arXiv 2501.01005, section 2.2).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "c_row", "o_row", "lse_head"])
def _attend(
    q, k, v, context, context_lse, words, query_start, tree_len, context_len, out,
    scale, q_row, k_row, v_row, c_row, o_row, lse_head,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1)
    head = tl.program_id(2)
    rows = tl.load(tree_len + r)
    start = tl.program_id(0) * M
    if start >= rows:
        return
    first = tl.load(query_start + r).to(tl.int64)
    i = start + tl.arange(0, M)
    d = tl.arange(0, PAD)
    mine = i < rows
    cell = mine[:, None] & (d < HEAD)[None, :]
    query = tl.load(q + (first + i)[:, None] * q_row + head * HEAD + d[None, :], mask=cell, other=0.0)
    # The context's share is asked for first, so that it arrives while the tree's is computed.
    cached = (i * 0 + tl.load(context_len + r)) > 0
    lse = tl.load(context_lse + head * lse_head + first + i, mask=mine & cached, other=float("-inf"))
    other = tl.load(
        context + (first + i)[:, None] * c_row + head * HEAD + d[None, :], mask=cell & cached[:, None], other=0.0
    ).to(tl.float32)
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, PAD), tl.float32)
    kv = (head // GROUP) * HEAD
    row = words + (first + i) * W
    for begin in range(0, rows, N):
        j = begin + tl.arange(0, N)
        there = (j < rows)[:, None] & (d < HEAD)[None, :]
        key = tl.load(k + (first + j)[:, None] * k_row + kv + d[None, :], mask=there, other=0.0)
        value = tl.load(v + (first + j)[:, None] * v_row + kv + d[None, :], mask=there, other=0.0)
        bits = tl.load(row + begin // 64, mask=mine, other=0)[:, None]
        if N > 64:
            high = tl.load(row + begin // 64 + 1, mask=mine & (i * 0 + begin // 64 + 1 < W), other=0)[:, None]
            bits = tl.where((j - begin < 64)[None, :], bits, high)
        seen = (((bits >> (j % 64)[None, :].to(tl.int64)) & 1) != 0) & (j < rows)[None, :]
        score = tl.dot(query, tl.trans(key)).to(tl.float32) * scale
        score = tl.where(seen, score, float("-inf"))
        high_mark = tl.maximum(best, tl.max(score, axis=1))
        safe = tl.where(high_mark == float("-inf"), 0.0, high_mark)  # rows past the end see nothing
        p = tl.exp(score - safe[:, None])
        shrink = tl.exp(best - safe)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value).to(tl.float32)
        best = high_mark
    total = tl.where(mine, total, 1.0)
    best = tl.where(mine, best, 0.0)
    high_mark = tl.maximum(best, lse)  # lse is -inf where nothing is cached: weight 0
    weight = tl.exp(lse - high_mark)
    shrink = tl.exp(best - high_mark)
    acc = acc * shrink[:, None] + other * weight[:, None]
    total = total * shrink + weight
    result = acc / total[:, None]
    tl.store(out + (first + i)[:, None] * o_row + head * HEAD + d[None, :], result.to(out.dtype.element_ty), mask=cell)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    context_lse: Tensor,
    words: Tensor,
    query_start: Tensor,
    tree_len: Tensor,
    context_len: Tensor,
    out: Tensor,
    scale: float,
    max_rows: int,
) -> None:
    """Tree part and merge, for every request whose tree_len is not 0; other rows of ``out`` are left alone.

    Args:
        q, context, out: [T, H, D]; k, v: [T, Hkv, D], the step's own keys and values, heads and items contiguous.
        context_lse: float32 [H, T], natural log, of the call over the cached context. words: int64 [T, W].
        query_start: int32 [R+1]; tree_len, context_len: int32 [R]. max_rows: bound of tree_len (static for a graph).
    """
    heads, size = q.shape[1], q.shape[2]
    count = tree_len.shape[0]
    tile = 16 if max_rows <= 16 or count <= 4 else 32
    columns = max(16, min(128, triton.next_power_of_2(max_rows)))
    _attend[(triton.cdiv(max_rows, tile), count, heads)](
        q, k, v, context, context_lse, words, query_start, tree_len, context_len, out,
        scale, q.stride(0), k.stride(0), v.stride(0), context.stride(0), out.stride(0), context_lse.stride(0),
        GROUP=heads // k.shape[1], HEAD=size, PAD=max(16, triton.next_power_of_2(size)), W=words.shape[1],
        M=tile, N=columns, num_warps=4,
    )  # fmt: skip


def attend_twin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    context_lse: Tensor,
    words: Tensor,
    query_start: Tensor,
    tree_len: Tensor,
    context_len: Tensor,
    out: Tensor,
    scale: float,
    max_rows: int,
) -> None:
    """``attend`` in plain torch, float32 (defines it; waits for the host)."""
    group = q.shape[1] // k.shape[1]
    for r in range(tree_len.shape[0]):
        rows, first = int(tree_len[r]), int(query_start[r])
        if rows == 0:
            continue
        here = slice(first, first + rows)
        j = torch.arange(rows, device=q.device)
        seen = ((words[here][:, j // 64] >> (j % 64)) & 1).bool()
        query = q[here].float().transpose(0, 1)
        key = k[here].float().repeat_interleave(group, 1).transpose(0, 1)
        value = v[here].float().repeat_interleave(group, 1).transpose(0, 1)
        score = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        lse, part = score.logsumexp(-1), score.softmax(-1) @ value
        if int(context_len[r]) > 0:
            lse_c = context_lse[:, here]
            both = torch.logaddexp(lse, lse_c)
            other = context[here].float().transpose(0, 1)
            part = part * (lse - both).exp()[..., None] + other * (lse_c - both).exp()[..., None]
        out[here] = part.transpose(0, 1).to(out.dtype)
