"""Tree attention over a KV cache in one pass: twins in `ddtree.attention`.

A program takes a tile of rows (node, query head of one KV group), so a group's keys are read once for the whole tree,
and one of `splits` parts of the keys (Flash-Decoding). Context blocks need no mask; only the last blocks, which hold
the step's own tokens, read ancestor words. A second small kernel joins the parts. Lengths come from the device, so a
graph can be replayed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.kernels import device
from ddtree.kernels.bits import unpack
from ddtree.kernels.bits import window as window_bits

LOG2E = 1.4426950408889634
MAX_SPLITS = 64
TAIL = 64  # keys per masked block: one 64-bit window of a row's ancestor words


@triton.jit
def _keys(base, table, position, there, stride_block, stride_row, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Pointers to cache rows at `position`, through the block table when paged."""
    if PAGED:
        block = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
        return base + block * stride_block + (position % PAGE) * stride_row
    return base + position.to(tl.int64) * stride_row


@triton.jit
def _update(q, k, v, seen, scale, best, total, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One online-softmax step in base 2."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    high = tl.maximum(best, tl.max(score, axis=1))
    safe = tl.where(high == float("-inf"), 0.0, high) if MASKED else high
    weight = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return high, total, acc


@triton.jit(do_not_specialize=["nodes", "window"])
def _attend(
    q, k, v, out, partial, lse, starts, lengths, words, depth, table,
    scale, nodes, window,
    q_row, q_head, k_request, k_row, k_head, v_request, v_row, v_head, o_row, o_head, table_row, lse_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, PACKED: tl.constexpr, STEP_KEYS: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, LSE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    request = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    if PACKED:
        first = tl.load(starts + request).to(tl.int64)
        count = (tl.load(starts + request + 1) - first).to(tl.int32)
    else:
        first = request * nodes
        count = nodes
    if tile * BLOCK_M >= count * GROUP:
        return
    length = 0 if STEP_KEYS else tl.load(lengths + request).to(tl.int32)
    stop = length + count
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    q_heads = head * GROUP + row % GROUP
    live = node < count
    d = tl.arange(0, DIM)
    queries = tl.load(
        q + (first + node)[:, None] * q_row + q_heads[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0
    )
    begin = 0
    level = node * 0
    if WINDOW:
        level = tl.load(depth + first + node, mask=live, other=0)
        begin = tl.maximum(length - window + 1, 0) // BLOCK_N * BLOCK_N  # no row starts before its depth-0 position
    part = tl.cdiv(tl.cdiv(stop - begin, SPLITS), BLOCK_N) * BLOCK_N
    begin += split * part
    end = tl.minimum(begin + part, stop)
    middle = tl.minimum(end, length // BLOCK_N * BLOCK_N)  # blocks below hold context alone

    if STEP_KEYS:
        k_base = k + first * k_row + head * k_head
        v_base = v + first * v_row + head * v_head
    else:
        k_base = k + head * k_head
        v_base = v + head * v_head
        if not PAGED:
            k_base += request * k_request
            v_base += request * v_request
    table += request * table_row
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    for at in tl.range(begin, middle, BLOCK_N, num_stages=STAGES):
        position = at + tl.arange(0, BLOCK_N)
        there = position >= 0
        keys = tl.load(_keys(k_base, table, position, there, k_request, k_row, PAGED, PAGE)[:, None] + d[None, :])
        values = tl.load(_keys(v_base, table, position, there, v_request, v_row, PAGED, PAGE)[:, None] + d[None, :])
        seen = (level[:, None] - (position - length)[None, :]) < window
        best, total, acc = _update(queries, keys, values, seen, scale, best, total, acc, WINDOW, PRECISION)
    for at in tl.range(tl.maximum(begin, middle), end, TAIL_N, num_stages=1):
        position = at + tl.arange(0, TAIL_N)
        there = position < end
        keys = tl.load(
            _keys(k_base, table, position, there, k_request, k_row, PAGED, PAGE)[:, None] + d[None, :],
            mask=there[:, None], other=0.0,
        )  # fmt: skip
        values = tl.load(
            _keys(v_base, table, position, there, v_request, v_row, PAGED, PAGE)[:, None] + d[None, :],
            mask=there[:, None], other=0.0,
        )  # fmt: skip
        own = position - length  # a node; negative: context
        seen = (there[None, :] & live[:, None]) != 0
        if TREE:
            # Below node 0 lies the context, seen by all.
            mine = unpack(window_bits(words + (first + node) * W, live, at - length, W), TAIL_N)
            seen = seen & ((own < 0)[None, :] | mine)
        if WINDOW:
            own_level = tl.load(depth + first + own, mask=there & (own >= 0), other=0)
            own_level = tl.where(own < 0, own, own_level)
            seen = seen & (level[:, None] - own_level[None, :] < window)
        best, total, acc = _update(queries, keys, values, seen, scale, best, total, acc, True, PRECISION)

    safe_total = tl.where(total == 0.0, 1.0, total)
    result = acc / safe_total[:, None]
    log = tl.where(total == 0.0, float("-inf"), best + tl.log2(safe_total))
    if SPLITS == 1:
        place = (first + node)[:, None] * o_row + q_heads[:, None] * o_head + d[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=live[:, None])
        if LSE:
            tl.store(lse + q_heads * lse_head + first + node, log / 1.4426950408889634, mask=live)
    else:
        at = ((first + node) * (KV_HEADS * GROUP) + q_heads) * SPLITS + split
        tl.store(lse + at, log, mask=live)
        if end > begin:
            tl.store(partial + at[:, None] * DIM + d[None, :], result, mask=live[:, None])


@triton.jit
def _join(
    partial, lse, out, o_row, o_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, PAD)
    d = tl.arange(0, DIM)
    at = (row * HEADS + head) * SPLITS + split
    log = tl.load(lse + at, mask=split < SPLITS, other=float("-inf"))
    high = tl.max(log, axis=0)
    high = tl.where(high == float("-inf"), 0.0, high)
    weight = tl.exp2(log - high)
    total = tl.sum(weight, axis=0)
    parts = tl.load(partial + at[:, None] * DIM + d[None, :], mask=(weight > 0)[:, None], other=0.0)
    result = tl.sum(parts * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * o_row + head * o_head + d, result.to(out.dtype.element_ty))


@triton.jit
def _merge(out_a, lse_a, out_b, lse_b, out, lse, a_row, a_head, b_row, b_head, a_lse, b_lse, total, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    first = tl.load(lse_a + head * a_lse + row).to(tl.float32)
    second = tl.load(lse_b + head * b_lse + row).to(tl.float32)
    first = tl.where(first == float("inf"), float("-inf"), first)
    second = tl.where(second == float("inf"), float("-inf"), second)
    high = tl.maximum(first, second)
    safe = tl.where(high == float("-inf"), 0.0, high)
    weight_a = tl.exp(first - safe)
    weight_b = tl.exp(second - safe)
    both = weight_a + weight_b
    a = tl.load(out_a + row * a_row + head * a_head + d, mask=tl.where(weight_a > 0, d, -1) >= 0, other=0.0).to(
        tl.float32
    )
    b = tl.load(out_b + row * b_row + head * b_head + d, mask=tl.where(weight_b > 0, d, -1) >= 0, other=0.0).to(
        tl.float32
    )
    result = (a * weight_a + b * weight_b) / tl.where(both == 0.0, 1.0, both)
    tl.store(out + (row * tl.num_programs(1) + head) * DIM + d, result.to(out.dtype.element_ty))
    tl.store(lse + head * total + row, tl.where(both == 0.0, float("-inf"), safe + tl.log(both)))


def config(dim: int, rows: int, item: int, capability: int) -> dict[str, int]:
    """Block sizes of the main kernel by head size, rows per KV group, bytes per item and compute capability (90 =
    9.0)."""
    tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if item == 4:
        return {"BLOCK_M": min(tile, 32), "BLOCK_N": 32, "STAGES": 1, "num_warps": 4}
    if capability >= 90:
        if rows > 64 and dim <= 128:
            return {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3, "num_warps": 8}
        return {"BLOCK_M": tile, "BLOCK_N": 64, "STAGES": 2 if dim > 128 else 3, "num_warps": 4}
    if dim > 128:
        return {"BLOCK_M": tile, "BLOCK_N": 32, "STAGES": 2 if capability == 80 else 1, "num_warps": 4}
    return {"BLOCK_M": tile, "BLOCK_N": 64, "STAGES": 2, "num_warps": 4}


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    lengths: Tensor | None,
    starts: Tensor | None,
    requests: int,
    nodes: int,
    words: Tensor | None,
    depth: Tensor | None,
    window: int,
    scale: float | None,
    table: Tensor | None,
    lse: Tensor | None,
    step_keys: bool,
    reach: int,
    tune: dict[str, int] | None,
) -> None:
    """q and out [T, HQ, D]; k and v [requests or blocks, rows, HK, D], or [T, HK, D] for `step_keys`."""
    heads, dim = q.shape[1:]
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    if dim != triton.next_power_of_2(dim) or not 16 <= dim <= 256:
        raise ValueError(f"head size {dim}: the kernels take 16, 32, 64, 128 and 256")
    if any(x.stride(-1) != 1 for x in (q, k, v, out)):
        raise ValueError("the last dimension of q, k, v and out must be contiguous")
    if window > 0 and depth is None:
        raise ValueError("a sliding window needs the depth of every node")
    options = config(dim, nodes * group, q.element_size(), device.capability(q.device)) | (tune or {})
    splits = options.pop("splits", 0)
    tiles = triton.cdiv(nodes * group, options["BLOCK_M"])
    if splits == 0:
        # About two programs a multiprocessor, and at least four blocks of keys in each.
        reach = min(reach, window + nodes) if window > 0 else reach
        wanted = 2 * device.processors(q.device) // (tiles * requests * kv_heads)
        splits = max(1, min(wanted, reach // (4 * options["BLOCK_N"]), MAX_SPLITS))
    if lse is not None:
        splits = 1
    partial, logs = out, lse if lse is not None else out
    if splits > 1:
        partial = torch.empty(q.shape[0], heads, splits, dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(q.shape[0], heads, splits, dtype=torch.float32, device=q.device)
    paged = table is not None
    batch, row = (0, k.stride(0)) if step_keys else (k.stride(0), k.stride(1))
    v_batch, v_row = (0, v.stride(0)) if step_keys else (v.stride(0), v.stride(1))
    placeholder = q
    _attend[(tiles, requests * kv_heads, splits)](
        q, k, v, out, partial, logs,
        placeholder if starts is None else starts, placeholder if lengths is None else lengths,
        placeholder if words is None else words, placeholder if depth is None else depth,
        placeholder if table is None else table,
        (dim**-0.5 if scale is None else scale) * LOG2E, nodes, window,
        q.stride(0), q.stride(1), batch, row, k.stride(-2), v_batch, v_row, v.stride(-2),
        out.stride(0), out.stride(1), 0 if table is None else table.stride(0), 0 if lse is None else lse.stride(0),
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, W=1 if words is None else words.shape[-1], SPLITS=splits,
        PAGED=paged, PAGE=k.shape[1] if paged else 1, PACKED=starts is not None, STEP_KEYS=step_keys,
        TREE=words is not None, WINDOW=window > 0, LSE=lse is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", TAIL_N=min(TAIL, options["BLOCK_N"]), **options,
    )  # fmt: skip
    if splits > 1:
        _join[(q.shape[0], heads)](
            partial, logs, out, out.stride(0), out.stride(1),
            HEADS=heads, DIM=dim, SPLITS=splits, PAD=triton.next_power_of_2(splits), num_warps=1 if splits <= 8 else 4,
        )  # fmt: skip


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
    reach: int | None = None,
    tune: dict[str, int] | None = None,
) -> Tensor:
    """As `ddtree.attention.tree_attention`. `reach`: the longest context to plan the split for (default: the cache's
    rows).

    Paged and ragged (vLLM): see `paged_attention`. `tune` overrides block sizes (benchmarks). Raises ValueError for a
    head size that is no power of two from 16 to 256.
    """
    requests, nodes, heads, dim = q.shape
    flat = q.reshape(requests * nodes, heads, dim)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    _launch(
        flat, k_cache, v_cache, out, lengths=lengths, starts=None, requests=requests, nodes=nodes,
        words=None if words is None else words.contiguous(), depth=None if depth is None else depth.contiguous(),
        window=window, scale=scale, table=block_table, lse=None, step_keys=False, reach=reach or rows, tune=tune,
    )  # fmt: skip
    return out.view(requests, nodes, heads, dim)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens: Tensor,
    max_nodes: int,
    lengths: Tensor,
    words: Tensor,
    block_table: Tensor,
    *,
    out: Tensor | None = None,
    depth: Tensor | None = None,
    window: int = 0,
    scale: float | None = None,
    reach: int | None = None,
) -> Tensor:
    """Tree attention of packed requests over a paged cache that already holds the step's own keys.

    q [T, HQ, D]; request r has rows cu_seqlens[r]..cu_seqlens[r+1] (int32 [R + 1]), at most `max_nodes` (static);
    k_cache, v_cache [blocks, block size, HK, D] with any strides but the last; lengths int32 [R]: cached tokens before
    this step; words int64 [T, W], bits counted from the request's first row; block_table int32 [R, blocks]. Returns [T,
    HQ, D].
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _launch(
        q, k_cache, v_cache, out, lengths=lengths, starts=cu_seqlens, requests=cu_seqlens.shape[0] - 1, nodes=max_nodes,
        words=words, depth=depth, window=window, scale=scale, table=block_table, lse=None, step_keys=False,
        reach=reach or block_table.shape[1] * k_cache.shape[1], tune=None,
    )  # fmt: skip
    return out


def tree_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    words: Tensor,
    scale: float | None = None,
    max_nodes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ddtree.attention.tree_part`. `max_nodes`: the most rows of one request (default: all rows)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32, device=q.device)
    _launch(
        q, k, v, out, lengths=None, starts=cu_seqlens, requests=cu_seqlens.shape[0] - 1,
        nodes=max_nodes or q.shape[0], words=words, depth=None, window=0, scale=scale, table=None, lse=lse,
        step_keys=True, reach=1, tune=None,
    )  # fmt: skip
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As `ddtree.attention.merge`: one launch."""
    total, heads, dim = out_a.shape
    out = torch.empty(total, heads, dim, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=out_a.device)
    _merge[(total, heads)](
        out_a, lse_a, out_b, lse_b, out, lse, out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1),
        lse_a.stride(0), lse_b.stride(0), total, DIM=dim, num_warps=1,
    )  # fmt: skip
    return out, lse


def attend(lengths: Tensor, words: Tensor, rows: int, depth: Tensor | None = None) -> Any:
    """As `ddtree.kvcache.plain_attend`: binds a step's lengths and words, the same for all layers."""

    def call(q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
        return tree_attention(q, keys, values, lengths, words, depth=depth, window=window, reach=rows)

    return call
