"""Ancestor bit words inside kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window(row, live, start, W: tl.constexpr):
    """The 64 bits from bit `start` (negative reads 0) of rows of W words: uint64, one per row. `row`: pointers to word
    0."""
    start += tl.zeros_like(live.to(tl.int32))
    shift = (start & 63).to(tl.uint64)
    word = start >> 6
    low = tl.load(row + word, mask=(live & (word >= 0) & (word < W)) != 0, other=0)
    high = tl.load(row + word + 1, mask=(live & (word >= -1) & (word < W - 1)) != 0, other=0)
    low = low.to(tl.uint64, bitcast=True) >> shift
    high = tl.where(shift == 0, 0, high.to(tl.uint64, bitcast=True) << ((64 - shift) & 63))
    return low | high


@triton.jit
def unpack(bits, COLUMNS: tl.constexpr):
    """bool [rows, COLUMNS] from uint64 [rows]; COLUMNS at most 64."""
    return ((bits[:, None] >> tl.arange(0, COLUMNS).to(tl.uint64)[None, :]) & 1) != 0
