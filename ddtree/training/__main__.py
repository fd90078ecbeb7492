"""Command line: ``python -m ddtree.training plan|curate|generate|train|eval|export|smoke``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from ddtree.errors import EngineError


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m ddtree.training", description=__doc__)
    sub = p.add_subparsers(dest="stage", required=True)

    s = sub.add_parser("plan", help="what a run will cost: arithmetic from the target's config.json, no GPU")
    s.add_argument("--target", type=Path, required=True, help="target folder, or its config.json")
    s.add_argument("--rows", type=int, default=913_000)
    s.add_argument("--mean-tokens", type=float, default=1000, help="prompt and response")
    s.add_argument("--response-share", type=float, default=0.9)
    for name, kind, default in (
        ("gpus", int, 8), ("anchors", int, 256), ("block", int, 16), ("layers", int, 5), ("epochs", float, 3.0),
        ("width", int, 4096), ("tflops", float, 989.0), ("mfu", float, 0.28), ("generate-tok-s", float, 2500.0),
    ):  # fmt: skip
        s.add_argument(f"--{name}", type=kind, default=default)
    s.add_argument("--fsdp", action="store_true")
    s.add_argument("--json", action="store_true")

    s = sub.add_parser("curate", help="normalise, filter, deduplicate, decontaminate and mix prompts")
    s.add_argument(
        "--in", dest="inputs", action="append", required=True, metavar="FILE[,category=..,licence=..,source=..]"
    )
    s.add_argument("--decontaminate", type=Path, action="append", default=[], metavar="FILE", help="evaluation set")
    s.add_argument("--mix", default="", help="math:.3,code:.7")
    s.add_argument("--n", type=int, default=0, help="rows to keep at most")
    s.add_argument("--threshold", type=float, default=0.6, help="near-duplicate similarity")
    s.add_argument("--workers", type=int, default=2)
    s.add_argument("--seed", type=int, default=0)
    s.add_argument("--out", type=Path, required=True)

    s = sub.add_parser("generate", help="the target's own responses to the prompts, as token ids")
    s.add_argument("--target", type=Path, required=True)
    s.add_argument("--prompts", type=Path, required=True)
    s.add_argument("--out", type=Path, required=True)
    s.add_argument(
        "--backend",
        choices=("transformers", "vllm", "openai", "recorded"),
        default="transformers",
        help="recorded: --prompts are conversations that the target already wrote",
    )
    s.add_argument("--url", default="http://localhost:8000/v1", help="of an OpenAI-compatible endpoint")
    s.add_argument("--model", default="", help="model name at the endpoint")
    s.add_argument("--temperature", type=float, default=0.7)
    s.add_argument("--top-p", type=float, default=0.8)
    s.add_argument("--top-k", type=int, default=20)
    s.add_argument("--max-new", type=int, default=4096)
    s.add_argument("--seed", type=int, default=0)
    s.add_argument("--slots", type=int, default=64, help="responses decoded at once (transformers)")
    s.add_argument("--max-len", type=int, default=4096, help="prompt and response (transformers)")
    s.add_argument("--thinking", choices=("on", "off", "template"), default="template")
    s.add_argument("--retry-failed", action="store_true")
    s.add_argument("--decontaminate", type=Path, action="append", default=[], metavar="FILE")
    s.add_argument("--dtype", default="bfloat16")

    s = sub.add_parser("train", help="train a drafter (under torchrun: on many GPUs)")
    s.add_argument("--target", type=Path, required=True)
    s.add_argument("--tokens", type=Path, action="append", required=True)
    s.add_argument("--held-out", type=Path, action="append", default=[], help="token folder for replay tau")
    s.add_argument("--prompts", type=Path, help="curated folder: check that rows still render to what was recorded")
    s.add_argument("--decontaminate", type=Path, action="append", default=[], metavar="FILE", help="with --prompts")
    s.add_argument("--out", type=Path, required=True)
    s.add_argument("--init", type=Path, help="released drafter to start from")
    s.add_argument("--loss", choices=("ce_decay", "dpace", "tree"), default="dpace")
    s.add_argument("--tree-budget", type=int, default=64, help="of the tree loss")
    for name, kind, default in (
        ("block", int, 16), ("layers", int, 5), ("steps", int, 0), ("epochs", float, 3.0), ("rows-per-step", int, 64),
        ("rows", int, 1), ("width", int, 4096), ("anchors", int, 512), ("anchors-per-doc", int, 512),
        ("anchor-rate", float, 0.5), ("lr", float, 0.0), ("seed", int, 0), ("eval-every", int, 500),
        ("eval-rows", int, 256), ("save-every", int, 500), ("patience", int, 0), ("mask-token-id", int, -1),
    ):  # fmt: skip
        s.add_argument(f"--{name}", type=kind, default=default)
    s.add_argument("--layer-ids", default="", help="1,9,17,25,33 (z-lab's convention)")
    s.add_argument("--budgets", default="16,64", help="tree budgets of the replay")
    s.add_argument("--select", default="chain", help="rule that picks the best checkpoint: chain or tree-64")
    s.add_argument("--source", choices=("inprocess", "vllm"), default="inprocess")
    s.add_argument("--states", type=Path, help="hidden states that vLLM's extract_hidden_states saved")
    s.add_argument("--state-budget", type=float, default=0, metavar="GB", help="features kept on the device")
    s.add_argument("--state-cache", type=Path, metavar="DIR", help="keep them on disk, here, instead")
    s.add_argument("--sharding", choices=("ddp", "fsdp"), default="ddp")
    s.add_argument("--thinking", choices=("on", "off", "as-data"), default="as-data", help="as it will be served")
    s.add_argument("--minutes", type=float, default=0, help="fit the run, learning rate included, into this long")
    s.add_argument("--dtype", default="bfloat16")
    s.add_argument("--no-compile", action="store_true")

    s = sub.add_parser("eval", help="replay tau of a drafter on recorded responses; --live decodes for real")
    s.add_argument("--drafter", type=Path, required=True)
    s.add_argument("--target", type=Path, required=True)
    s.add_argument("--tokens", type=Path, action="append", required=True)
    s.add_argument("--budgets", default="16,64,256")
    s.add_argument("--rows", type=int, default=0)
    s.add_argument("--live", type=int, default=0, metavar="N", help="also decode N prompts and compare")
    s.add_argument("--dtype", default="bfloat16")
    s.add_argument("--out", type=Path, help="write the table as JSON")

    s = sub.add_parser("export", help="write the best drafter of a run as a checkpoint others load")
    s.add_argument("--run", type=Path, required=True)
    s.add_argument("--target", type=Path, required=True)
    s.add_argument("--out", type=Path, required=True)
    s.add_argument("--format", default="zlab", help="zlab, speculators, or both with a comma")
    s.add_argument("--acceptance", type=Path, help="table that eval wrote; goes into the model card")
    s.add_argument("--name", default="")

    s = sub.add_parser("smoke", help="every stage on a synthetic target, on the CPU, in under a minute")
    s.add_argument("--out", type=Path, help="keep the files here")
    return p


def _plan(a: argparse.Namespace) -> int:
    from ddtree.training import plan

    p = plan.plan(
        plan.read_config(a.target), a.rows, a.mean_tokens, a.response_share, a.gpus, a.anchors, a.block, a.layers,
        a.epochs, a.width, a.tflops, a.mfu, a.generate_tok_s, sharded=a.fsdp,
    )  # fmt: skip
    print(json.dumps(p.__dict__, indent=1) if a.json else plan.text(p, a.gpus))
    return 0


def _curate(a: argparse.Namespace) -> int:
    from ddtree.training.curate import CurateConfig, curate, parse_mix
    from ddtree.training.prompts import Source

    config = CurateConfig(threshold=a.threshold, n=a.n, mix=parse_mix(a.mix), seed=a.seed, workers=a.workers)
    manifest = curate([Source.parse(s) for s in a.inputs], a.out, config, a.decontaminate)
    for verdict, count in manifest["counts"].items():
        print(f"{verdict:20}{count:>12,}")
    return 0


def _thinking(choice: str) -> dict[str, Any] | None:
    return {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}.get(choice)


def _generate(a: argparse.Namespace) -> int:
    import torch

    from ddtree.training import generate, validate
    from ddtree.training.decode import Sampler
    from ddtree.training.pipeline import load_tokenizer, stop_ids
    from ddtree.training.plan import read_config
    from ddtree.training.prompts import Source, load_prompts
    from ddtree.training.recorded import record
    from ddtree.training.target import load_target, target_identity

    tokenizer = load_tokenizer(a.target)
    kwargs = _thinking(a.thinking) or {}
    stop = stop_ids(a.target, tokenizer)
    config = read_config(a.target)
    vocab = int({**config, **(config.get("text_config") or {})}["vocab_size"])
    identity = validate.data_identity(target_identity(a.target), tokenizer, kwargs, vocab)
    if a.backend == "recorded":
        print(json.dumps(record([Source.parse(str(a.prompts))], tokenizer, a.out, identity, kwargs)))
        return 0
    prompts = load_prompts(a.prompts)
    validate.check_prompts(prompts, a.decontaminate)
    sampler = Sampler(a.temperature, a.top_p, a.top_k, a.max_new, a.seed)
    backend: generate.Backend
    if a.backend == "openai":
        backend = generate.OpenAIBackend(a.url, a.model or a.target.name, tokenizer, stop)
    elif a.backend == "vllm":
        backend = generate.VllmBackend(a.target, stop, max_model_len=a.max_len)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = load_target(a.target, None, getattr(torch, a.dtype), device)
        backend = generate.TransformersBackend(target, stop, a.slots, a.max_len)
    counts = generate.generate(
        prompts, backend, tokenizer, sampler, a.out, identity, kwargs, retry_failed=a.retry_failed
    )
    print(json.dumps(counts))
    return 0


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def _train(a: argparse.Namespace) -> int:
    from ddtree.training.losses import LossConfig
    from ddtree.training.packing import Shape
    from ddtree.training.pipeline import TrainJob, run_train
    from ddtree.training.schedule import TrainConfig

    config = TrainConfig(
        steps=a.steps, epochs=a.epochs, rows_per_step=a.rows_per_step,
        shape=Shape(a.width, a.rows, a.anchors, a.anchors_per_doc, a.anchor_rate), block=a.block, layers=a.layers,
        layer_ids=_ints(a.layer_ids), mask_token_id=a.mask_token_id, loss=LossConfig(a.loss, budget=a.tree_budget),
        lr=a.lr, seed=a.seed, eval_every=a.eval_every, eval_rows=a.eval_rows, eval_budgets=_ints(a.budgets),
        select=a.select,
        patience=a.patience, save_every=a.save_every, compile=not a.no_compile,
    )  # fmt: skip
    job = TrainJob(
        target=a.target, tokens=a.tokens, out=a.out, config=config, held_out=a.held_out, init=a.init, source=a.source,
        states=a.states, state_budget=int(a.state_budget * 1e9), state_cache=a.state_cache, sharding=a.sharding,
        template_kwargs=_thinking(a.thinking), dtype=a.dtype,
        stop_at=time.time() + 60 * a.minutes if a.minutes else 0.0, prompts=a.prompts, evals=a.decontaminate,
    )  # fmt: skip
    summary = run_train(job)
    print(json.dumps(summary))
    return 0


def _eval(a: argparse.Namespace) -> int:
    from ddtree.training.files import write_json
    from ddtree.training.pipeline import run_eval
    from ddtree.training.report import eval_text

    table = run_eval(a.drafter, a.target, a.tokens, _ints(a.budgets), a.rows, a.dtype)
    print(eval_text(table))
    if a.live:
        from ddtree.training.live import run_live

        table["live"] = run_live(a.drafter, a.target, a.tokens, _ints(a.budgets), a.live, a.dtype)
        for rule, row in table["live"].items():
            gap = f"replay of the same rows {row['replay']:.3f} ({row['difference']:+.1%})"
            print(f"live {rule:12} tau {row['live']:.3f}, {gap}")
    if a.out:
        write_json(a.out, table)
    return 0


def _export(a: argparse.Namespace) -> int:
    from ddtree.training.files import read_json
    from ddtree.training.pipeline import run_export

    table = read_json(a.acceptance) if a.acceptance else None
    for kind, error in run_export(a.run, a.target, a.out, a.format.split(","), table, a.name).items():
        print(f"{kind}: reloaded, logits differ by {error:.1e} at most")
    return 0


def _smoke(a: argparse.Namespace) -> int:
    from ddtree.training.smoke import smoke

    return smoke(a.out)


def main(argv: list[str] | None = None) -> int:
    """Run a stage; named errors go to stderr with exit code 2."""
    args = _parser().parse_args(argv)
    stages = {
        "plan": _plan, "curate": _curate, "generate": _generate, "train": _train, "eval": _eval, "export": _export,
        "smoke": _smoke,
    }  # fmt: skip
    try:
        return stages[args.stage](args)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
