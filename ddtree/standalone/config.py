"""The shape of a target, from its transformers config. What the engine does not implement is refused here, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree.checkpoint import TargetShape
from ddtree.errors import TargetError

DENSE = ("qwen3", "llama", "mistral")
HYBRID = ("qwen3_next", "qwen3_5_text")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts MLP with one shared expert (Qwen3-Next)."""

    count: int
    per_token: int
    inner: int
    shared_inner: int
    normalise: bool


@dataclass(frozen=True)
class DeltaNet:
    """A Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Width of the convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class TargetConfig:
    """All that the engine needs to know of a target."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocab_size: int
    context: int  # positions the model was made for
    layer_types: tuple[str, ...]
    window: int  # of sliding layers, the token itself included
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    gated_attention: bool  # q_proj also makes a sigmoid gate of the attention output
    zero_centred_norm: bool  # stored norm weights are offsets from 1
    tied_head: bool
    rope: dict[str, Any]
    delta: DeltaNet | None
    experts: Experts | None
    dense_layers: frozenset[int]  # layers without experts where experts are set
    eos: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @property
    def shape(self) -> TargetShape:
        """What a drafter must agree with."""
        return TargetShape(self.hidden_size, self.layers, self.vocab_size, self.model_type)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and layer not in self.dense_layers


def target_config(hf: Any) -> TargetConfig:
    """TargetConfig of a transformers config (the text part of a vision-language one).

    Raises:
        TargetError: unsupported-model, unsupported-layer-type, unsupported-rope, unsupported-activation.
    """
    hf = getattr(hf, "text_config", None) or hf
    kind = hf.model_type
    if kind not in DENSE + HYBRID:
        raise TargetError("unsupported-model", f"model type {kind!r}", f"implemented: {', '.join(DENSE + HYBRID)}")
    layers = hf.num_hidden_layers
    window = getattr(hf, "sliding_window", None) or 0
    types = getattr(hf, "layer_types", None) or [SLIDING if window and kind == "mistral" else FULL] * layers
    allowed = (FULL, LINEAR) if kind in HYBRID else (FULL, SLIDING)
    for i, t in enumerate(types):
        if t not in allowed:
            raise TargetError("unsupported-layer-type", f"layer {i} of this {kind} is {t!r}", f"known: {allowed}")
    if hf.hidden_act != "silu":
        raise TargetError("unsupported-activation", f"hidden_act {hf.hidden_act!r}", "only silu is implemented")
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        raise TargetError("unsupported-rope", f"rope type {rope['rope_type']!r} changes with the length of the text")
    hybrid = kind in HYBRID
    moe = None
    if getattr(hf, "num_experts", 0):
        moe = Experts(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            hf.shared_expert_intermediate_size,
            hf.norm_topk_prob,
        )
    sparse_step, only = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or ()
    eos = getattr(hf, "eos_token_id", None)
    return TargetConfig(
        model_type=kind,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        eps=hf.rms_norm_eps,
        vocab_size=hf.vocab_size,
        context=hf.max_position_embeddings,
        layer_types=tuple(types),
        window=window if SLIDING in types else 0,
        attention_bias=bool(getattr(hf, "attention_bias", False)),
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=kind == "qwen3" or hybrid,
        gated_attention=hybrid,
        zero_centred_norm=hybrid,
        tied_head=bool(hf.tie_word_embeddings),
        rope={
            "rope_parameters": rope,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "max_position_embeddings": hf.max_position_embeddings,
        },
        delta=DeltaNet(
            hf.linear_num_key_heads,
            hf.linear_num_value_heads,
            hf.linear_key_head_dim,
            hf.linear_value_head_dim,
            hf.linear_conv_kernel_dim,
        )
        if LINEAR in types
        else None,
        experts=moe,
        dense_layers=frozenset(i for i in range(layers) if i in only or (i + 1) % sparse_step),
        eos=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
    )
