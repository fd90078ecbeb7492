"""Gated DeltaNet on a tree, two launches a layer; twins in `ddtree.gdn`, whose docstring has the equations.

The first does what is done once a head and not once a slice of it: convolution along ancestors, norms, decays summed.

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

from ddtree import gdn as twin
from ddtree.gdn import Layer, Stash
from ddtree.kernels.bits import unpack, window
from ddtree.kernels.trust import distrust

KERNEL = 4  # taps of the convolution (all published GDN models)


@triton.jit
def _decay(a, a_log, dt_bias):
    """g = -exp(a_log) softplus(a + dt_bias); log(1 + e) by its series where 1 + e would round e away."""
    z = a.to(tl.float32) + dt_bias
    e = tl.exp(-tl.abs(z))
    log = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (0.33333334 - 0.25 * e))), tl.log(1.0 + e))
    return -tl.exp(a_log) * (tl.maximum(z, 0.0) + log)


@triton.jit
def _conv(x, x_row, history, weight, channel, s_channel, s_column, windows, node, live, COLUMNS: tl.constexpr):
    """SiLU(convolution) of some nodes: float32 [nodes, channels]. windows: entries of `conv_windows`, 4 a node."""
    total = tl.zeros((node.shape[0], channel.shape[0]), tl.float32)
    for tap in tl.static_range(4):
        at = tl.load(windows + node * 4 + tap, mask=live, other=0)
        row = tl.load(x + at[:, None] * x_row + channel[None, :], mask=(live & (at >= 0))[:, None], other=0.0)
        row = row.to(tl.float32)
        if tl.min(at, axis=0) < 0:  # nodes near the root read the history
            past = history + channel[None, :] * s_channel + (COLUMNS + at)[:, None] * s_column
            row += tl.load(past, mask=(live & (at < 0))[:, None], other=0.0).to(tl.float32)
        total += row * tl.load(weight + channel * 4 + tap).to(tl.float32)[None, :]
    return total * tl.sigmoid(total)


@triton.jit(do_not_specialize=["nodes"])
def _prepare(
    x, a, conv, slots, words, windows, weight, a_log, dt_bias, q_out, k_out, v_out, g_out, nodes,
    x_row, a_row, c_slot, c_channel, c_column,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution, norms and path sums of one head's nodes: queries, then keys, then values (with the head's decay)."""
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64) if SLOTS else request
    first = request * nodes
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = node < nodes
    x += first * x_row
    conv += slot * c_slot
    windows += first * 4
    if head < 2 * HK:
        channel = head * DK + tl.arange(0, DK)
        y = _conv(x, x_row, conv, weight, channel, c_channel, c_column, windows, node, live, COLUMNS)
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
        place = (first + node)[:, None] * (HK * DK) + tl.arange(0, DK)[None, :]
        if head < HK:
            tl.store(q_out + place + head * DK, y * DK**-0.5, mask=live[:, None])
        else:
            tl.store(k_out + place + (head - HK) * DK, y, mask=live[:, None])
    else:
        value = head - 2 * HK
        channel = 2 * HK * DK + value * DV + tl.arange(0, DV)
        z = _conv(x, x_row, conv, weight, channel, c_channel, c_column, windows, node, live, COLUMNS)
        tl.store(v_out + ((first + node) * HV + value)[:, None] * DV + tl.arange(0, DV)[None, :], z, mask=live[:, None])
        rate = tl.load(a_log + value).to(tl.float32)
        bias = tl.load(dt_bias + value).to(tl.float32)
        path = tl.zeros((ROWS,), tl.float32)
        for start in range(0, nodes, 64):
            other = start + tl.arange(0, 64)
            g = _decay(tl.load(a + (first + other) * a_row + value, mask=other < nodes, other=0.0), rate, bias)
            seen = unpack(window(words + (first + node) * W, live, start, W), 64)
            path += tl.sum(tl.where(seen, g[None, :], 0.0), axis=1)
        tl.store(g_out + (first + node) * HV + value, path, mask=live)


@triton.jit
def _scores(q, k, row, row_live, column, HEAD: tl.constexpr, DK: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr):
    """Q K^T and K K^T between two tiles of nodes, accumulated over chunks of the key dimension."""
    qk = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    kk = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for chunk in range(0, DK, CHUNK):
        d = chunk + tl.arange(0, CHUNK)
        mine = tl.load(k + row[:, None] * HEAD + d[None, :], mask=row_live[:, None], other=0.0)
        query = tl.load(q + row[:, None] * HEAD + d[None, :], mask=row_live[:, None], other=0.0)
        theirs = tl.trans(tl.load(k + column[:, None] * HEAD + d[None, :]))
        qk = tl.dot(query, theirs, qk, input_precision=P)
        kk = tl.dot(mine, theirs, kk, input_precision=P)
    return qk, kk


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
    b, state, slots, words, q_in, k_in, g_in, u_io, out, nodes, b_row, s_slot, s_head, s_key, s_value,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """U and the outputs of one value head's slice; u_io holds V and becomes U."""
    head = tl.program_id(0) // (DV // BV)
    dv = (tl.program_id(0) % (DV // BV)) * BV + tl.arange(0, BV)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64) if SLOTS else request
    first = request * nodes
    key = (first * HK + head // (HV // HK)) * DK
    q_in += key
    k_in += key
    g_in += first * HV + head
    u_io += (first * HV + head) * DV
    out += (first * HV + head) * DV
    words += first * W
    state += slot * s_slot + head * s_head + dv[None, :] * s_value
    HEAD: tl.constexpr = HK * DK

    # The root is everyone's ancestor: its write k0 u0^T joins the state. With S = e^g0 S_0 + k0 u0^T,
    # K S = e^g0 K S_0 + (K k0) u0^T, so S itself is never formed.
    k0_s = tl.zeros((BV,), tl.float32)
    q0_s = tl.zeros((BV,), tl.float32)
    q0_k0 = 0.0
    for chunk in range(0, DK, CHUNK):
        d = chunk + tl.arange(0, CHUNK)
        s = tl.load(state + d[:, None] * s_key).to(tl.float32)
        k0 = tl.load(k_in + d)
        q0 = tl.load(q_in + d)
        k0_s += tl.sum(k0[:, None] * s, axis=0)
        q0_s += tl.sum(q0[:, None] * s, axis=0)
        q0_k0 += tl.sum(q0 * k0, axis=0)
    g0 = tl.load(g_in)
    kept = tl.exp(g0)
    u0 = tl.sigmoid(tl.load(b + first * b_row + head).to(tl.float32)) * (tl.load(u_io + dv) - kept * k0_s)
    tl.store(out + dv, (kept * q0_s + q0_k0 * u0).to(out.dtype.element_ty))
    tl.debug_barrier()  # u_io: all of v is read before u is written
    tl.store(u_io + dv, u0)

    for start in range(1, nodes, BLOCK):
        node = start + tl.arange(0, BLOCK)
        live = node < nodes
        k_s = tl.zeros((BLOCK, BV), tl.float32)
        q_s = tl.zeros((BLOCK, BV), tl.float32)
        qk = tl.zeros((BLOCK, BLOCK), tl.float32)
        kk = tl.zeros((BLOCK, BLOCK), tl.float32)
        k_k0 = tl.zeros((BLOCK,), tl.float32)
        q_k0 = tl.zeros((BLOCK,), tl.float32)
        for chunk in range(0, DK, CHUNK):
            d = chunk + tl.arange(0, CHUNK)
            s = tl.load(state + d[:, None] * s_key).to(tl.float32)
            k0 = tl.load(k_in + d)
            k = tl.load(k_in + node[:, None] * HEAD + d[None, :], mask=live[:, None], other=0.0)
            q = tl.load(q_in + node[:, None] * HEAD + d[None, :], mask=live[:, None], other=0.0)
            k_k0 += tl.sum(k * k0[None, :], axis=1)
            q_k0 += tl.sum(q * k0[None, :], axis=1)
            k_s = tl.dot(k, s, k_s, input_precision=P)
            q_s = tl.dot(q, s, q_s, input_precision=P)
            kk = tl.dot(k, tl.trans(k), kk, input_precision=P)
            qk = tl.dot(q, tl.trans(k), qk, input_precision=P)
        row = words + node * W
        path = tl.load(g_in + node * HV, mask=live, other=0.0) - g0  # log decay from below the root
        grown = tl.exp(path)[:, None]
        beta = tl.sigmoid(tl.load(b + (first + node) * b_row + head, mask=live, other=0.0).to(tl.float32))
        place = node[:, None] * (HV * DV) + dv[None, :]
        u = tl.load(u_io + place, mask=live[:, None], other=0.0)
        u -= grown * (kept * k_s + k_k0[:, None] * u0[None, :])
        o = grown * (kept * q_s + q_k0[:, None] * u0[None, :])
        for before in range(1, start, BLOCK):
            column = before + tl.arange(0, BLOCK)
            their_qk, their_kk = _scores(q_in, k_in, node, live, column, HEAD, DK, CHUNK, P)
            earlier = unpack(window(row, live, before, W), BLOCK)
            their_path = tl.load(g_in + column * HV) - g0
            decay = tl.exp(tl.where(earlier, path[:, None] - their_path[None, :], float("-inf")))
            their_u = tl.load(u_io + column[:, None] * (HV * DV) + dv[None, :])
            u -= tl.dot(their_kk * decay, their_u, input_precision=P)
            o += tl.dot(their_qk * decay, their_u, input_precision=P)
        seen = unpack(window(row, live, start, W), BLOCK)
        decay = tl.exp(tl.where(seen, path[:, None] - path[None, :], float("-inf")))
        strict = tl.arange(0, BLOCK)[:, None] > tl.arange(0, BLOCK)[None, :]
        lower = beta[:, None] * tl.where(strict, kk * decay, 0.0)
        u = tl.dot(_inverse(lower, BLOCK, P), beta[:, None] * u, input_precision=P)
        o = tl.dot(qk * decay, u, o, input_precision=P)
        tl.debug_barrier()
        tl.store(u_io + place, u, mask=live[:, None])
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
        row = first + tl.load(path + request * p_row + source - COLUMNS, mask=taken, other=0)
        new = tl.load(x + row[None, :] * x_row + channel[:, None], mask=fresh, other=0.0)
        tl.debug_barrier()  # a column is one thread's source and another's target
        tl.store(base + column[None, :] * c_column, tl.where(old, kept, new.to(kept.dtype)), mask=valid)


def config(dim: int, nodes: int) -> dict[str, int]:
    """Tile sizes of `_verify` by value dimension and nodes (root included), the same for every compute capability.

    Tiles of 32 nodes, 4 warps: larger ones spill registers, and on 9.0 they take the warp-group product, which for
    float32 operands has to transpose in shared memory.
    """
    return {"BLOCK": 16 if nodes <= 17 else 32, "BV": min(dim, 32), "num_warps": 4, "num_stages": 1}


def launch_verify(
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
    options = config(dv, nodes) | (tune or {})
    x, a, b = (t if t.stride(2) == 1 and t.stride(0) == nodes * t.stride(1) else t.contiguous() for t in (x, a, b))

    def new(*shape: int) -> Tensor:
        return torch.empty(requests, nodes, *shape, dtype=torch.float32, device=x.device)

    out = torch.empty(requests, nodes, hv, dv, dtype=x.dtype, device=x.device)
    stash, q = Stash(x, new(hk, dk), new(hv), new(hv, dv)), new(hk, dk)
    words, place = words.contiguous(), x if slots is None else slots
    shape = {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "W": words.shape[2], "SLOTS": slots is not None}
    rows = 16 if requests * nodes <= 1024 else 32
    _prepare[(triton.cdiv(nodes, rows), 2 * hk + hv, requests)](
        x, a, conv_state, place, words, windows.contiguous(), layer.conv_weight.contiguous(), layer.a_log,
        layer.dt_bias, q, stash.k, stash.u, stash.g, nodes, x.stride(1), a.stride(1), *conv_state.stride(),
        COLUMNS=conv_state.shape[2], ROWS=rows, num_warps=4, **shape,
    )  # fmt: skip
    _verify[(hv * (dv // options["BV"]), requests)](
        b, state, place, words, q, stash.k, stash.g, stash.u, out, nodes, b.stride(1), *state.stride(),
        CHUNK=min(dk, 32), P="tf32x3", **shape, **options,
    )  # fmt: skip
    return out, stash


def launch_commit(
    stash: Stash, conv_state: Tensor, state: Tensor, nodes: Tensor, count: Tensor, slots: Tensor | None = None
) -> None:
    """`commit` by the kernel, unasked: one launch moves state and convolution window, in place."""
    requests, size = stash.x.shape[:2]
    hk, dk = stash.k.shape[2:]
    hv, dv = stash.u.shape[2:]
    bv, chunk = min(dv, 32), 128
    jobs = hv * (dv // bv) + triton.cdiv(conv_state.shape[1], chunk)
    _commit[(jobs, requests)](
        stash.x, stash.k, stash.g, stash.u, conv_state, state, nodes if slots is None else slots, nodes, count, size,
        stash.x.stride(1), *conv_state.stride(), *state.stride(), nodes.stride(0),
        HK=hk, HV=hv, DK=dk, DV=dv, COLUMNS=conv_state.shape[2], PAD=max(16, triton.next_power_of_2(nodes.shape[1])),
        STEPS=nodes.shape[1], SLOTS=slots is not None, BV=bv, CHUNK=chunk, PRECISION="tf32x3",
        num_warps=2,  # fewer than a warp group: see `config`
    )  # fmt: skip


def trusted(device: torch.device) -> bool:
    """Whether the kernels have been seen right on this card (see `ddtree.kernels.trust`); true where they are
    interpreted."""
    return device.type != "cuda" or not distrust(device)


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
) -> tuple[Tensor, Stash]:
    """As `ddtree.gdn.verify`: by the kernels where they have been seen right, else by the twin."""
    run = launch_verify if trusted(x.device) else twin.verify
    return run(layer, x, a, b, conv_state, state, words, windows, slots)


def commit(
    stash: Stash, conv_state: Tensor, state: Tensor, nodes: Tensor, count: Tensor, slots: Tensor | None = None
) -> None:
    """As `ddtree.gdn.commit`, as `verify` chooses."""
    run = launch_commit if trusted(state.device) else twin.commit
    run(stash, conv_state, state, nodes, count, slots)
