"""Gated DeltaNet layers on a token tree, in plain torch: the definition that the Triton kernels are tested against.

The gated delta rule of one head, with parent state S_p, log decay g <= 0 and write strength beta:

    S' = e^g S_p;  u = beta (v - S'^T k);  S = S' + k u^T;  o = S^T q

A tree is verified from the frozen state S_0 before its root, with no state per node. With G_i the sum of g from the
root to i,

    (I + A) U = beta (V - e^G K S_0),       A_ij = beta_i e^(G_i - G_j) k_i.k_j      for j a strict ancestor of i
    O = e^G Q S_0 + (D * Q K^T) U,          D_ij = e^(G_i - G_j)                     for j an ancestor of i, or i
    S_a = e^(G_a) S_0 + sum over the path to a of e^(G_a - G_j) k_j u_j^T            (commit)

This is the chunked WY form of Yang et al. (Gated Delta Networks, 2024) with "earlier in the chunk" replaced by
"ancestor"; TreeWY (arXiv 2608.20961) states it for trees. Any order with parents before children makes A strictly lower
triangular, so forward substitution is exact. Decays are masked before `exp`: e^G_i * e^-G_j overflows, and inf * 0 is
NaN.

Heads: `HV` value heads share `HK` key heads, consecutive value heads one key head. Layouts follow transformers'
`qwen3_5`: state [slots, HV, dk, dv], convolution window [slots, C, W] with C = 2 HK dk + HV dv (q, k, v) and W >=
kernel - 1 columns, newest last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.tree import NEG_INF, dense_mask


@dataclass(frozen=True)
class Layer:
    """The parameters of one GDN layer that tree verification needs.

    conv_weight [C, kernel] (depthwise, no bias), a_log and dt_bias [HV]; key_heads HK, value_heads HV, key_dim dk,
    value_dim dv.
    """

    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Stash:
    """What a verify leaves behind for the commit of one layer.

    x [R, N1, C]: the convolution's inputs; k [R, N1, HK, dk]: normalised keys; g [R, N1, HV]: G, the log decay summed
    from the root; u [R, N1, HV, dv]: the rows of U. All but x float32 (float64 in the tests).
    """

    x: Tensor
    k: Tensor
    g: Tensor
    u: Tensor


def conv_windows(parents: Tensor, kernel: int) -> Tensor:
    """The inputs that each node's causal convolution reads, newest last: int32 [R, N1, kernel].

    parents int32 [R, N1], root -1. An entry >= 0 is a node; -1 is the newest column of the convolution state, -2 the
    one before. The same for all layers: make it once a step.
    """
    requests, nodes = parents.shape
    columns = [torch.arange(nodes, dtype=torch.int32, device=parents.device).expand(requests, nodes)]
    for _ in range(kernel - 1):
        newest = columns[-1]
        columns.append(torch.where(newest >= 0, parents.gather(1, newest.clamp(min=0).long()), newest - 1))
    return torch.stack(columns[::-1], dim=-1)


def convolve(x: Tensor, conv_state: Tensor, weight: Tensor, windows: Tensor) -> Tensor:
    """SiLU of the depthwise causal convolution along each node's ancestors. x [R, N1, C], conv_state [R, C, W], weight
    [C, kernel], windows from `conv_windows`; returns [R, N1, C] in float32 (float64 stays float64)."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    inputs = torch.cat([conv_state.transpose(1, 2).to(x.dtype), x], dim=1)
    rows = (windows + conv_state.shape[2]).long()
    total = torch.zeros(x.shape, dtype=work, device=x.device)
    for tap in range(weight.shape[1]):
        total += inputs.gather(1, rows[:, :, tap, None].expand_as(x)).to(work) * weight[:, tap].to(work)
    return F.silu(total)


def solve_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The delta rule on a tree from one frozen state per request.

    q (already scaled) and k [R, N1, HK, dk], v [R, N1, HV, dv], g and beta [R, N1, HV], state [R, HV, dk, dv], words
    int64 [R, N1, W]. Returns (out [R, N1, HV, dv], G [R, N1, HV], U [R, N1, HV, dv]), all in q's dtype.
    A node whose own bit is clear is padding: it writes nothing, and since no node has it as an ancestor, nothing reads
    it.
    """
    nodes, group = q.shape[1], v.shape[2] // k.shape[2]
    mask = dense_mask(words)
    live = mask.diagonal(dim1=1, dim2=2)[:, :, None]
    g, beta = g.where(live, 0.0), beta.where(live, 0.0)
    path = torch.einsum("rij,rjh->rih", mask.to(g.dtype), g)
    heads = path.transpose(1, 2)
    decay = (heads[:, :, :, None] - heads[:, :, None, :]).masked_fill(~mask[:, None], NEG_INF).exp()
    keys = k.transpose(1, 2).repeat_interleave(group, 1)
    queries = q.transpose(1, 2).repeat_interleave(group, 1)
    rate = beta.transpose(1, 2)[..., None]
    strict = torch.ones(nodes, nodes, dtype=torch.bool, device=q.device).tril(-1)
    lower = (rate * (keys @ keys.transpose(2, 3)) * decay).masked_fill(~strict, 0.0)
    rhs = rate * (v.transpose(1, 2) - heads.exp()[..., None] * (keys @ state))
    u = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    out = heads.exp()[..., None] * (queries @ state) + ((queries @ keys.transpose(2, 3)) * decay) @ u
    return out.transpose(1, 2).contiguous(), path, u.transpose(1, 2).contiguous()


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
    """One GDN layer between its input projections and its gated norm, for every node of a tree; states are left as they
    are.

    x [R, N1, C] (projected q, k, v side by side), a and b [R, N1, HV] (decay and write projections), conv_state [slots,
    C, W], state [slots, HV, dk, dv], words and windows of the step, slots int [R]: the row of each request in the state
    tensors (default: r).
    Returns out [R, N1, HV, dv] in x's dtype, and the stash for `commit`. Equals transformers' `Qwen3_5GatedDeltaNet` on
    every path.
    """
    requests, nodes = x.shape[:2]
    if slots is not None:
        conv_state, state = conv_state[slots.long()], state[slots.long()]
    conv_state, state = conv_state[:requests], state[:requests]
    mixed = convolve(x, conv_state, layer.conv_weight, windows)
    work = mixed.dtype
    keys, values = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
    q, k, v = torch.split(mixed, [keys, keys, values], dim=-1)
    q = _l2norm(q.view(requests, nodes, layer.key_heads, layer.key_dim)) * layer.key_dim**-0.5
    k = _l2norm(k.view(requests, nodes, layer.key_heads, layer.key_dim))
    v = v.reshape(requests, nodes, layer.value_heads, layer.value_dim)
    g = -layer.a_log.to(work).exp() * F.softplus(a.to(work) + layer.dt_bias.to(work))
    out, path, u = solve_tree(q, k, v, g, b.to(work).sigmoid(), state.to(work), words)
    return out.to(x.dtype), Stash(x, k, path, u)


def commit(
    stash: Stash, conv_state: Tensor, state: Tensor, nodes: Tensor, count: Tensor, slots: Tensor | None = None
) -> None:
    """Move one layer's states, in place, to the end of the accepted path: one rank-`count` product, no second solve.

    nodes int [R, P] and count int [R] as in `ddtree.walk.Path`: the path from the root, and how many nodes below the
    root it has (entries beyond are ignored). count -1 leaves that request's states as they are. conv_state, state and
    slots as in `verify`.
    """
    requests, length = nodes.shape
    rows = torch.arange(requests, device=state.device) if slots is None else slots.long()
    step = torch.arange(length, device=nodes.device)
    count = count.long() + 1  # nodes on the path, root included
    used = step < count[:, None]
    path = nodes.long().where(used, 0)
    work = stash.u.dtype
    group = stash.u.shape[2] // stash.k.shape[2]
    g = stash.g.gather(1, path[:, :, None].expand(-1, -1, stash.g.shape[2]))
    last = g.gather(1, (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, g.shape[2]))
    last = last.where(count[:, None, None] > 0, 0.0)
    weight = (last - g).masked_fill(~used[:, :, None], NEG_INF).exp()
    k = stash.k.gather(1, path[:, :, None, None].expand(-1, -1, *stash.k.shape[2:])).repeat_interleave(group, 2)
    u = stash.u.gather(1, path[:, :, None, None].expand(-1, -1, *stash.u.shape[2:]))
    written = torch.einsum("rph,rphk,rphv->rhkv", weight, k, u)
    state[rows] = (last[:, 0, :, None, None].exp() * state[rows].to(work) + written).to(state.dtype)

    width = conv_state.shape[2]
    window = conv_state[rows]
    accepted = stash.x.gather(1, path[:, :, None].expand(-1, -1, stash.x.shape[2]))
    inputs = torch.cat([window.transpose(1, 2), accepted], 1)
    newest = count[:, None] + torch.arange(width, device=count.device)
    conv_state[rows] = inputs.gather(1, newest[:, :, None].expand(-1, -1, inputs.shape[2])).transpose(1, 2)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
