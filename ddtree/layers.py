"""The few layers that drafter and targets share. Plain torch; nothing here depends on a batch layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear that follows its input's dtype, so that float32 master weights can run in bfloat16."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta (x where there is none), and its rms_norm."""
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side: [..., 2 I] -> [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm per head, times silu(z): x [R, n, heads, dim], z [R, n, heads * dim] -> [R, n, heads * dim]."""
    return (rms_norm(x, weight, eps).float().flatten(-2) * F.silu(z.float())).to(z.dtype)


class RMSNorm(nn.Module):
    """rms_norm with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, inner, bias), Linear(hidden, inner, bias)
        self.down_proj = Linear(inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Rope(nn.Module):
    """Rotary positions: frequencies float32 [rot/2], rot <= head_dim (the rest of a head is kept), and a scale."""

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.exact, self.scale = inv_freq.float(), scale
        self.register_buffer("inv_freq", self.exact.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        """Move with the model, but stay float32 and filled whatever dtype or empty storage the model is given."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = self.exact.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [...] -> cos and sin, float32 [..., 1, rot]: they broadcast over heads."""
        angle = positions[..., None, None].float() * self.inv_freq
        angle = torch.cat([angle, angle], -1)
        return angle.cos() * self.scale, angle.sin() * self.scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rot dimensions of x [..., heads, head_dim] (half-split layout) by cos, sin [..., 1, rot]."""
    rot = cos.shape[-1]
    turned, rest = x[..., :rot], x[..., rot:]
    a, b = turned.float().chunk(2, -1)
    turned = (turned * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)
    return turned if rot == x.shape[-1] else torch.cat([turned, rest], -1)


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Rope of a config.json, in its old form (rope_theta, rope_scaling) or its new one (rope_parameters).

    The scaled kinds (yarn, llama3, linear, ...) come from transformers, whose config names they are.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    params: dict[str, Any] = {"rope_type": "default", **found}
    params["rope_type"] = params.get("rope_type") or params.get("type") or "default"
    theta = params.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    factor = params.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rot = int(head_dim * factor)
    if params["rope_type"] == "default":
        return Rope(1.0 / theta ** (torch.arange(0, rot, 2, device="cpu").float() / rot))
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = PretrainedConfig(
        rope_parameters=params,
        head_dim=head_dim,
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
    )
    with torch.device("cpu"):  # whatever device the model is being built on
        inv_freq, scale = ROPE_INIT_FUNCTIONS[params["rope_type"]](hf, torch.device("cpu"))
    return Rope(inv_freq, float(scale))
