"""Whole rounds on kernels against whole rounds in plain torch: drafts, logits and states, not the output alone.

The output cannot show a worse draft, since the target verifies it. Run by test_fused.py in Triton's interpreter, and as
it is on a GPU.
"""

from __future__ import annotations

import os
import sys

import torch
from engine_toys import hf_target
from fused_check import DEVICE

from ddtree.drafter import Drafter, DrafterConfig
from ddtree.standalone.ops import PLAIN, kernel_ops
from ddtree.standalone.packed import PackedDrafter
from ddtree.standalone.rounds import PLAIN_DECODE, Parts, Sampling, draft, new_state, prefill, run_round
from ddtree.standalone.weights import from_transformers

DRAFTER = DrafterConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6,
    vocab_size=97, block_size=6, mask_token_id=96, target_layer_ids=(0, 2), target_hidden_size=32, windows=(0, 12),
    causal=(False, True),
)  # fmt: skip


def check(kind: str) -> None:
    found = []
    for fast in (False, True):
        torch.manual_seed(3)
        drafter = Drafter(DRAFTER)
        for p in drafter.parameters():
            torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)
        drafter = drafter.to(DEVICE).eval().requires_grad_(False)
        target = from_transformers(hf_target(kind).to(DEVICE))
        ops = kernel_ops() if fast else PLAIN
        parts = Parts(target, PackedDrafter(drafter, ops) if fast else drafter, ops)
        state = new_state(parts, 2, 48)
        for r, n in enumerate((3, 18)):
            prefill(parts, state, r, torch.arange(n, device=DEVICE))
        state.roots.copy_(torch.tensor([5, 6]))
        seen = []
        for budget in (8, 0, PLAIN_DECODE):
            seen.append(draft(parts, state))
            out, logits = run_round(parts, state, budget, Sampling())
            seen += [out.double(), logits]
        seen += [s.delta for s in state.layers if s.delta is not None]
        found.append(seen)
    for i, (plain, fast_) in enumerate(zip(*found, strict=True)):
        error = float((plain.double() - fast_.double()).norm() / plain.double().norm().clamp(min=1e-9))
        assert error < 1e-4, f"{kind}: value {i} differs by {error:.1e}"


if __name__ == "__main__":
    assert DEVICE == "cuda" or os.environ["TRITON_INTERPRET"] == "1"
    with torch.no_grad():
        for name in sys.argv[1:] or ("qwen3-sliding", "qwen3_5"):
            check(name)
    print("rounds on kernels equal rounds in plain torch")
