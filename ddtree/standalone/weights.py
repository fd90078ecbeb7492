"""Weights: from a transformers model, or random at a real model's shape; and where each layer goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import DeviceError, TargetError
from ddtree.standalone.config import LINEAR, TargetConfig, target_config
from ddtree.standalone.model import Target


def _norm(c: TargetConfig, weight: Tensor) -> Tensor:
    """Norm weights are kept in float32: an offset from 1 would lose its low bits in bfloat16."""
    return weight.float() + 1.0 if c.zero_centred_norm else weight.float()


def _attention(c: TargetConfig, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    def fused(kind: str) -> Tensor:
        q, k, v = (get(f"self_attn.{x}_proj.{kind}") for x in "qkv")
        if not c.gated_attention:
            return torch.cat([q, k, v])
        # q_proj interleaves each head's query and gate; here all queries come first, then all gates.
        pairs = q.view(c.heads, 2, c.head_dim, *q.shape[1:])
        return torch.cat([pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1), k, v])

    out = {"mixer.qgkv.weight": fused("weight"), "mixer.o.weight": get("self_attn.o_proj.weight")}
    if c.attention_bias:
        out |= {"mixer.qgkv.bias": fused("bias"), "mixer.o.bias": get("self_attn.o_proj.bias")}
    if c.qk_norm:
        out |= {f"mixer.{x}_norm.weight": _norm(c, get(f"self_attn.{x}_norm.weight")) for x in "qk"}
    return out


def _delta(c: TargetConfig, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    d = c.delta
    assert d is not None
    if c.model_type == "qwen3_next":  # rows grouped by key head: [q, k, v.., z..] and [b.., a..] of each
        per, H = d.value_heads // d.key_heads, c.hidden_size
        qkvz = get("linear_attn.in_proj_qkvz.weight").view(d.key_heads, -1, H)
        parts = torch.split(qkvz, [d.key_dim, d.key_dim, per * d.value_dim, per * d.value_dim], 1)
        ba = get("linear_attn.in_proj_ba.weight").view(d.key_heads, 2 * per, H).chunk(2, 1)
        fused = torch.cat([p.flatten(0, 1) for p in (*parts, *ba)])
    else:
        fused = torch.cat([get(f"linear_attn.in_proj_{x}.weight") for x in ("qkv", "z", "b", "a")])
    return {
        "mixer.qkvzba.weight": fused,
        "mixer.conv": get("linear_attn.conv1d.weight").squeeze(1),
        "mixer.a_log": get("linear_attn.A_log").float(),
        "mixer.dt_bias": get("linear_attn.dt_bias").float(),
        "mixer.norm.weight": get("linear_attn.norm.weight").float(),
        "mixer.o.weight": get("linear_attn.out_proj.weight"),
    }


def _swiglu(get: Callable[[str], Tensor], there: str, here: str, bias: bool = False) -> dict[str, Tensor]:
    out = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        out[f"{here}.gate_up.{kind}"] = torch.cat([get(f"{there}.{x}_proj.{kind}") for x in ("gate", "up")])
        out[f"{here}.down.{kind}"] = get(f"{there}.down_proj.{kind}")
    return out


def _mlp(c: TargetConfig, layer: int, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    if not c.has_experts(layer):
        return _swiglu(get, "mlp", "mlp", c.mlp_bias)
    return {
        "mlp.router.weight": get("mlp.gate.weight"),
        "mlp.gate_up": get("mlp.experts.gate_up_proj"),
        "mlp.down": get("mlp.experts.down_proj"),
        "mlp.shared_gate.weight": get("mlp.shared_expert_gate.weight"),
        **_swiglu(get, "mlp.shared_expert", "mlp.shared"),
    }


def empty_target(config: TargetConfig) -> Target:
    """A target without storage (meta device)."""
    with torch.device("meta"):
        return Target(config).eval().requires_grad_(False)


def from_transformers(model: Any, placement: Sequence[torch.device | str] = ()) -> Target:
    """Take over a loaded transformers causal LM's weights, layer by layer; the model is unusable afterwards.

    Args:
        placement: a device per layer; default: the model's own.
    Raises:
        TargetError: see target_config; missing-weights.
    """
    config = target_config(model.config)
    weights: dict[str, Tensor] = dict(model.state_dict())
    prefix = next((k[: -len("embed_tokens.weight")] for k in weights if k.endswith("embed_tokens.weight")), "model.")
    if f"{prefix}embed_tokens.weight" not in weights:
        raise TargetError("missing-weights", "the model has no embed_tokens.weight")
    devices = [torch.device(d) for d in placement] or [weights[f"{prefix}embed_tokens.weight"].device] * config.layers
    target = empty_target(config)

    def take(name: str) -> Tensor:
        if name not in weights:
            raise TargetError("missing-weights", f"the model has no {name}")
        return weights.pop(name).detach()

    home = devices[0]
    outer = {"embed": take(f"{prefix}embed_tokens.weight").to(home)}
    outer["norm.weight"] = _norm(config, take(f"{prefix}norm.weight")).to(home)
    head = weights.pop("lm_head.weight", None)
    outer["head"] = outer["embed"] if config.tied_head or head is None else head.detach().to(home)
    target.load_state_dict(outer, strict=False, assign=True)
    model.to("meta")  # the tensors taken from here on are the last references
    for i, device in enumerate(devices):

        def get(name: str, at: str = f"{prefix}layers.{i}.") -> Tensor:
            return take(at + name)

        layer = _delta(config, get) if config.layer_types[i] == LINEAR else _attention(config, get)
        layer |= _mlp(config, i, get)
        layer["input_norm.weight"] = _norm(config, get("input_layernorm.weight"))
        layer["post_norm.weight"] = _norm(config, get("post_attention_layernorm.weight"))
        target.blocks[i].load_state_dict({k: v.to(device) for k, v in layer.items()}, strict=True, assign=True)
    return _placed(target, devices)


def random_target(config: TargetConfig, placement: Sequence[torch.device], dtype: torch.dtype, seed: int = 0) -> Target:
    """A target of this shape with random weights, made on the devices; for step cost only."""
    target = empty_target(config)
    torch.manual_seed(seed)

    def filled(parameter: Tensor, device: torch.device) -> Tensor:
        if parameter.ndim == 1:
            return torch.ones(parameter.shape, device=device)
        return torch.empty(parameter.shape, dtype=dtype, device=device).normal_(std=0.02)

    for i, device in enumerate(placement):
        block = target.blocks[i]
        block.load_state_dict({k: filled(v, device) for k, v in block.state_dict().items()}, strict=True, assign=True)
    outer = {k: filled(getattr(target, k), placement[0]) for k in ("embed", "head")}
    if config.tied_head:
        outer["head"] = outer["embed"]
    outer["norm.weight"] = filled(target.norm.weight, placement[0])
    target.load_state_dict(outer, strict=False, assign=True)
    return _placed(target, placement)


def _placed(target: Target, placement: Sequence[torch.device]) -> Target:
    target.placement = list(placement)
    target.rope.to(placement[0])
    return target.eval().requires_grad_(False)


def layer_bytes(config: TargetConfig, dtype: torch.dtype) -> list[int]:
    """Weight bytes of every layer (norms, a_log and dt_bias counted at the same width: they are a rounding error)."""
    target = empty_target(config)
    return [sum(p.numel() for p in b.parameters()) * dtype.itemsize for b in target.blocks]


def place(
    config: TargetConfig,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    free: Sequence[int],
    extra: int,
    home: int,
) -> list[torch.device]:
    """A device per layer, in order, each filled to its share of the free memory.

    Args:
        free: bytes free per device. extra: bytes of state per layer. home: bytes of all else on devices[0] (embedding,
            head, drafter, logits).
    Raises:
        DeviceError: not-enough-memory, with the arithmetic.
    """
    need = [b + extra for b in layer_bytes(config, dtype)]
    total, have = sum(need) + home, sum(free)
    if total > have or home > free[0]:
        per = ", ".join(f"{d}: {f / 1e9:.1f} GB free" for d, f in zip(devices, free, strict=True))
        raise DeviceError(
            "not-enough-memory",
            f"{config.layers} layers need {sum(need) / 1e9:.2f} GB with their caches, embedding, head, drafter and "
            f"logits {home / 1e9:.2f} GB, together {total / 1e9:.2f} GB; {per}",
            "more devices, a shorter context, or a smaller dtype",
        )
    placement: list[torch.device] = []
    used, fill = float(home), total / have
    at = 0
    for size in need:
        if at + 1 < len(devices) and used + size / 2 > free[at] * fill:
            at, used = at + 1, 0.0
        if used + size > free[at]:
            raise DeviceError("not-enough-memory", f"layers do not pack into {devices[at]}", "a shorter context")
        placement.append(devices[at])
        used += size
    return placement


def load_config(folder: Path | str) -> TargetConfig:
    """TargetConfig of a model folder or a config.json, read without its weights.

    Raises:
        TargetError: no-config, or see target_config.
    """
    from transformers import AutoConfig

    path = Path(folder)
    if not (path.is_file() or (path / "config.json").is_file()):
        raise TargetError("no-config", f"{path} holds no config.json", "give a Hugging Face model folder")
    try:
        hf = AutoConfig.from_pretrained(str(path))
    except (ValueError, OSError, KeyError) as error:
        raise TargetError("unsupported-model", f"{path}: {error}") from error
    return target_config(hf)


def load_target(folder: Path | str, dtype: torch.dtype, placement: Sequence[torch.device]) -> Target:
    """Load a Hugging Face folder through transformers and place it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, low_cpu_mem_usage=True)
    return from_transformers(model, placement)
