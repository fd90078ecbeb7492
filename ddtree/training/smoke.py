"""smoke: every stage, with the code of a real run, on a synthetic target on the CPU."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ddtree.training import generate, plan, validate
from ddtree.training.curate import CurateConfig, curate
from ddtree.training.decode import Sampler
from ddtree.training.losses import LossConfig
from ddtree.training.packing import Shape
from ddtree.training.pipeline import TrainJob, load_tokenizer, run_eval, run_export, run_train, stop_ids
from ddtree.training.prompts import Source, load_prompts
from ddtree.training.report import eval_text
from ddtree.training.schedule import TrainConfig
from ddtree.training.synthetic import MASK, VOCAB, make_prompts, make_target
from ddtree.training.target import load_target, target_identity

LAYER_IDS = (0, 1, 2)
SHAPE = Shape(width=160, rows=2, anchors=48, cap=48, rate=0.5)


def smoke_config(steps: int = 60, loss: str = "dpace", block: int = 8) -> TrainConfig:
    """Settings of a run on the synthetic target."""
    return TrainConfig(
        steps=steps, rows_per_step=4, shape=SHAPE, block=block, layers=2, layer_ids=LAYER_IDS, mask_token_id=MASK,
        loss=LossConfig(loss, budget=16, top=16), lr=4e-3, dtype="float32", eval_every=max(1, steps // 2), eval_rows=24,
        eval_budgets=(16,), save_every=max(1, steps // 2), log_every=10, compile=False,
    )  # fmt: skip


def make_tokens(
    work: Path, count: int, seed: int, name: str, sampler: Sampler, evals: list[Path] | None = None
) -> Path:
    """Prompts of the synthetic language, curated, answered by the synthetic target: a token folder."""
    raw, target_folder = work / f"{name}.jsonl", work / "target"
    make_prompts(raw, count, seed)
    curate([Source.parse(f"{raw},licence=CC0,source={name}")], work / f"{name}-prompts", CurateConfig(workers=1), evals)
    prompts = load_prompts(work / f"{name}-prompts")
    validate.check_prompts(prompts, evals or [])
    tokenizer = load_tokenizer(target_folder)
    target = load_target(target_folder, LAYER_IDS, torch.float32, "cpu")
    stop = stop_ids(target_folder, tokenizer)
    identity = validate.data_identity(target_identity(target_folder), tokenizer, {}, VOCAB)
    backend = generate.TransformersBackend(target, stop, slots=32, rows=96)
    generate.generate(prompts, backend, tokenizer, sampler, work / f"{name}-tokens", identity)
    return work / f"{name}-tokens"


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="ddtree-smoke-") as tmp:
        yield Path(tmp)


def smoke(out: Path | None = None) -> int:
    """Run every stage; 0 when tau rose and every check held, 1 otherwise."""
    started = time.perf_counter()

    def stage(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {text}", flush=True)

    with _folder(out) as work:
        stage("target: a tiny model fitted to a synthetic language")
        make_target(work / "target", steps=60)
        p = plan.plan(plan.read_config(work / "target"), 200, 60, gpus=1, layers=2, block=8, width=160)
        stage(f"plan: drafter of {p.drafter_parameters / 1e3:,.0f} K parameters")
        held = make_tokens(work, 24, 11, "held", Sampler(temperature=0.6, top_k=8, max_new=40))
        train_tokens = make_tokens(
            work, 160, 12, "train", Sampler(temperature=0.6, top_k=8, max_new=40), [work / "held.jsonl"]
        )
        stage("curate and generate: done")
        config = smoke_config()
        job = TrainJob(work / "target", [train_tokens], work / "run", config, [held], dtype="float32")
        first = run_train(TrainJob(**{**job.__dict__, "stop_after": 30}))
        stage(f"train: stopped at step {first['step']}")
        summary = run_train(job)
        stage(f"train: resumed, ended at step {summary['step']}, best tau {summary['best']['tau']:.2f}")
        table = run_eval(work / "run" / "best", work / "target", [held], (8, 16), dtype="float32", samples=200)
        stage("eval:\n" + eval_text(table))
        errors = run_export(work / "run", work / "target", work / "export", ("zlab", "speculators"), table, "smoke")
        stage(f"export: reloaded, logits differ by {max(errors.values()):.1e} at most")
    seconds = time.perf_counter() - started
    chain = table["rules"]["chain"]["tau"]
    ok = chain > 1.3 and summary["step"] == config.steps
    print(f"smoke {'passed' if ok else 'FAILED'} in {seconds:.0f} s: chain tau {chain:.2f}, tree-16 "
          f"{table['rules']['tree-16']['tau']:.2f}, prompt lookup {table['prompt_lookup']['tau']:.2f}")  # fmt: skip
    return 0 if ok else 1
