"""The stages put together: what the command line and ``smoke`` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.checkpoint import TargetShape, load_drafter, read_config
from ddtree.drafter import Drafter
from ddtree.training import runstate, validate
from ddtree.training.cache import DiskCached, StateStore
from ddtree.training.errors import PreflightError
from ddtree.training.export import compare, new_config, save_speculators, save_zlab, zlab_config
from ddtree.training.features import Cached, FeatureSource, InProcess, VllmStates
from ddtree.training.files import manifest_digest, read_json, write_json
from ddtree.training.metrics import plot_tau
from ddtree.training.parallel import init_distributed
from ddtree.training.prompts import load_prompts
from ddtree.training.replay import replay
from ddtree.training.report import card, report
from ddtree.training.schedule import TrainConfig
from ddtree.training.target import Target, load_target, target_identity
from ddtree.training.tokens import TokenSet
from ddtree.training.trainer import Run, train


def load_tokenizer(folder: Path) -> Any:
    """The target's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """End tokens: the generation config's, else the tokenizer's.

    Raises:
        PreflightError: ``no-end-token``.
    """
    file = folder / "generation_config.json"
    found = read_json(file).get("eos_token_id") if file.exists() else None
    ids = [int(i) for i in (found if isinstance(found, list) else [found]) if i is not None]
    if isinstance(tokenizer.eos_token_id, int) and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise PreflightError("no-end-token", f"{folder} names no end-of-text token")
    return ids


def target_shape(target: Target) -> TargetShape:
    """What a drafter must agree with."""
    c = target.config
    return TargetShape(int(c.hidden_size), int(c.num_hidden_layers), len(target.embedding))


def manifest_digests(folders: Sequence[Path]) -> list[str]:
    """What the rows of token folders are, in order."""
    return [manifest_digest(f) for f in folders]


@dataclass(frozen=True)
class TrainJob:
    """Arguments of the train stage."""

    target: Path
    tokens: list[Path]
    out: Path
    config: TrainConfig
    held_out: list[Path]
    init: Path | None = None
    source: str = "inprocess"  # or "vllm"
    states: Path | None = None  # folder of saved hidden states, for source "vllm"
    state_budget: int = 0  # bytes of features kept on the device, or in state_cache
    state_cache: Path | None = None  # folder: keep features on disk instead
    sharding: str = "ddp"
    template_kwargs: dict[str, Any] | None = None
    dtype: str = "bfloat16"
    stop_at: float = 0.0
    stop_after: int = 0
    prompts: Path | None = None  # curated folder: rows are rendered again and compared
    evals: Sequence[Path] = ()  # evaluation sets that the prompts must not overlap


def make_drafter(job: TrainJob, target: Target, config: TrainConfig) -> Drafter:
    """A fresh drafter, or the one to start from.

    Raises:
        PreflightError: ``init-shape`` when block, layers or layer ids ask for another shape than the released
        drafter's. CheckpointError: the released drafter does not fit the target.
    """
    if job.init is None:
        torch.manual_seed(config.seed)
        fresh = new_config(target.config, config.block, config.layers, target.layer_ids, config.mask_token_id)
        drafter = Drafter(replace(fresh, vocab_size=len(target.embedding)))
        for name, p in drafter.named_parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=max(0.02, 0.5 * p.shape[1] ** -0.5))
            assert "norm" in name or p.dim() == 2
        return drafter
    drafter = load_drafter(job.init, target_shape(target), "cpu", torch.float32)
    if drafter.config.own_head or drafter.config.draft_vocab_size:
        raise PreflightError("init-own-head", f"{job.init} has a head of its own, which training keeps frozen")
    if drafter.config.block_size != config.block or drafter.config.num_layers != config.layers:
        c = drafter.config
        raise PreflightError("init-shape", f"{job.init} has block {c.block_size} and {c.num_layers} layers, "
                             f"asked for {config.block} and {config.layers}")  # fmt: skip
    return drafter


def resolve(job: TrainJob) -> TrainConfig:
    """The job's settings with a released drafter's shape filled in."""
    c = job.config
    if job.init is None:
        return c
    found = read_config(job.init)
    return replace(c, block=found.block_size, layers=found.num_layers, layer_ids=found.target_layer_ids,
                   mask_token_id=found.mask_token_id)  # fmt: skip


def preflight(
    target: Target, tokenizer: Any, tokens: TokenSet, held_out: TokenSet | None, job: TrainJob, config: TrainConfig
) -> dict[str, Any]:
    """All checks that need the target; returns what was measured. See validate.py for the errors."""
    identity = target_identity(job.target)
    validate.check_identity(tokens, identity, tokenizer, job.template_kwargs)
    if job.prompts is not None:
        prompts = load_prompts(job.prompts)
        validate.check_prompts(prompts, job.evals)
        validate.check_rows(tokens, {p.id: p for p in prompts}, tokenizer)
    validate.check_data(tokens, len(target.embedding), config.shape.width)
    validate.check_mask_id(config.mask_token_id, target.embedding, tokens, tokenizer, stop_ids(job.target, tokenizer))
    validate.check_capture(target, tokens)
    greedy = validate.greedy_rows(tokens)
    found: dict[str, Any] = {"target": identity}
    if greedy:  # bfloat16 logits tie now and then, so rounding alone costs a few per cent
        found["head_agrees"] = validate.check_head(target, tokens, greedy, 0.99 if job.dtype == "float32" else 0.95)
    if held_out is not None:
        validate.check_identity(held_out, identity, tokenizer, job.template_kwargs)
        validate.check_overlap(tokens, held_out)
    return found


def run_train(job: TrainJob) -> dict[str, Any]:
    """Pre-flight, then train; the summary of trainer.train. The same call goes on after a kill."""
    device = init_distributed()
    config = resolve(job)
    tokenizer = load_tokenizer(job.target)
    tokens = TokenSet(*job.tokens)
    held_out = TokenSet(*job.held_out) if job.held_out else None
    target = load_target(job.target, config.layer_ids or None, getattr(torch, job.dtype), str(device))
    if config.mask_token_id < 0:
        stops = stop_ids(job.target, tokenizer)
        config = replace(config, mask_token_id=validate.suggest_mask(target.embedding, tokens, tokenizer, stops))
    config = replace(config, layer_ids=target.layer_ids, dtype=job.dtype)
    facts = preflight(target, tokenizer, tokens, held_out, job, config)
    drafter = make_drafter(job, target, config)
    parameters = sum(p.numel() for p in drafter.parameters())
    if runstate.rank() == 0:
        validate.check_run_space(job.out, parameters, config.keep)
    source: FeatureSource = InProcess(target, tokens)
    if job.source == "vllm":
        if job.states is None:
            raise PreflightError("states-folder", "--source vllm needs --states DIR")
        source = VllmStates(job.states, tokens, target.width, str(device))
    if job.state_budget and job.state_cache:
        known = {"target": facts["target"], "layer_ids": list(target.layer_ids), "tokens": manifest_digests(job.tokens)}
        folder = job.state_cache / f"rank-{runstate.rank()}-of-{runstate.world()}"
        store = StateStore(folder, target.width, getattr(torch, job.dtype), job.state_budget // runstate.world(), known)
        source = DiskCached(source, store, str(device))
    elif job.state_budget:
        lengths = np.minimum(tokens.index["total"], config.shape.width).astype(np.int64)
        size = min(job.state_budget, int(lengths.sum()) * target.width * getattr(torch, job.dtype).itemsize)
        if job.source == "inprocess":
            source = InProcess(target, tokens, 65536)
        source = Cached(source, size, target.width, getattr(torch, job.dtype), str(device))
        if runstate.world() == 1:  # with more ranks each keeps what its own batches bring
            kept = source.fill(lengths)
            print(f"features of {kept:,} of {len(tokens):,} rows are kept on {device}", flush=True)
    held_source: FeatureSource | None = None
    if held_out is not None:
        held_source = InProcess(target, held_out)
        if job.state_budget and not job.state_cache:
            size = min(job.state_budget // 4, int(held_out.index["total"].sum()) * target.width * 4)
            held_source = Cached(held_source, size, target.width, getattr(torch, job.dtype), str(device))
    facts["data"] = [{"sampler": m["identity"].get("sampler"), "rows": m["rows"], "tokens": m["tokens"]}
                     for m in tokens.manifests]  # fmt: skip
    facts["init"] = str(job.init) if job.init else None
    run = Run(
        folder=job.out, config=config, drafter=drafter, embedding=target.embedding, head=target.head, tokens=tokens,
        source=source, held_out=held_out, held_out_source=held_source, warm_start=job.init is not None,
        identity={"target": facts["target"], "data": facts["data"], "init": facts["init"]}, sharding=job.sharding,
        stop_at=job.stop_at, anneal_to=job.stop_at, stop_after=job.stop_after,
    )  # fmt: skip
    summary = train(run)
    if isinstance(source, DiskCached):
        source.store.flush()
    return summary


def run_eval(
    drafter_folder: Path, target_folder: Path, tokens: Sequence[Path], budgets: Sequence[int], rows: int = 0,
    dtype: str = "bfloat16", samples: int = 1000, target: Target | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Replay a drafter on recorded responses: tau by rule, prompt lookup beside it, and how it was measured."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TokenSet(*tokens)
    config = read_config(drafter_folder)
    if target is None or target.layer_ids != config.target_layer_ids:
        target = load_target(target_folder, config.target_layer_ids, getattr(torch, dtype), device)
    drafter = load_drafter(drafter_folder, target_shape(target), device, getattr(torch, dtype))
    chosen = list(range(len(data)))[: rows or None]
    result = replay(
        drafter, target.embedding, target.head, data, InProcess(target, data), chosen, budgets, progress=True
    )
    return report(result, data, config.block_size, samples)


def run_export(
    run_folder: Path, target_folder: Path, out: Path, formats: Sequence[str] = ("zlab",),
    table: dict[str, Any] | None = None, name: str = "", norms: str = "float32",
) -> dict[str, float]:  # fmt: skip
    """Export the best drafter of a run; reloads each format and compares. Returns the largest relative difference."""
    best = run_folder / "best"
    source = best if best.exists() else None
    if source is None:
        raise PreflightError("no-best", f"{run_folder} holds no evaluated drafter yet", "train with --held-out first")
    config = read_config(source)
    target = load_target(target_folder, config.target_layer_ids, torch.float32, "cpu")
    drafter = load_drafter(source, target_shape(target), "cpu", torch.float32)
    run = read_json(run_folder / "config.json") if (run_folder / "config.json").exists() else {}
    if (run_folder / "summary.json").exists():
        run["steps"] = read_json(run_folder / "summary.json")["step"]
    identity = run.get("identity", {}).get("target", target_identity(target_folder))
    errors = {}
    for kind in formats:
        folder = out if len(formats) == 1 else out / kind
        text = card(name or out.name, run, table, zlab_config(config))
        if kind == "zlab":
            facts = source / "training.json"
            extra = read_json(facts) if facts.exists() else None
            save_zlab(folder, drafter.state_dict(), config, norms=getattr(torch, norms), card=text, extra=extra)
        elif kind == "speculators":
            verifier = {"name": identity.get("name", "target"), "architecture": identity.get("architecture", "")}
            save_speculators(folder, drafter.state_dict(), config, target.embedding, target.head, verifier, card=text)
        else:
            raise PreflightError("export-format", f"{kind!r}", "zlab or speculators")
        errors[kind] = compare(folder, drafter, target_shape(target), target.embedding, target.head)
        plot_tau(run_folder, folder / "tau.png")
        if table:
            write_json(folder / "acceptance.json", table)
    return errors
