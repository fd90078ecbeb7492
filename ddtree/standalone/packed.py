"""The drafter for decoding: projections of one input in one matrix, and the elementwise work fused. Same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.drafter import Drafter, DraftLayer
from ddtree.kvcache import Attend
from ddtree.standalone.ops import Ops


@dataclass(frozen=True)
class PackedLayer:
    """A draft layer's weights."""

    qkv: Tensor  # [(heads + 2 kv_heads) * hd, H]
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor


def _biases(*linears: nn.Linear) -> Tensor | None:
    return None if linears[0].bias is None else torch.cat([x.bias for x in linears])


class PackedDrafter:
    """Takes over a Drafter's layers (which it empties) and serves extend, draft and top as the Drafter does."""

    def __init__(self, drafter: Drafter, ops: Ops) -> None:
        self.source, self.config, self.ops = drafter, drafter.config, ops
        self.layers: list[PackedLayer] = []
        context, biases = [], []
        for layer in drafter.layers:
            assert isinstance(layer, DraftLayer)
            a, m = layer.self_attn, layer.mlp
            context += [a.k_proj.weight, a.v_proj.weight]
            biases.append(_biases(a.k_proj, a.v_proj))
            self.layers.append(
                PackedLayer(
                    qkv=torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
                    qkv_bias=_biases(a.q_proj, a.k_proj, a.v_proj),
                    o=a.o_proj.weight,
                    o_bias=a.o_proj.bias,
                    gate_up=torch.cat([m.gate_proj.weight, m.up_proj.weight]),
                    down=m.down_proj.weight,
                    input_norm=layer.input_layernorm.weight.float(),
                    post_norm=layer.post_attention_layernorm.weight.float(),
                    q_norm=a.q_norm.weight.float(),
                    k_norm=a.k_norm.weight.float(),
                )
            )
        self.context = torch.cat(context)  # [layers * 2 kv_heads * hd, H]
        self.context_bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
        self.context_norm, self.norm = drafter.hidden_norm.weight.float(), drafter.norm.weight.float()
        drafter.layers = nn.ModuleList()

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and caches."""
        return self.context.dtype

    def extend(self, cache: Tensor, features: Tensor, rows: Tensor) -> None:
        """As Drafter.extend: one product makes the context keys and values of all layers."""
        c, ops = self.config, self.ops
        x = ops.add_norm(self.source.fc(features), None, self.context_norm, c.rms_norm_eps)[1]
        both = F.linear(x, self.context, self.context_bias).chunk(c.num_layers, -1)
        cos, sin = self.source.rope(rows)
        for i, (y, layer) in enumerate(zip(both, self.layers, strict=True)):
            ops.rotate_and_write(
                y, 0, False, None, layer.k_norm, c.rms_norm_eps, cos, sin, rows, cache[i, 0], cache[i, 1]
            )

    def draft(
        self, root_tokens: Tensor, cache: Tensor, lengths: Tensor, embedding: Tensor, attend: tuple[Attend, Attend]
    ) -> Tensor:
        """As Drafter.draft."""
        c, ops = self.config, self.ops
        x, delta = self.source.blocks(root_tokens, embedding).to(self.dtype), None
        rows = lengths[:, None] + torch.arange(c.block_size, device=x.device)
        cos, sin = self.source.rope(rows)
        for i, w in enumerate(self.layers):
            keys, values = cache[i, 0], cache[i, 1]
            x, h = ops.add_norm(x, delta, w.input_norm, c.rms_norm_eps)
            q = ops.rotate_and_write(
                F.linear(h, w.qkv, w.qkv_bias), c.num_heads, False, w.q_norm, w.k_norm, c.rms_norm_eps, cos, sin, rows,
                keys, values,
            )  # fmt: skip
            out = attend[c.causal[i]](q, keys, values, c.windows[i]).flatten(-2)
            x, h = ops.add_norm(x, F.linear(out, w.o, w.o_bias), w.post_norm, c.rms_norm_eps)
            delta = F.linear(ops.swiglu(F.linear(h, w.gate_up)), w.down)
        return ops.add_norm(x, delta, self.norm, c.rms_norm_eps)[1]

    def top(self, hidden: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """As Drafter.top."""
        return self.source.top(hidden, head, count)

    def bytes(self) -> int:
        """Of all weights."""
        mine = [t for w in self.layers for t in vars(w).values() if t is not None] + [self.context]
        return sum(t.numel() * t.element_size() for t in (*mine, *self.source.parameters()))
