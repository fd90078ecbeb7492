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
