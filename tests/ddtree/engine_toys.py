"""Small real parts for the engine's tests."""

from __future__ import annotations

from typing import Any

import torch

from ddtree.checkpoint import TargetShape, parse_config
from ddtree.drafter import Drafter, DrafterConfig

V, H, B = 50, 32, 6
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": B,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4, 6]},
}
TARGET = TargetShape(hidden_size=H, num_layers=8, vocab_size=V, name="toy")


def drafter_of(config: dict[str, Any] | DrafterConfig, seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(config if isinstance(config, DrafterConfig) else parse_config(config))
    for p in drafter.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    return drafter.eval().requires_grad_(False)


def hf_target(kind: str, seed: int = 0, vocab: int = 97) -> Any:
    """A tiny transformers model with random weights: big enough steps between logits that argmax means something."""
    import transformers

    common = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    partial = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    torch.manual_seed(seed)
    if kind == "tiny":
        tiny = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
        config = transformers.Qwen3Config(**{**common, **tiny}, num_hidden_layers=1)
        model = transformers.Qwen3ForCausalLM(config)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**common, num_hidden_layers=3)
        model = transformers.Qwen3ForCausalLM(config)
    elif kind == "qwen3-sliding":
        config = transformers.Qwen3Config(
            **common, num_hidden_layers=4, use_sliding_window=True, sliding_window=20, max_window_layers=2
        )
        model = transformers.Qwen3ForCausalLM(config)
    elif kind == "llama":
        llama3 = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        config = transformers.LlamaConfig(
            **common, num_hidden_layers=3, rope_parameters=llama3, attention_bias=True, mlp_bias=True
        )
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mistral":
        config = transformers.MistralConfig(**common, num_hidden_layers=3, sliding_window=24)
        model = transformers.MistralForCausalLM(config)
    elif kind == "qwen3_5":
        rope = {**partial, "mrope_section": [2, 1, 1]}
        config = transformers.Qwen3_5TextConfig(**common, **delta, num_hidden_layers=4, rope_parameters=rope)
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        assert kind == "qwen3_next"
        config = transformers.Qwen3NextConfig(
            **common,
            **delta,
            num_hidden_layers=4,
            rope_parameters=partial,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        )
        model = transformers.Qwen3NextForCausalLM(config)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith(("A_log", "dt_bias")):
            p.data.add_(torch.randn_like(p) * 0.1)
        else:
            torch.nn.init.normal_(p, std=0.25)
    return model.eval().requires_grad_(False)


KINDS = ("qwen3", "qwen3-sliding", "llama", "mistral", "qwen3_5", "qwen3_next")
