"""The elementwise work between a layer's matrix products, a launch each. Twins: `ddtree.layers`, `ddtree.kvcache`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x, delta, weight, total, out, x_row, delta_row, eps, WIDTH: tl.constexpr, PAD: tl.constexpr,
              ADD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    if ADD:
        value = value + tl.load(delta + row * delta_row + column, mask=inside, other=0.0)  # rounds as torch's sum does
        tl.store(total + row * WIDTH + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `ddtree.layers.add_norm`: x and delta [..., H] -> their sum, and its RMS norm."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = flat if delta is None else torch.empty_like(out)
    other = flat if delta is None else delta.reshape(-1, width)
    pad = triton.next_power_of_2(width)
    _add_norm[(flat.shape[0],)](
        flat, other, weight, total, out, flat.stride(0), other.stride(0), eps, WIDTH=width, PAD=pad,
        ADD=delta is not None, num_warps=min(16, max(1, pad // 512)),
    )  # fmt: skip
    return total.view(x.shape), out.view(x.shape)


@triton.jit
def _rotate(base, turn, sign, weight, eps, cos, sin, at, HD: tl.constexpr, ROT: tl.constexpr, NORM: tl.constexpr):
    """One head: norm, then rotation. turn: the partner's offset of every dimension; sign: of the partner's term."""
    x = tl.load(base + at).to(tl.float32)
    other = tl.load(base + turn).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / HD + eps)
        # As the twin: the norm rounds to the model's dtype before the rotation.
        x = (x * scale * tl.load(weight + at).to(tl.float32)).to(base.dtype.element_ty).to(tl.float32)
        other = (other * scale * tl.load(weight + turn).to(tl.float32)).to(base.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + at, mask=at < ROT, other=1.0)
    s = tl.load(sin + at, mask=at < ROT, other=0.0)
    return x * c + sign * other * s


@triton.jit
def _heads(
    qgkv, q_weight, k_weight, cos, sin, rows, q, keys, values, row_stride, k_request, k_row, k_head, eps, NODES,
    k_at, v_at, HEADS: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, ROT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HD)
    turn = tl.where(at < ROT, (at + ROT // 2) % ROT, at)
    sign = tl.where(at < ROT // 2, -1.0, 1.0)
    base = qgkv + token * row_stride
    cos += token * ROT
    sin += token * ROT
    if head < HEADS:
        x = _rotate(base + head * HD, turn, sign, q_weight, eps, cos, sin, at, HD, ROT, NORM)
        tl.store(q + (token * HEADS + head) * HD + at, x.to(q.dtype.element_ty))
    else:
        row = tl.load(rows + token)
        kv = head - HEADS
        place = (token // NODES) * k_request + row * k_row
        if kv < KV:
            key = _rotate(base + k_at + kv * HD, turn, sign, k_weight, eps, cos, sin, at, HD, ROT, NORM)
            tl.store(keys + place + kv * k_head + at, key.to(keys.dtype.element_ty))
        else:
            value = tl.load(base + v_at + (kv - KV) * HD + at)
            tl.store(values + place + (kv - KV) * k_head + at, value.to(values.dtype.element_ty))


def rotate_and_write(
    qgkv: Tensor,
    heads: int,
    gated: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """As `ddtree.kvcache.rotate_and_write`: norm and rotate queries and keys, write keys and values to the cache."""
    requests, nodes, _ = qgkv.shape
    kv, hd = keys.shape[2:]
    if keys.stride() != values.stride() or qgkv.stride(2) != 1 or qgkv.stride(0) != nodes * qgkv.stride(1):
        raise ValueError("projections or caches are not laid out as the kernel expects")
    q = torch.empty(requests, nodes, heads, hd, dtype=qgkv.dtype, device=qgkv.device)
    k_at = heads * hd * (2 if gated else 1)
    norm = k_weight is not None
    if heads and norm != (q_weight is not None):
        raise ValueError("queries and keys are normed together or not at all")
    _heads[(requests * nodes, heads + 2 * kv)](
        qgkv, qgkv if q_weight is None else q_weight, k_weight if norm else qgkv, cos.contiguous(), sin.contiguous(),
        rows.contiguous(), q, keys, values, qgkv.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), eps, nodes,
        k_at, k_at + kv * hd, HEADS=heads, KV=kv, HD=hd, ROT=cos.shape[-1], NORM=norm, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _swiglu(x, out, row_stride, WIDTH, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * row_stride + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(x.dtype.element_ty)
    tl.store(out + row * WIDTH + column, silu * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """As `ddtree.layers.swiglu`: [..., 2 I] -> [..., I]."""
    width = gate_up.shape[-1] // 2
    flat = gate_up.reshape(-1, 2 * width)
    out = torch.empty(flat.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(flat.shape[0], triton.cdiv(width, 1024))](flat, out, flat.stride(0), width, CHUNK=1024, num_warps=4)
    return out.view(*gate_up.shape[:-1], width)


@triton.jit
def _gated_norm(x, z, weight, out, z_row, eps, HEADS, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, DIM)
    value = tl.load(x + row * DIM + at).to(tl.float32)
    gate = tl.load(z + (row // HEADS) * z_row + (row % HEADS) * DIM + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    normed = (value * scale * tl.load(weight + at).to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * DIM + at, (normed * gate * tl.sigmoid(gate)).to(out.dtype.element_ty))


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ddtree.layers.gated_norm`: x [R, n, heads, dim], z [R, n, heads * dim] -> [R, n, heads * dim]."""
    requests, nodes, heads, dim = x.shape
    if z.stride(2) != 1 or z.stride(0) != nodes * z.stride(1):
        z = z.contiguous()
    out = torch.empty(requests, nodes, heads * dim, dtype=z.dtype, device=x.device)
    grid = (requests * nodes * heads,)
    _gated_norm[grid](x.contiguous(), z, weight, out, z.stride(1), eps, heads, DIM=dim, num_warps=1)
    return out
