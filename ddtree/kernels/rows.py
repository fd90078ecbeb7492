"""Move and gather rows when a path is committed: one launch for all layers. Twin of the move:
`ddtree.kvcache.move_rows`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _move(
    cache, source, destination, layer_stride, request_stride, row_stride, STEPS: tl.constexpr, PAD: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    step = tl.arange(0, PAD)
    read = tl.load(source + request * STEPS + step, mask=step < STEPS, other=0)
    write = tl.load(destination + request * STEPS + step, mask=step < STEPS, other=0)
    moved = (read != write) & (step < STEPS)
    mask = (moved[:, None] & (column < WIDTH)[None, :]) != 0
    base = cache + layer * layer_stride + request * request_stride + column[None, :]
    rows = tl.load(base + read[:, None] * row_stride, mask=mask, other=0.0)
    tl.debug_barrier()  # a row may be one step's target and another's source: all reads come first
    tl.store(base + write[:, None] * row_stride, rows, mask=mask)


def move_rows(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """As `ddtree.kvcache.move_rows`: rows of every layer, keys and values, all read before any is written. Rows whose
    source is their destination are skipped. cache [layers, 2, R, rows, kv_heads, head_dim], its last two dimensions
    contiguous and [layers, 2] one stride apart; source, destination int64 [R, n]."""
    layers, pair, requests, _, heads, dim = cache.shape
    if cache.stride(0) != pair * cache.stride(1) or cache.stride(4) != dim or cache.stride(5) != 1:
        raise ValueError(f"a cache of strides {cache.stride()}: layers, keys and values, and heads must be packed")
    width = heads * dim
    chunk = min(256, triton.next_power_of_2(width))
    steps = source.shape[1]
    _move[(layers * pair, requests, triton.cdiv(width, chunk))](
        cache, source.contiguous(), destination.contiguous(), cache.stride(1), cache.stride(2), cache.stride(3),
        STEPS=steps, PAD=triton.next_power_of_2(steps), WIDTH=width, CHUNK=chunk, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather(x, nodes, out, x_request, x_row, STEPS, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    step = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    node = tl.load(nodes + request * STEPS + step).to(tl.int64)
    inside = column < WIDTH
    mask = tl.where(node >= 0, column, WIDTH) < WIDTH
    row = tl.load(x + request * x_request + node * x_row + column, mask=mask, other=0.0)
    tl.store(out + (request * STEPS + step) * WIDTH + column, row, mask=inside)


def gather_rows(x: Tensor, nodes: Tensor) -> Tensor:
    """Hidden states of a path: x [R, N1, F], nodes int32 [R, P] -> [R, P, F]; rows of nodes -1 are zero."""
    requests, _, width = x.shape
    steps = nodes.shape[1]
    out = torch.empty(requests, steps, width, dtype=x.dtype, device=x.device)
    chunk = min(2048, triton.next_power_of_2(width))
    _gather[(steps, requests, triton.cdiv(width, chunk))](
        x, nodes.contiguous(), out, x.stride(0), x.stride(1), steps, WIDTH=width, CHUNK=chunk, num_warps=4
    )
    return out
