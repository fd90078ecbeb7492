#!/usr/bin/env python3
"""The whole retrain path on a real small target and one GPU, inside a time limit.

    real_run.py TARGET DATA OUT --seconds 340

DATA holds prompts.jsonl.gz (curated), held.jsonl and humaneval.jsonl. Generates greedy responses, trains with early
stopping on held-out replay tau, evaluates on HumanEval, exports. Stages print their own seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.checkpoint import load_drafter
from ddtree.drafter import Drafter
from ddtree.training import generate, validate
from ddtree.training.decode import Sampler
from ddtree.training.export import new_config
from ddtree.training.features import Cached, InProcess, Synthetic
from ddtree.training.files import write_json
from ddtree.training.losses import LossConfig
from ddtree.training.packing import Plan, Shape
from ddtree.training.pipeline import (
    TrainJob,
    load_tokenizer,
    make_drafter,
    preflight,
    run_export,
    stop_ids,
    target_shape,
)
from ddtree.training.prompts import load_prompts
from ddtree.training.replay import replay
from ddtree.training.report import eval_text, report
from ddtree.training.schedule import TrainConfig
from ddtree.training.target import default_layer_ids, load_target, target_identity
from ddtree.training.tokens import Row, TokenSet, TokenWriter
from ddtree.training.trainer import Run, data_of, train


def make_config(a: argparse.Namespace, layer_ids: tuple[int, ...]) -> TrainConfig:
    """The run's settings."""
    return TrainConfig(
        epochs=a.passes,
        rows_per_step=a.micro_rows,
        shape=Shape(a.width, a.micro_rows, a.anchors, 256, 0.5),
        block=a.block,
        layers=a.layers,
        layer_ids=layer_ids,
        mask_token_id=a.mask,
        loss=LossConfig("dpace", chunk=a.anchors * a.micro_rows // 2 * (a.block - 1)),
        lr=a.lr,
        dtype=a.dtype,
        eval_every=1000,
        eval_rows=128,
        eval_budgets=(64,),
        save_every=4000,
        log_every=50,
        patience=4,
        min_lr=0.02,
    )


def compile_only(a: argparse.Namespace) -> None:
    """Two steps on random tokens with the shapes of the run, while another process generates."""
    from transformers import AutoConfig

    c = AutoConfig.from_pretrained(a.target)
    ids = default_layer_ids(c.num_hidden_layers)
    kind = getattr(torch, a.dtype)
    with tempfile.TemporaryDirectory() as tmp:
        writer = TokenWriter(Path(tmp), {})
        for _ in range(40 * a.micro_rows):
            writer.add(Row(np.random.randint(5, c.vocab_size, a.width // 3).astype(np.int32), 40, 1, {}))
        writer.flush()
        tokens = TokenSet(Path(tmp), verify=False)
        config = replace(make_config(a, ids), steps=2, save_every=0)
        weight = torch.randn(c.vocab_size, c.hidden_size, device="cuda", dtype=kind)
        source = Synthetic(tokens, len(ids) * c.hidden_size, c.vocab_size, kind, "cuda")
        drafter = Drafter(new_config(c, a.block, a.layers, ids, a.mask))
        begun = time.time()
        train(Run(a.out / "compile", config, drafter, weight, weight.clone(), tokens, source))
        print(f"compiled in {time.time() - begun:.1f} s", flush=True)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("target", type=Path)
    p.add_argument("data", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--seconds", type=float, default=340)
    p.add_argument("--slots", type=int, default=2048)
    p.add_argument("--rows", type=int, default=640)
    p.add_argument("--max-new", type=int, default=320)
    p.add_argument("--prompts", type=int, default=0)
    p.add_argument("--block", type=int, default=8)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--passes", type=float, default=4.0, help="epochs at most")
    p.add_argument("--anchors", type=int, default=320)
    p.add_argument("--micro-rows", type=int, default=8)
    p.add_argument("--width", type=int, default=1024)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--mask", type=int, default=4)
    p.add_argument("--steps", type=int, default=0)
    p.add_argument("--eval-every", type=int, default=1200)
    p.add_argument("--compile-only", action="store_true", help="fill the compiler's cache with this run's shapes")
    p.add_argument("--reserve", type=float, default=25, help="seconds kept for evaluation and export")
    p.add_argument("--sampled", type=float, default=0.0, help="share of prompts also sampled at T=.7")
    p.add_argument("--baseline", type=Path, help="drafter to compare with on the same responses")
    a = p.parse_args()
    began = time.time()
    if a.compile_only:
        compile_only(a)
        return
    facts: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(a).items()}}

    def stage(text: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"[{time.time() - began:6.1f} s] {text}", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = load_tokenizer(a.target)
    target = load_target(a.target, None, getattr(torch, a.dtype), device)
    stop = stop_ids(a.target, tokenizer)
    identity = validate.data_identity(target_identity(a.target), tokenizer, {}, len(target.embedding))
    humaneval, held, prompts = (
        load_prompts(next(a.data.glob(f"{n}.jsonl*"))) for n in ("humaneval", "held", "prompts")
    )
    prompts = prompts[: a.prompts or None]
    validate.check_prompts(prompts, [a.data / "humaneval.jsonl"])
    stage(f"target loaded, {len(prompts):,} prompts checked")

    folders = {}
    greedy = Sampler(max_new=a.max_new)
    extra = prompts[: int(len(prompts) * a.sampled)]
    sets: list[tuple[str, list[Any], Sampler]] = [
        ("humaneval", humaneval, Sampler(max_new=256)),
        ("held", held, greedy),
        ("greedy", prompts, greedy),
    ]
    if extra:
        sets.append(("sampled", extra, Sampler(0.7, 1.0, 20, a.max_new, 1)))
    for name, chosen, sampler in sets:
        rows = max(a.rows, 768 if name == "humaneval" and a.rows > 200 else 0)
        backend = generate.TransformersBackend(target, stop, min(a.slots, len(chosen)), rows)
        folders[name] = a.out / "tokens" / name
        got = generate.generate(chosen, backend, tokenizer, sampler, folders[name], identity, shard_rows=1 << 16)
        facts[f"generate-{name}"] = {**got, "sampler": asdict(sampler)}
        del backend
        stage(f"generate {name}: {json.dumps(got)}")
        torch.cuda.empty_cache()

    tokens = TokenSet(*[folders[k] for k in ("greedy", "sampled") if k in folders], verify=False)
    held_set, human = TokenSet(folders["held"]), TokenSet(folders["humaneval"])
    config = make_config(a, target.layer_ids)
    job = TrainJob(a.target, [folders["greedy"]], a.out / "run", config, [folders["held"]], dtype=a.dtype)
    facts["preflight"] = preflight(target, tokenizer, tokens, held_set, job, config)
    stage(f"preflight passed: {facts['preflight'].get('head_agrees')}")
    lengths = np.minimum(tokens.index["total"], a.width).astype(np.int64)
    kind = getattr(torch, a.dtype)
    size = int(lengths.sum()) * target.width * kind.itemsize
    source = Cached(InProcess(target, tokens, 65536), min(size, int(95e9)), target.width, kind, device)
    begun = time.time()
    kept = source.fill(lengths)
    torch.cuda.synchronize() if device == "cuda" else None
    facts["capture"] = {"rows": kept, "tokens": source.used, "seconds": time.time() - begun}
    stage(f"capture: {source.used / (time.time() - begun):,.0f} tokens/s, {kept:,} rows, {size / 1e9:.1f} GB")
    held_source = Cached(
        InProcess(target, held_set), int(held_set.index["total"].sum()) * target.width * 4, target.width, kind, device
    )

    def run_of(folder: Path, config: TrainConfig) -> Run:
        return Run(
            folder=folder,
            config=config,
            drafter=make_drafter(job, target, config),
            embedding=target.embedding,
            head=target.head,
            tokens=tokens,
            source=source,
            held_out=held_set,
            held_out_source=held_source,
            identity={
                "target": identity["target"],
                "data": [
                    {"rows": m["rows"], "tokens": m["tokens"], "sampler": m["identity"]["sampler"]}
                    for m in tokens.manifests
                ],
            },
        )

    prompts_len, totals = data_of(tokens)
    plan = Plan(prompts_len, totals, config.shape, config.rows_per_step, config.seed)
    per_epoch = plan.steps_per_epoch()
    steps = a.steps or int(a.passes * per_epoch)
    config = replace(config, steps=steps, eval_every=a.eval_every)
    stage(f"{per_epoch} steps an epoch, at most {steps} steps")
    run = run_of(a.out / "run", config)
    run.stop_at = began + a.seconds - a.reserve
    run.anneal_to = run.stop_at - 12
    begun = time.time()
    summary = train(run)
    facts["train"] = {
        **summary,
        "seconds": time.time() - begun,
        "steps_per_epoch": per_epoch,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0,
    }
    stage(f"trained: {json.dumps(summary)}")

    tables = {}
    drafters = {"best": a.out / "run" / "best"} | ({"baseline": a.baseline} if a.baseline else {})
    for label, folder in drafters.items():
        drafter = load_drafter(folder, target_shape(target), device, kind)
        for name, data, inner in (("humaneval", human, InProcess(target, human)), ("held", held_set, held_source)):
            result = replay(drafter, target.embedding, target.head, data, inner, None, (8, 16, 64), kind)
            tables[f"{label}-{name}"] = report(result, data, drafter.config.block_size)
            stage(f"{label} on {name}:\n{eval_text(tables[f'{label}-{name}'])}")
    facts["acceptance"] = tables
    write_json(a.out / "facts.json", facts)
    errors = run_export(
        a.out / "run", a.target, a.out / "export", table=tables["best-humaneval"], name="smollm2-135m-dflash-retrained"
    )
    stage(f"exported: {errors}")


if __name__ == "__main__":
    main()
