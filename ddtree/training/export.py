"""Write a drafter as checkpoints that others load.

z-lab form: what z-lab's and the DDTree authors' code, vLLM's own DFlash loader and the standalone engine all take.
Beside z-lab's keys it has ``eagle_aux_hidden_state_layer_ids`` (id + 1: vLLM reads it first, also the versions that
forget the +1), ``dflash_config.causal`` false, and RoPE in the spelling of both transformers 4 and 5. The
speculators form adds copies of embedding and head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.checkpoint import TargetShape, load_drafter
from ddtree.drafter import Drafter, DrafterConfig
from ddtree.training.errors import DataError
from ddtree.training.files import atomic


def draft_heads(target: Any) -> tuple[int, int, int]:
    """(heads, key/value heads, head dimension) of a fresh drafter: the target's own, unless the target rotates a
    part of each head or positions of several axes (Qwen3.5 and its like). A drafter rotates whole heads along one
    axis, and then has the 32 heads of 128 and 8 key/value heads that released drafters of such targets have."""
    rope = getattr(target, "rope_parameters", None) or getattr(target, "rope_scaling", None) or {}
    partial = rope.get("partial_rotary_factor") or getattr(target, "partial_rotary_factor", None) or 1.0
    if partial < 1.0 or "mrope_section" in rope:
        return 32, 8, 128
    heads = int(target.num_attention_heads)
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // heads
    return heads, int(getattr(target, "num_key_value_heads", None) or heads), int(head_dim)


def new_config(target: Any, block: int, layers: int, layer_ids: tuple[int, ...], mask_token_id: int) -> DrafterConfig:
    """Shape of a fresh drafter for a target's (text) configuration: its width, 1-D RoPE, no partial rotary."""
    heads, kv, head_dim = draft_heads(target)
    rope = getattr(target, "rope_parameters", None) or {}
    if rope and "rope_theta" not in rope:  # layer types with a RoPE each: take the full-attention one
        rope = rope.get("full_attention") or next(iter(rope.values()))
    theta = float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0)
    return DrafterConfig(
        hidden_size=target.hidden_size, intermediate_size=target.intermediate_size, num_layers=layers, num_heads=heads,
        num_kv_heads=kv, head_dim=head_dim,
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)), vocab_size=target.vocab_size, block_size=block,
        mask_token_id=mask_token_id, target_layer_ids=tuple(layer_ids), target_hidden_size=target.hidden_size,
        windows=(0,) * layers, causal=(False,) * layers, num_target_layers=target.num_hidden_layers,
        rope={"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta,
              "max_position_embeddings": int(getattr(target, "max_position_embeddings", 32768))},
    )  # fmt: skip


def _theta(config: DrafterConfig) -> float:
    found = config.rope.get("rope_parameters") or {}
    return float(found.get("rope_theta") or config.rope.get("rope_theta") or 10000.0)


def _layer_config(c: DrafterConfig, dtype: str) -> dict[str, Any]:
    sliding = max(c.windows)
    rope = dict(c.rope.get("rope_parameters") or {"rope_type": "default", "rope_theta": _theta(c)})
    rope.setdefault("rope_theta", _theta(c))
    scaling = (
        None if rope.get("rope_type", "default") == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    )
    return {
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab_size, "hidden_act": "silu", "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": _theta(c), "rope_scaling": scaling, "rope_parameters": rope,
        "max_position_embeddings": c.rope.get("max_position_embeddings", 32768),
        "attention_bias": c.attention_bias, "attention_dropout": 0.0, "initializer_range": 0.02,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": bool(sliding),
        "sliding_window": sliding or None,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in c.windows],
        "dtype": dtype, "torch_dtype": dtype,
    }  # fmt: skip


def zlab_config(c: DrafterConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the z-lab form."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_layer_config(c, dtype),
        "block_size": c.block_size,
        "num_target_layers": c.num_target_layers,
        "target_hidden_size": c.target_hidden_size,
        "dflash_config": {
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.target_layer_ids),
            "block_size": c.block_size,
            "causal": any(c.causal),
        },
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
    }


def speculators_config(c: DrafterConfig, verifier: Mapping[str, Any], dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the speculators form; verifier: ``name`` and ``architecture`` of the target."""
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {"model_type": "qwen3", **_layer_config(c, dtype)},
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "mask_token_id": c.mask_token_id,
        # false would make recent readers run full layers causally, which this drafter was not trained for
        "sliding_window_non_causal": not any(c.causal),
        "sample_from_anchor": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.drafts}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier["name"], "architectures": [verifier["architecture"]]},
        },
    }


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype, norms: torch.dtype) -> dict[str, Tensor]:
    return {k: v.detach().to("cpu", norms if "norm" in k else dtype).contiguous() for k, v in weights.items()}


def save_zlab(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    dtype: torch.dtype = torch.bfloat16,
    norms: torch.dtype = torch.float32,
    extra: Mapping[str, Any] | None = None,
    card: str = "",
) -> None:
    """Write the z-lab folder: config.json, model.safetensors; ``extra`` as training.json, ``card`` as README.md."""
    with atomic(folder) as tmp:
        tmp.mkdir()
        (tmp / "config.json").write_text(
            json.dumps(zlab_config(config, str(dtype).removeprefix("torch.")), indent=1) + "\n"
        )
        save_file(_cast(weights, dtype, norms), tmp / "model.safetensors", metadata={"format": "pt"})
        if extra:
            (tmp / "training.json").write_text(json.dumps(dict(extra), indent=1) + "\n")
        if card:
            (tmp / "README.md").write_text(card)


def save_speculators(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    embedding: Tensor,
    head: Tensor,
    verifier: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write the speculators folder, with copies of the target's embedding and head."""
    tensors = {**weights, "embed_tokens.weight": embedding, "lm_head.weight": head.clone()}
    name = str(dtype).removeprefix("torch.")
    with atomic(folder) as tmp:
        tmp.mkdir()
        (tmp / "config.json").write_text(json.dumps(speculators_config(config, verifier, name), indent=1) + "\n")
        save_file(_cast(tensors, dtype, torch.float32), tmp / "model.safetensors", metadata={"format": "pt"})
        if card:
            (tmp / "README.md").write_text(card)


@torch.no_grad()
def compare(
    folder: Path, drafter: Drafter, target: TargetShape, embedding: Tensor, head: Tensor, seed: int = 0
) -> float:
    """Reload a folder and draft with both: the largest difference of their logits, relative to the largest logit.

    Raises:
        DataError: ``export-differs`` above bfloat16 rounding of the weights.
    """
    again = load_drafter(folder, target, "cpu", torch.float32)
    g = torch.Generator().manual_seed(seed)
    c = drafter.config
    features = torch.randn(1, 24, len(c.target_layer_ids) * c.target_hidden_size, generator=g)
    anchors = torch.tensor([[3, 11, 24]])
    tokens = torch.randint(0, c.vocab_size, (1, 3), generator=g)
    # a target in bfloat16 loses nothing here; the speculators form stores copies in bfloat16
    embedding, head = (t.cpu().to(torch.bfloat16).float() for t in (embedding, head))
    rounded = Drafter(c)
    rounded.load_state_dict(
        {k: v.float() if "norm" in k else v.to(torch.bfloat16).float() for k, v in drafter.cpu().state_dict().items()}
    )
    a = rounded.eval().logits(rounded(features, tokens, anchors, embedding), head)
    b = again.logits(again(features, tokens, anchors, embedding), head)
    error = float((a - b).abs().max() / a.abs().max())
    if not error < 1e-4:
        raise DataError("export-differs", f"{folder}: reloaded logits differ by {error:.2e} of the largest")
    return error
