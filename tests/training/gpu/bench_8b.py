#!/usr/bin/env python3
"""Speed and memory at a Qwen3-8B shape (random weights), against plan's arithmetic: capture, then training steps.

bench_8b.py OUT.json [--toy]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ddtree.drafter import Drafter
from ddtree.training import plan
from ddtree.training.export import new_config
from ddtree.training.features import InProcess
from ddtree.training.losses import LossConfig
from ddtree.training.metrics import read_metrics
from ddtree.training.packing import Shape
from ddtree.training.schedule import TrainConfig
from ddtree.training.target import Target, default_layer_ids
from ddtree.training.tokens import Row, TokenSet, TokenWriter
from ddtree.training.trainer import Run, train


def main() -> None:
    toy = "--toy" in sys.argv
    device, dtype = ("cpu", torch.float32) if toy else ("cuda", torch.bfloat16)
    H, I, L, heads, kv, hd, V = (64, 96, 8, 4, 2, 16, 500) if toy else (4096, 12288, 36, 32, 8, 128, 151936)
    S, anchors, block = (64, 8, 8) if toy else (2048, 256, 16)
    hf = Qwen3Config(
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=L,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=hd,
        vocab_size=V,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf, dtype=dtype)
    torch.set_default_dtype(torch.float32)
    target = Target(model, default_layer_ids(L))
    out: dict[str, Any] = {"device": torch.cuda.get_device_name() if not toy else "cpu", "torch": torch.__version__}
    s = plan.shapes(hf.to_dict())
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as tmp:
        writer = TokenWriter(Path(tmp) / "tokens", {"toy": toy})
        for _ in range(96):
            writer.add(Row(rng.integers(0, V, S).astype(np.int32), S // 8, 1, {}))
        writer.flush()
        tokens = TokenSet(Path(tmp) / "tokens", verify=False)

        def sync() -> float:
            if not toy:
                torch.cuda.synchronize()
            return time.perf_counter()

        source = InProcess(target, tokens, 8 * S)
        source.features(list(range(8)), [S] * 8)
        began = sync()
        for i in range(3):
            source.features(list(range(8 * i, 8 * i + 8)), [S] * 8)
        rate = 24 * S / (sync() - began)
        flops = plan.cost(s, S, 0, block).prefill / S * rate
        out["capture"] = {"tokens_per_s": rate, "tflops": flops / 1e12, "mfu": flops / 989e12}
        print(json.dumps(out["capture"]), flush=True)

        for rows in (1,):
            for compiled in (False, True):
                if not toy:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                config = TrainConfig(
                    steps=16,
                    rows_per_step=rows,
                    shape=Shape(S, rows, anchors, anchors, 1.0),
                    block=block,
                    layers=5,
                    layer_ids=target.layer_ids,
                    mask_token_id=3,
                    loss=LossConfig("dpace"),
                    dtype=str(dtype)[6:],
                    log_every=8,
                    eval_every=10**6,
                    save_every=0,
                    compile=compiled,
                )
                torch.manual_seed(0)
                with torch.device(device):
                    drafter = Drafter(new_config(hf, block, 5, target.layer_ids, 3))
                run = Run(
                    Path(tmp) / f"run-{rows}-{compiled}", config, drafter, target.embedding, target.head, tokens, source
                )
                run.config = config
                name = f"train-rows{rows}-{'compiled' if compiled else 'eager'}"
                try:
                    train(run)
                except Exception as error:  # the other shapes still tell something
                    out[name] = {"error": repr(error)[:400]}
                    print(name, out[name], flush=True)
                    continue
                last = [m for m in read_metrics(run.folder) if "loss" in m][-1]
                one = plan.cost(s, S, anchors, block)
                use = plan.memory(s, S, rows, anchors, block)
                tps = last["tokens_per_s"]
                out[name] = {
                    "tokens_per_s": tps,
                    "mfu": one.total / S * tps / 989e12,
                    "plan_tokens_per_s_at_0.44": S * 989e12 * 0.44 / one.total,
                    "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if not toy else 0.0,
                    "plan_gb": use.total / 1e9,
                    "plan_parts_gb": {k: v / 1e9 for k, v in use.__dict__.items()},
                    "loss": last["loss"],
                }
                print(name, json.dumps(out[name]), flush=True)
                del drafter, run
    Path(sys.argv[1]).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
