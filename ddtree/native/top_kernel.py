"""The best log-probabilities of every row in two launches; twin: ``ddtree.tree.top_logprobs``.

torch's topk, logsumexp and the casts around them are some twenty launches over a vocabulary that one pass can read.
Equal logits come in order of their ids, which topk leaves open: all ranks of a tensor-parallel group build one tree.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
LOWEST = tl.constexpr(-9223372036854775808)


@triton.jit
def _best(keys, T: tl.constexpr, PAD: tl.constexpr):
    """The T largest of distinct int64 keys, in order: int64 [PAD]."""
    place = tl.arange(0, PAD)
    out = tl.full((PAD,), LOWEST, tl.int64)
    for t in tl.static_range(T):
        top = tl.max(keys, axis=0)
        out = tl.where(place == t, top, out)
        keys = tl.where(keys == top, LOWEST, keys)
    return out


@triton.jit(do_not_specialize=["vocabulary", "row_stride", "chunks"])
def _chunk(
    logits, keys, highs, sums, vocabulary, row_stride, chunks,
    T: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = chunk * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    high = tl.max(x, axis=0)
    base = tl.where(high == float("-inf"), 0.0, high)
    tl.store(highs + row * chunks + chunk, high)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(x - base), axis=0))
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    best = _best(ordered * 4294967296 + (2147483647 - id).to(tl.int64), T, PAD)
    place = tl.arange(0, PAD)
    tl.store(keys + (row * chunks + chunk) * T + place, best, mask=place < T)


@triton.jit(do_not_specialize=["chunks"])
def _join(
    keys, highs, sums, values, ids, chunks,
    T: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    high = tl.load(highs + row * chunks + c, mask=c < chunks, other=float("-inf"))
    part = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    top = tl.max(high, axis=0)
    lse = top + tl.log(tl.sum(tl.where(high == float("-inf"), 0.0, part * tl.exp(high - top)), axis=0))
    at = tl.arange(0, SIZE)
    best = _best(tl.load(keys + row * chunks * T + at, mask=at < chunks * T, other=LOWEST), T, PAD)
    bits = (best >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    value = bits.to(tl.float32, bitcast=True)
    place = tl.arange(0, PAD)
    tl.store(values + row * T + place, tl.where(value == float("-inf"), value, value - lse), mask=place < T)
    tl.store(ids + row * T + place, 2147483647 - (best & 4294967295), mask=place < T)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best of each row: logits [S, V] of any float dtype, V >= count, rows contiguous.

    Returns:
        values float32 [S, count] descending and ids int64 [S, count]; NaN counts as -inf.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    pad = triton.next_power_of_2(count)
    device = logits.device
    keys = torch.empty(rows, chunks, count, dtype=torch.int64, device=device)
    highs = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    values = torch.empty(rows, count, dtype=torch.float32, device=device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    _chunk[(rows, chunks)](
        logits, keys, highs[0], highs[1], vocabulary, logits.stride(0), chunks,
        T=count, PAD=pad, SIZE=CHUNK, num_warps=4,
    )  # fmt: skip
    _join[(rows,)](
        keys, highs[0], highs[1], values, ids, chunks,
        T=count, PAD=pad, SIZE=triton.next_power_of_2(chunks * count), CHUNKS=triton.next_power_of_2(chunks),
        num_warps=4,
    )  # fmt: skip
    return values, ids
