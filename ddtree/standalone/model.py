"""The target's forward over static buffers: new tokens of any forest, written at rows lengths + slot of every cache.

One function serves all modes. A prompt is a chain, plain decoding a tree of one node, verification a tree of N + 1.
Which token sees which is in the ancestor words alone. Projections that read the same input are one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree import gdn
from ddtree.kvcache import Attend
from ddtree.layers import Linear, RMSNorm, rope_from_config
from ddtree.standalone.config import FULL, LINEAR, SLIDING, DeltaNet, Experts, TargetConfig
from ddtree.standalone.ops import Ops

PREFILL_CHUNK = 64  # GDN tokens verified at a time in a prompt


@dataclass(frozen=True)
class Step:
    """What the layers of one device need to know of the new tokens."""

    rows: Tensor  # int64 [R, n], cache rows to write
    cos: Tensor  # float32 [R, n, 1, rot]
    sin: Tensor
    words: Tensor  # int64 [R, n, W]
    attend: Attend
    windows: Tensor | None  # int32 [R, n, kernel], of GDN convolutions
    prefill: bool  # a chain whose GDN states are committed at once


@dataclass
class LayerState:
    """A layer's share of the state: either ``kv``, or ``conv`` and ``delta`` of a GDN layer."""

    kv: Tensor | None = None  # [2, R, rows, kv_heads, hd]
    conv: Tensor | None = None  # [R, C, kernel - 1], model dtype
    delta: Tensor | None = None  # float32 [R, HV, dk, dv]
    stash: gdn.Stash | None = None  # left by the last verification


class Attention(nn.Module):
    """Grouped-query attention; optional q/k norms, output gate, sliding window."""

    def __init__(self, c: TargetConfig, window: int) -> None:
        super().__init__()
        self.window, self.heads, self.gated, self.eps = window, c.heads, c.gated_attention, c.eps
        queries = c.heads * c.head_dim
        width = queries * (2 if c.gated_attention else 1) + 2 * c.kv_heads * c.head_dim
        self.qgkv = Linear(c.hidden_size, width, c.attention_bias)
        self.o = Linear(queries, c.hidden_size, c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.eps) if c.qk_norm else None

    def forward(self, x: Tensor, step: Step, state: LayerState, ops: Ops) -> Tensor:
        assert state.kv is not None
        keys, values = state.kv[0], state.kv[1]
        y = self.qgkv(x)
        norms = (None, None) if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        q = ops.rotate_and_write(
            y, self.heads, self.gated, *norms, self.eps, step.cos, step.sin, step.rows, keys, values
        )
        out = step.attend(q, keys, values, self.window).flatten(-2)
        if self.gated:
            out = out * y[..., out.shape[-1] : 2 * out.shape[-1]].sigmoid()
        return self.o(out)  # type: ignore[no-any-return]


class GatedDeltaNet(nn.Module):
    """A GDN layer: verified from the frozen state in the UT form, which leaves a stash for the commit."""

    def __init__(self, c: TargetConfig, d: DeltaNet) -> None:
        super().__init__()
        self.d = d
        inner = d.value_heads * d.value_dim
        self.split = [d.channels, inner, d.value_heads, d.value_heads]
        self.qkvzba = Linear(c.hidden_size, sum(self.split))
        self.conv = nn.Parameter(torch.empty(d.channels, d.kernel))
        self.a_log, self.dt_bias = nn.Parameter(torch.empty(d.value_heads)), nn.Parameter(torch.empty(d.value_heads))
        self.norm = RMSNorm(d.value_dim, c.eps)
        self.o = Linear(inner, c.hidden_size)

    def forward(self, x: Tensor, step: Step, state: LayerState, ops: Ops) -> Tensor:
        d = self.d
        assert state.conv is not None and state.delta is not None and step.windows is not None
        layer = gdn.Layer(self.conv, self.a_log, self.dt_bias, d.key_heads, d.value_heads, d.key_dim, d.value_dim)
        mixed, z, b, a = self.qkvzba(x).split(self.split, -1)
        if step.prefill:
            out = self.prefill(layer, mixed, a, b, step, state)
        else:
            out, state.stash = ops.gdn_verify(layer, mixed, a, b, state.conv, state.delta, step.words, step.windows)
        return self.o(ops.gated_norm(out, z, self.norm.weight, self.norm.eps))  # type: ignore[no-any-return]

    def prefill(self, layer: gdn.Layer, mixed: Tensor, a: Tensor, b: Tensor, step: Step, state: LayerState) -> Tensor:
        """A prompt: chains of PREFILL_CHUNK tokens, each committed before the next. step holds one chunk's words."""
        assert state.conv is not None and state.delta is not None and step.windows is not None
        out = []
        for start in range(0, mixed.shape[1], PREFILL_CHUNK):
            x, decay, rate = (t[:, start : start + PREFILL_CHUNK] for t in (mixed, a, b))
            n = x.shape[1]
            words, windows = step.words[:, :n, :1], step.windows[:, :n]
            one, stash = gdn.verify(layer, x, decay, rate, state.conv, state.delta, words, windows)
            nodes = torch.arange(n, device=mixed.device).expand(mixed.shape[0], -1)
            gdn.commit(stash, state.conv, state.delta, nodes, torch.full_like(nodes[:, 0], n - 1))
            out.append(one)
        return torch.cat(out, 1)


class SwiGLU(nn.Module):
    """down(silu(gate) * up) with gate and up in one matrix."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up, self.down = Linear(hidden, 2 * inner, bias), Linear(inner, hidden, bias)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.down(ops.swiglu(self.gate_up(x)))  # type: ignore[no-any-return]


class SparseMLP(nn.Module):
    """Experts chosen per token, plus a gated shared expert. Not capturable: which experts run is known on the host."""

    def __init__(self, c: TargetConfig, e: Experts) -> None:
        super().__init__()
        self.e = e
        self.router = Linear(c.hidden_size, e.count)
        self.gate_up = nn.Parameter(torch.empty(e.count, 2 * e.inner, c.hidden_size))
        self.down = nn.Parameter(torch.empty(e.count, c.hidden_size, e.inner))
        self.shared, self.shared_gate = SwiGLU(c.hidden_size, e.shared_inner), Linear(c.hidden_size, 1)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        flat = x.flatten(0, 1)
        weight, expert = self.router(flat).float().softmax(-1).topk(self.e.per_token, dim=-1)
        if self.e.normalise:
            weight = weight / weight.sum(-1, keepdim=True)
        out = self.shared_gate(flat).sigmoid() * self.shared(flat, ops)
        for i in set(expert.flatten().tolist()):
            token, place = (expert == i).nonzero(as_tuple=True)
            gate, up = F.linear(flat[token], self.gate_up[i]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, self.down[i]) * weight[token, place, None].to(x.dtype)
            out = out.index_add(0, token, part)
        return out.view_as(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, c: TargetConfig, layer: int) -> None:
        super().__init__()
        kind = c.layer_types[layer]
        self.input_norm, self.post_norm = RMSNorm(c.hidden_size, c.eps), RMSNorm(c.hidden_size, c.eps)
        self.mixer: Attention | GatedDeltaNet
        if kind == LINEAR:
            assert c.delta is not None
            self.mixer = GatedDeltaNet(c, c.delta)
        else:
            assert kind in (FULL, SLIDING)
            self.mixer = Attention(c, c.window if kind == SLIDING else 0)
        self.mlp: SwiGLU | SparseMLP
        if c.has_experts(layer):
            assert c.experts is not None
            self.mlp = SparseMLP(c, c.experts)
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, c.mlp_bias)

    def forward(
        self, x: Tensor, delta: Tensor | None, step: Step, state: LayerState, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is x + delta, so that each sum can be taken together with the norm that follows."""
        x, h = ops.add_norm(x, delta, self.input_norm.weight, self.input_norm.eps)
        x, h = ops.add_norm(x, self.mixer(h, step, state, ops), self.post_norm.weight, self.post_norm.eps)
        return x, self.mlp(h, ops)


class Target(nn.Module):
    """The target. ``embed``, ``norm`` and ``head`` live on devices[0]; layer i on ``placement[i]``."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.head = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.rope = rope_from_config(c.rope, c.head_dim)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.layers))
        self.placement: list[torch.device] = []

    @property
    def home(self) -> torch.device:
        """The device of everything that is not a layer."""
        return self.embed.device

    def forward(
        self,
        tokens: Tensor,
        steps: dict[torch.device, Step],
        state: list[LayerState],
        taps: tuple[int, ...],
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        """Run n new tokens per request through all layers.

        Args:
            tokens: int64 [R, n]. steps: by device of the placement. state: by layer. taps: layers whose output is kept.
        Returns:
            hidden [R, n, H] after the final norm, and the tapped outputs side by side [R, n, len(taps) * H].
        """
        x, delta = F.embedding(tokens, self.embed), None
        kept: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            device = self.placement[i]
            x, delta = block(x.to(device), None if delta is None else delta.to(device), steps[device], state[i], ops)
            if i in taps:
                x, delta = x + delta, None
                kept[i] = x.to(self.home)
        tapped = torch.cat([kept[i] for i in taps], -1) if taps else x[..., :0]
        delta = None if delta is None else delta.to(self.home)
        return ops.add_norm(x.to(self.home), delta, self.norm.weight, self.norm.eps)[1], tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] after the final norm -> [..., V]."""
        return F.linear(hidden, self.head)
