"""Gated DeltaNet on a tree, one launch a layer; twins in `ddtree.gdn`, whose docstring has the equations.

A program owns one value head and a slice of its value dimension. The root is every node's ancestor, so its rank-1 write
goes into the state first; the other N nodes then fill whole tiles. Within a tile T = (I + A)^-1 is built by merging
inverses of diagonal blocks of 2, 4, 8, ... rows: T <- T - T A_off T, A_off being the part of A that joins two
neighbours. That is substitution by blocks (each diagonal block's exact inverse, no powers of A: a Neumann series loses
all digits for aligned keys), as dense products. Later tiles first subtract what the nodes of earlier ones wrote. All
float32; products in tf32x3.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.gdn import Layer, Stash
from ddtree.kernels.bits import unpack, window

KERNEL = 4  # taps of the convolution (all published GDN models)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _decay(a, a_log, dt_bias):
    """g = -exp(a_log) softplus(a + dt_bias); log(1 + e) by its series where 1 + e would round e away."""
    z = a.to(tl.float32) + dt_bias
    e = tl.exp(-tl.abs(z))
    log = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (0.33333334 - 0.25 * e))), tl.log(1.0 + e))
    return -tl.exp(a_log) * (tl.maximum(z, 0.0) + log)


@triton.jit
def _conv_root(x, history, weight, channel, s_channel, s_column, COLUMNS: tl.constexpr):
    """SiLU(convolution) of the root: float32 [1, channels]. history points past the newest column."""
    total = tl.load(x + channel).to(tl.float32) * tl.load(weight + channel * 4 + 3).to(tl.float32)
    for tap in tl.static_range(3):
        past = tl.load(history + channel * s_channel + (COLUMNS - 3 + tap) * s_column).to(tl.float32)
        total += past * tl.load(weight + channel * 4 + tap).to(tl.float32)
    return _silu(total)[None, :]


@triton.jit
def _conv(x, x_row, history, weight, channel, s_channel, s_column, w0, w1, w2, node, live, COLUMNS: tl.constexpr):
    """SiLU(convolution) of nodes below the root: float32 [nodes, channels]. w0, w1, w2: the windows' older entries.

    A node of depth 1 reads the history's two newest columns, one of depth 2 the newest, deeper ones none.
    """
    t0 = tl.load(weight + channel * 4).to(tl.float32)
    t1 = tl.load(weight + channel * 4 + 1).to(tl.float32)
    t2 = tl.load(weight + channel * 4 + 2).to(tl.float32)
    t3 = tl.load(weight + channel * 4 + 3).to(tl.float32)
    newest = tl.load(history + channel * s_channel + (COLUMNS - 1) * s_column).to(tl.float32)
    older = tl.load(history + channel * s_channel + (COLUMNS - 2) * s_column).to(tl.float32)
    c = channel[None, :]
    total = tl.load(x + node[:, None] * x_row + c, mask=live[:, None], other=0.0).to(tl.float32) * t3[None, :]
    at = tl.load(x + w2[:, None] * x_row + c, mask=(live & (w2 >= 0))[:, None], other=0.0)
    total += at.to(tl.float32) * t2[None, :]
    at = tl.load(x + w1[:, None] * x_row + c, mask=(live & (w1 >= 0))[:, None], other=0.0)
    total += at.to(tl.float32) * t1[None, :]
    at = tl.load(x + w0[:, None] * x_row + c, mask=(live & (w0 >= 0))[:, None], other=0.0)
    total += at.to(tl.float32) * t0[None, :]
    total += tl.where((w1 < 0)[:, None], (older * t0 + newest * t1)[None, :], 0.0)
    total += tl.where(((w0 < 0) & (w1 >= 0))[:, None], (newest * t0)[None, :], 0.0)
    return _silu(total)


@triton.jit
def _inverse(lower, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular [BLOCK, BLOCK]."""
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, 6):
        if 2**level < BLOCK:
            half = 2**level
            off = tl.where((i // (2 * half) == j // (2 * half)) & (i // half != j // half), lower, 0.0)
            inverse -= tl.dot(inverse, tl.dot(off, inverse, input_precision=PRECISION), input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["nodes"])
def _verify(
    x, a, b, conv, state, slots, words, windows, weight, a_log, dt_bias,
    out, k_stash, g_stash, u_stash, nodes,
    x_row, a_row, b_row, c_slot, c_channel, c_column, s_slot, s_head, s_key, s_value,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // (DV // BV)
    part = tl.program_id(0) % (DV // BV)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64) if SLOTS else request
    key_head = head // (HV // HK)
    dk = tl.arange(0, DK)
    dv = part * BV + tl.arange(0, BV)
    q_channel = key_head * DK + dk
    k_channel = HK * DK + q_channel
    v_channel = 2 * HK * DK + head * DV + dv
    first = request * nodes
    x += first * x_row
    conv += slot * c_slot
    rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    owner = (head % (HV // HK) == 0) & (part == 0)
    k_stash += (first * HK + key_head) * DK
    g_stash += first * HV + head
    u_stash += (first * HV + head) * DV
    out += (first * HV + head) * DV
    words += first * W

    # The root: S <- e^g S + k u^T.
    s = tl.load(state + slot * s_slot + head * s_head + dk[:, None] * s_key + dv[None, :] * s_value).to(tl.float32)
    q0 = _unit(_conv_root(x, conv, weight, q_channel, c_channel, c_column, COLUMNS)) * DK**-0.5
    k0 = _unit(_conv_root(x, conv, weight, k_channel, c_channel, c_column, COLUMNS))
    v0 = _conv_root(x, conv, weight, v_channel, c_channel, c_column, COLUMNS)
    g0 = _decay(tl.load(a + first * a_row + head), rate, bias)
    b0 = tl.sigmoid(tl.load(b + first * b_row + head).to(tl.float32))
    k0 = tl.trans(k0)  # [DK, 1]
    s *= tl.exp(g0)
    u0 = b0 * (v0 - tl.sum(k0 * s, axis=0)[None, :])
    s += k0 * u0
    o0 = tl.sum(tl.trans(q0) * s, axis=0)[None, :]
    tl.store(out + dv[None, :], o0.to(out.dtype.element_ty))
    tl.store(u_stash + dv[None, :], u0)
    tl.store(k_stash + dk[:, None], k0)
    tl.store(g_stash, g0)

    for start in range(1, nodes, BLOCK):
        node = start + tl.arange(0, BLOCK)
        live = node < nodes
        at = (first + node) * 4
        w0 = tl.load(windows + at, mask=live, other=-1)
        w1 = tl.load(windows + at + 1, mask=live, other=-1)
        w2 = tl.load(windows + at + 2, mask=live, other=-1)
        k = _unit(_conv(x, x_row, conv, weight, k_channel, c_channel, c_column, w0, w1, w2, node, live, COLUMNS))
        g = _decay(tl.load(a + (first + node) * a_row + head, mask=live, other=0.0), rate, bias)
        beta = tl.sigmoid(tl.load(b + (first + node) * b_row + head, mask=live, other=0.0).to(tl.float32))
        row = words + node * W
        seen = unpack(window(row, live, start, W), BLOCK)
        path = tl.sum(tl.where(seen, g[None, :], 0.0), axis=1)  # log decay from below the root
        for before in range(1, start, BLOCK):
            earlier = unpack(window(row, live, before, W), BLOCK)
            column = before + tl.arange(0, BLOCK)
            theirs = _decay(tl.load(a + (first + column) * a_row + head), rate, bias)
            path += tl.sum(tl.where(earlier, theirs[None, :], 0.0), axis=1)
        tl.store(g_stash + node * HV, path + g0, mask=live)
        tl.store(k_stash + node[:, None] * (HK * DK) + dk[None, :], k, mask=live[:, None])
        grown = tl.exp(path)[:, None]
        q = _unit(_conv(x, x_row, conv, weight, q_channel, c_channel, c_column, w0, w1, w2, node, live, COLUMNS))
        q *= DK**-0.5
        u = _conv(x, x_row, conv, weight, v_channel, c_channel, c_column, w0, w1, w2, node, live, COLUMNS)
        u -= grown * tl.dot(k, s, input_precision=PRECISION)
        o = grown * tl.dot(q, s, input_precision=PRECISION)
        for before in range(1, start, BLOCK):
            column = before + tl.arange(0, BLOCK)
            earlier = unpack(window(row, live, before, W), BLOCK)
            their_path = tl.load(g_stash + column * HV) - g0
            their_k = tl.load(k_stash + column[:, None] * (HK * DK) + dk[None, :])
            their_u = tl.load(u_stash + column[:, None] * (HV * DV) + dv[None, :])
            decay = tl.exp(tl.where(earlier, path[:, None] - their_path[None, :], float("-inf")))
            their_k = tl.trans(their_k)
            u -= tl.dot(tl.dot(k, their_k, input_precision=PRECISION) * decay, their_u, input_precision=PRECISION)
            o += tl.dot(tl.dot(q, their_k, input_precision=PRECISION) * decay, their_u, input_precision=PRECISION)
        decay = tl.exp(tl.where(seen, path[:, None] - path[None, :], float("-inf")))
        k_t = tl.trans(k)
        strict = tl.arange(0, BLOCK)[:, None] > tl.arange(0, BLOCK)[None, :]
        lower = beta[:, None] * tl.where(strict, tl.dot(k, k_t, input_precision=PRECISION) * decay, 0.0)
        u = tl.dot(_inverse(lower, BLOCK, PRECISION), beta[:, None] * u, input_precision=PRECISION)
        o += tl.dot(tl.dot(q, k_t, input_precision=PRECISION) * decay, u, input_precision=PRECISION)
        place = node[:, None] * (HV * DV) + dv[None, :]
        tl.store(u_stash + place, u, mask=live[:, None])
        tl.store(out + place, o.to(out.dtype.element_ty), mask=live[:, None])
        tl.debug_barrier()  # the next tile reads what this one stored


@triton.jit
def _commit(
    x, k_stash, g_stash, u_stash, conv, state, slots, path, count, nodes,
    x_row, c_slot, c_channel, c_column, s_slot, s_head, s_key, s_value, p_row,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, PAD: tl.constexpr,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    used = tl.load(count + request).to(tl.int32) + 1  # nodes on the path, root included
    if used <= 0:
        return
    slot = tl.load(slots + request).to(tl.int64) if SLOTS else request
    first = request * nodes
    if job < HV * (DV // BV):
        head = job // (DV // BV)
        dk = tl.arange(0, DK)
        dv = (job % (DV // BV)) * BV + tl.arange(0, BV)
        step = tl.arange(0, PAD)
        live = step < tl.minimum(used, STEPS)
        node = first + tl.load(path + request * p_row + step, mask=live, other=0)
        last = first + tl.load(path + request * p_row + used - 1)
        to_end = tl.load(g_stash + last * HV + head)
        weight = tl.exp(tl.where(live, to_end - tl.load(g_stash + node * HV + head), float("-inf")))
        key = (node * HK + head // (HV // HK)) * DK
        k = tl.load(k_stash + key[None, :] + dk[:, None], mask=live[None, :], other=0.0)
        u = tl.load(u_stash + ((node * HV + head) * DV)[:, None] + dv[None, :], mask=live[:, None], other=0.0)
        place = state + slot * s_slot + head * s_head + dk[:, None] * s_key + dv[None, :] * s_value
        s = tl.load(place).to(tl.float32) * tl.exp(to_end)
        s += tl.dot(k * weight[None, :], u, input_precision=PRECISION)
        tl.store(place, s.to(state.dtype.element_ty))
    else:
        channel = (job - HV * (DV // BV)) * CHUNK + tl.arange(0, CHUNK)
        inside = channel < 2 * HK * DK + HV * DV
        column = tl.arange(0, 4)
        # Column c of the new window is input `used + c` of history (COLUMNS long) followed by the path.
        source = used + column
        valid = (inside[:, None] & (column < COLUMNS)[None, :]) != 0
        old = valid & (source < COLUMNS)[None, :]
        fresh = valid & (source >= COLUMNS)[None, :]
        base = conv + slot * c_slot + channel[:, None] * c_channel
        kept = tl.load(base + source[None, :] * c_column, mask=old, other=0.0)
        taken = (source >= COLUMNS) & (column < COLUMNS)
        node = first + tl.load(path + request * p_row + source - COLUMNS, mask=taken, other=0)
        new = tl.load(x + node[None, :] * x_row + channel[:, None], mask=fresh, other=0.0)
        tl.debug_barrier()  # a column is one thread's source and another's target
        tl.store(base + column[None, :] * c_column, tl.where(old, kept, new.to(kept.dtype)), mask=valid)


def config(dim: int, nodes: int, capability: int) -> dict[str, int]:
    """Tile sizes of `_verify` by value dimension, nodes (root included) and compute capability (90 = 9.0)."""
    block = 16 if nodes <= 17 else 32 if nodes <= 33 or capability in (86, 89) else 64
    if capability >= 90:
        return {"BLOCK": block, "BV": min(dim, 64), "num_warps": 8 if block == 64 else 4, "num_stages": 1}
    return {"BLOCK": block, "BV": min(dim, 32), "num_warps": 4, "num_stages": 1}


def verify(
    layer: Layer,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_state: Tensor,
    state: Tensor,
    words: Tensor,
    windows: Tensor,
    slots: Tensor | None = None,
    tune: dict[str, int] | None = None,
) -> tuple[Tensor, Stash]:
    """As `ddtree.gdn.verify`. Outputs and stash rows of padding nodes are undefined (they are not NaN); node 0 must be
    the root of all others. Raises ValueError for head sizes that are no power of two, or another kernel than 4 taps."""
    requests, nodes, _ = x.shape
    hk, hv, dk, dv = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
    if layer.conv_weight.shape[1] != KERNEL:
        raise ValueError(f"a convolution of {layer.conv_weight.shape[1]} taps: the kernel takes {KERNEL}")
    if any(d < 16 or d != triton.next_power_of_2(d) for d in (dk, dv)):
        raise ValueError(f"head sizes {dk} and {dv}: the kernel takes powers of two from 16")
    capability = 90
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        capability = 10 * major + minor
    options = config(dv, nodes, capability) | (tune or {})
    x, a, b = (t if t.stride(2) == 1 and t.stride(0) == nodes * t.stride(1) else t.contiguous() for t in (x, a, b))

    def new(*shape: int) -> Tensor:
        return torch.empty(requests, nodes, *shape, dtype=torch.float32, device=x.device)

    out = torch.empty(requests, nodes, hv, dv, dtype=x.dtype, device=x.device)
    stash = Stash(x, new(hk, dk), new(hv), new(hv, dv))
    _verify[(hv * (dv // options["BV"]), requests)](
        x, a, b, conv_state, state, x if slots is None else slots, words.contiguous(), windows.contiguous(),
        layer.conv_weight.contiguous(), layer.a_log, layer.dt_bias, out, stash.k, stash.g, stash.u, nodes,
        x.stride(1), a.stride(1), b.stride(1), *conv_state.stride(), *state.stride(),
        HK=hk, HV=hv, DK=dk, DV=dv, W=words.shape[2], COLUMNS=conv_state.shape[2],
        SLOTS=slots is not None, PRECISION="tf32x3", **options,
    )  # fmt: skip
    return out, stash


def commit(
    stash: Stash, conv_state: Tensor, state: Tensor, nodes: Tensor, count: Tensor, slots: Tensor | None = None
) -> None:
    """As `ddtree.gdn.commit`: one launch moves state and convolution window, in place."""
    requests, size = stash.x.shape[:2]
    hk, dk = stash.k.shape[2:]
    hv, dv = stash.u.shape[2:]
    bv, chunk = min(dv, 64), 128
    jobs = hv * (dv // bv) + triton.cdiv(conv_state.shape[1], chunk)
    _commit[(jobs, requests)](
        stash.x, stash.k, stash.g, stash.u, conv_state, state, nodes if slots is None else slots, nodes, count, size,
        stash.x.stride(1), *conv_state.stride(), *state.stride(), nodes.stride(0),
        HK=hk, HV=hv, DK=dk, DV=dv, COLUMNS=conv_state.shape[2], PAD=max(16, triton.next_power_of_2(nodes.shape[1])),
        STEPS=nodes.shape[1], SLOTS=slots is not None, BV=bv, CHUNK=chunk, PRECISION="tf32x3", num_warps=4,
    )  # fmt: skip
