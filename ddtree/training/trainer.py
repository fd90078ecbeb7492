"""The training loop: one process per GPU (torchrun) or one alone, the target frozen in process.

Gradients are those of the global loss: each rank back-propagates its summed numerator, the weight sums of all ranks and
accumulation steps are added, and gradients are divided once. Weights, gradients and AdamW's moments are float32;
activations run in the features' dtype (bfloat16 on a GPU), into which the layers cast their weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.drafter import Drafter
from ddtree.training import runstate
from ddtree.training.errors import DataError, TrainingError
from ddtree.training.export import save_zlab
from ddtree.training.features import FeatureSource
from ddtree.training.files import write_json
from ddtree.training.losses import LossSums, _chunk, head_loss
from ddtree.training.metrics import Metrics
from ddtree.training.packing import Batch, Plan, assemble, draw_anchors
from ddtree.training.parallel import Signals, accumulating, add_up, agreed, apply_gradients, on_any, wrap
from ddtree.training.replay import replay
from ddtree.training.schedule import TrainConfig
from ddtree.training.tokens import TokenSet


@dataclass
class Run:
    """What a training run needs. ``embedding`` and ``head`` are the target's, frozen, on the device."""

    folder: Path
    config: TrainConfig
    drafter: Drafter
    embedding: Tensor
    head: Tensor
    tokens: TokenSet
    source: FeatureSource
    held_out: TokenSet | None = None
    held_out_source: FeatureSource | None = None
    held_out_rows: list[int] | None = None
    warm_start: bool = False
    identity: dict[str, Any] | None = None  # of target and data; kept in run/config.json
    sharding: str = "ddp"  # or "fsdp"
    stop_after: int = 0  # end (and save) after this many steps of this call; for tests and time limits
    stop_at: float = 0.0  # end (and save) once time.time() passes this
    anneal_to: float = 0.0  # shorten the run so that its last step falls at this time.time(), at the speed measured


def data_of(tokens: TokenSet) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Prompt and total lengths, int64."""
    return tokens.index["prompt"].astype(np.int64), tokens.index["total"].astype(np.int64)


def make_batch(plan: Plan, tokens: TokenSet, step: int, micro: int, block: int, device: torch.device) -> Batch:
    """The micro-batch ``micro`` of a step; depends on nothing but the arguments."""
    epoch, rows = plan.rows(step, micro)
    anchors = [draw_anchors(r, plan.prompts, plan.totals, plan.shape, plan.seed, epoch) for r in rows]
    ids = [[tokens.ids(d)[: plan.shape.width] for d in r.tolist()] for r in rows]
    return assemble(rows, anchors, ids, plan.shape, block, device)


def prefetch(make: Callable[[int, int], Batch], steps: range, micros: list[int]) -> Iterator[tuple[int, list[Batch]]]:
    """Batches of each step, one step ahead, built on a thread."""
    with ThreadPoolExecutor(1) as pool:

        def whole(step: int) -> list[Batch]:
            return [make(step, m) for m in micros]

        coming = pool.submit(whole, steps[0]) if steps else None
        for step in steps:
            assert coming is not None
            batches = coming.result()
            coming = pool.submit(whole, step + 1) if step + 1 < steps.stop else None
            yield step, batches


_WARM = 100  # steps before the speed is measured, and over which it is


def train(run: Run) -> dict[str, Any]:
    """Train to the end, to a signal, or to a stop; returns a summary. Calling again goes on from the last save.

    Raises:
        ResumeError: the folder belongs to a run with other settings.
        DataError: too little data, or a loss without weight.
        TrainingError: a loss that is not finite.
    """
    c, device = run.config, run.embedding.device
    runstate.begin(run.folder, {**_flat(c), "identity": run.identity or {}, "warm_start": run.warm_start})
    prompts, totals = data_of(run.tokens)
    plan = Plan(prompts, totals, c.shape, c.rows_per_step, c.seed)
    world, rank = runstate.world(), runstate.rank()
    if plan.micro % world:
        raise DataError("ranks", f"{plan.micro} micro-batches a step do not divide over {world} ranks",
                        f"rows per step must be a multiple of {world} x {c.shape.rows}")  # fmt: skip
    planned = c.steps or max(1, round(c.epochs * plan.steps_per_epoch()))
    drafter = run.drafter.to(device=device, dtype=torch.float32).train().requires_grad_(True)
    model = wrap(drafter, run.sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=c.betas, weight_decay=c.weight_decay,
                                  fused=device.type == "cuda")  # fmt: skip
    saved = runstate.restore(run.folder, model, optimizer)
    start = int(saved["step"]) if saved else 0
    steps = int(saved["steps"]) if saved else planned
    best = dict(saved["best"]) if saved else {"tau": 0.0, "step": -1}
    if rank == 0:
        runstate.truncate_metrics(run.folder, start)
    metrics = Metrics(run.folder, steps, start, rank == 0)
    use_compile = c.compile and device.type == "cuda"
    forward: Callable[..., Tensor] = torch.compile(model, dynamic=False) if use_compile else model
    chunk_fn = torch.compile(_chunk, dynamic=False) if use_compile else _chunk
    dtype = getattr(torch, c.dtype)
    embedding, head = run.embedding.to(dtype), run.head.to(dtype)
    micros = list(range(rank, plan.micro, world))
    tokens_done, seconds, since = 0, 0.0, time.perf_counter()
    sums: LossSums | None = None
    last: dict[str, Any] = {}
    stop_step = min(steps, start + run.stop_after) if run.stop_after else steps
    warm: tuple[int, float] | None = None  # when compilation was over
    done, reason = start, "done"

    def build(s: int, m: int) -> Batch:
        return make_batch(plan, run.tokens, s, m, c.block, device)

    with Signals() as signals:
        for step, batches in prefetch(build, range(start, stop_step), micros):
            if step >= stop_step:  # the run was shortened
                break
            rate = c.learning_rate(step, steps, run.warm_start)
            weight = torch.zeros((), device=device)
            for i, batch in enumerate(batches):
                features = run.source.features(batch.docs, batch.lengths)[batch.source].to(dtype)
                with accumulating(model, last=i == len(batches) - 1):
                    hidden = forward(
                        features, batch.anchor_tokens, batch.anchors, embedding, batch.positions, batch.starts
                    )
                    drafted = hidden[:, :, 1:]
                    part, grad = head_loss(drafted, head, batch.targets, batch.valid, c.loss, chunk_fn)
                    drafted.backward(grad)  # type: ignore[no-untyped-call]
                weight += part.weight
                sums = part if sums is None else sums + part
                tokens_done += batch.tokens
            if run.anneal_to and not saved and step - start in (_WARM, 2 * _WARM):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if warm is None:
                    warm = (step, time.time())
                else:
                    each = (time.time() - warm[1]) / (step - warm[0])
                    steps = agreed(min(steps, step + 1 + max(1, int((run.anneal_to - time.time()) / each))), device)
                    stop_step = min(stop_step, steps)
                    metrics.say(f"{each * 1e3:.1f} ms a step: the run will have {steps} steps")
            add_up(weight)
            norm = apply_gradients(model, optimizer, weight, world, rate, c.clip)
            done = step + 1
            out_of_time = on_any(bool(run.stop_at and time.time() > run.stop_at), device)
            asked = on_any(signals.asked, device) or out_of_time
            saving = c.save_every > 0 and (done % c.save_every == 0 or done == stop_step or asked)
            if (
                done % c.log_every == 0 or done == stop_step or saving
            ):  # a loss that is not finite must not reach a checkpoint
                assert sums is not None
                last = _summary(sums, norm, rate, device)
                if not np.isfinite(last["loss"]):
                    raise TrainingError("loss-not-finite", f"step {done}: {last['loss']}, gradient {last['grad_norm']}",
                                        "a lower learning rate; the last checkpoint is good")  # fmt: skip
                seconds += time.perf_counter() - since
                last["tokens_per_s"] = round(tokens_done * world / max(seconds, 1e-9), 1)
                metrics.log(done, {**last, "epoch": plan.locate(step)[0]})
                sums, tokens_done, seconds, since = None, 0, 0.0, time.perf_counter()
            metrics.progress(1, **_shown(last, best))
            evaluate_now = run.held_out is not None and (done % c.eval_every == 0 or done == steps or out_of_time)
            if evaluate_now:
                before = time.perf_counter()
                best, improved = _evaluate(run, drafter, embedding, done, best, metrics, plan)
                since += time.perf_counter() - before
                if not improved and c.patience and (done - best["step"]) >= c.patience * c.eval_every:
                    reason, asked = "no-improvement", True
            if saving or (asked and c.save_every):
                before = time.perf_counter()
                runstate.save(run.folder, done, model, optimizer, {"best": best, "steps": steps}, c.keep)
                since += time.perf_counter() - before
            if asked:
                reason = "stopped" if reason == "done" else reason
                break
    metrics.close()
    if run.held_out is None and done > start:  # nothing to choose by: the last weights are what there is
        weights = runstate.whole_weights(drafter)
        if rank == 0:
            save_zlab(
                run.folder / "best", weights, drafter.config, extra={"step": done, "chosen": "last, none held out"}
            )
    summary = {"steps": steps, "step": done, "reason": reason, "best": best, "last": last}
    if rank == 0:
        write_json(run.folder / "summary.json", summary)
    return summary


def _flat(config: TrainConfig) -> dict[str, Any]:
    return {"train": asdict(config)}


def _summary(sums: LossSums, norm: Tensor, rate: float, device: torch.device) -> dict[str, Any]:
    flat = torch.cat([t.reshape(-1).float() for t in sums.stacked()]).to(device)
    add_up(flat)
    loss, weight, *rest = flat.tolist()
    D = (len(rest) - 2) // 2
    hits, valid, (accepted, blocks) = rest[:D], rest[D : 2 * D], rest[2 * D :]
    return {
        "loss": loss / max(weight, 1e-12), "accuracy_1": hits[0] / max(valid[0], 1),
        "anchor_tau": 1 + accepted / max(blocks, 1), "grad_norm": float(norm), "lr": rate, "blocks": int(blocks),
    }  # fmt: skip


def _shown(last: dict[str, Any], best: dict[str, Any]) -> dict[str, str]:
    if not last:
        return {}
    shown = {"loss": f"{last['loss']:.3f}", "tok/s": f"{last['tokens_per_s']:,.0f}"}
    if best["step"] >= 0:
        shown["best tau"] = f"{best['tau']:.2f}"
    return shown


def _evaluate(
    run: Run, drafter: Drafter, embedding: Tensor, done: int, best: dict[str, Any], metrics: Metrics, plan: Plan
) -> tuple[dict[str, Any], bool]:
    """Replay the held-out rows; keep the drafter when its tau for the selected rule is the best so far."""
    c = run.config
    assert run.held_out is not None
    source = run.held_out_source or run.source
    # spread over the folder: rows are in the order in which responses ended, the short ones first
    spread = np.unique(np.linspace(0, len(run.held_out) - 1, min(c.eval_rows, len(run.held_out))).astype(int))
    rows = run.held_out_rows if run.held_out_rows is not None else spread.tolist()
    drafter.eval()
    result = replay(drafter, embedding, run.head, run.held_out, source, rows, c.eval_budgets, getattr(torch, c.dtype))
    drafter.train()
    taus = {f"tau/{rule}": r.tau() for rule, r in result.rules.items()}
    metrics.log(done, taus)
    metrics.say(f"step {done}: " + "  ".join(f"{k.removeprefix('tau/')} {v:.3f}" for k, v in taus.items()))
    if f"tau/{c.select}" not in taus:
        raise DataError("select-rule", f"no rule {c.select!r}", f"one of {', '.join(result.rules)}")
    tau = taus[f"tau/{c.select}"]
    if tau <= best["tau"]:
        return best, False
    best = {"tau": tau, "step": done, "taus": taus}
    weights = runstate.whole_weights(drafter)
    if runstate.rank() == 0:
        save_zlab(run.folder / "best", weights, drafter.config, extra={"step": done, "taus": taus})
    return best, True
