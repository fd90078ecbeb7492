"""Measurements: modes side by side on the same prompts with exactness, and step cost by stage."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree.measure import CHAIN, Acceptance, Divergence, divergences, milliseconds
from ddtree.standalone.engine import Engine, Request, Response
from ddtree.standalone.graphs import why_no_graphs
from ddtree.standalone.rounds import (
    PLAIN_DECODE,
    Parts,
    Sampling,
    accept,
    candidates,
    commit,
    draft,
    extend,
    new_state,
    pack_result,
    propose,
    run_round,
    verify,
)
from ddtree.tree import chain_tree
from ddtree.walk import Path


@dataclass
class ModeResult:
    """One mode on all prompts."""

    mode: str
    budget: int | None
    tokens: int
    seconds: float
    tau: float  # over all rounds
    tau_by_prompt: list[float]
    conditional: list[float]
    divergences: int = 0
    largest_gap: float = 0.0
    peak_bytes: int = 0
    budgets_used: dict[int, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time, prompts included."""
        return self.tokens / self.seconds


def label(budget: int) -> str:
    """Name of a round's kind."""
    return {PLAIN_DECODE: "ar", CHAIN: "chain"}.get(budget, f"tree-{budget}")


def run_modes(
    engine: Engine,
    requests: Sequence[Request],
    budgets: Sequence[int],
    auto: bool,
    batch: int,
    say: Callable[[str], None],
    sampling: Sampling = Sampling(),
) -> tuple[list[ModeResult], list[Divergence]]:
    """Plain decoding, the chain, trees of these budgets and, if asked for, auto; each after one unmeasured warm-up.

    Returns:
        results, and all divergences from plain decoding (greedy only).
    """
    plain: list[Response] = []
    results, found = [], []
    plan: list[tuple[str, int | None]] = [("ar", None), ("chain", None), *(("tree", b) for b in budgets)]
    for mode, budget in plan + ([("auto", None)] if auto else []):
        warm = [Request(r.prompt, 8, r.stop_tokens) for r in requests[:batch]]
        rows = max(len(r.prompt) + r.max_new_tokens for r in requests)
        engine.state_for(min(batch, len(requests)), min(rows, engine.context) + 4 * max((*budgets, 128)))
        engine.generate(warm, mode, budget or 0, sampling)
        _reset_peak(engine)
        out: list[Response] = []
        began = time.perf_counter()
        for start in range(0, len(requests), batch):
            group = list(requests[start : start + batch])
            missing = min(batch, len(requests)) - len(group)
            group += [Request(group[0].prompt, 1)] * missing  # keep the buffers' shape; not counted
            part = engine.generate(group, mode, budget or 0, sampling, record_gaps=mode == "ar")
            out += part[: len(part) - missing]
        seconds = time.perf_counter() - began
        total = sum((r.acceptance(engine.drafts) for r in out), Acceptance((0,), 0))
        result = ModeResult(
            mode=mode if budget is None else f"tree-{budget}",
            budget=budget,
            tokens=sum(len(r.tokens) for r in out),
            seconds=seconds,
            tau=total.tau,
            tau_by_prompt=[round(r.acceptance(engine.drafts).tau, 4) for r in out],
            conditional=[round(x, 4) for x in total.conditional],
            peak_bytes=_peak(engine),
        )
        for r in out:
            for b in r.budgets:
                result.budgets_used[b] = result.budgets_used.get(b, 0) + 1
        if mode == "ar":
            plain = out
        elif sampling.temperature == 0:
            these = divergences([r.tokens for r in plain], [r.tokens for r in out], [r.gaps for r in plain])
            result.divergences, result.largest_gap = len(these), max((d.gap for d in these), default=0.0)
            found += these
        results.append(result)
        say(
            f"{result.mode:9s} {result.tokens:7d} tokens {seconds:8.2f} s {result.tokens_per_second:9.1f} tok/s  "
            f"tau {result.tau:.3f}  different from ar: {result.divergences} of {len(out)}"
            + (f"  peak {result.peak_bytes / 1e9:.2f} GB" if result.peak_bytes else "")
        )
    return results, found


def teacher_logits(engine: Engine, tokens: Tensor, width: int) -> Tensor:
    """Target logits float32 [R, S, V] of tokens int64 [R, S], run ``width`` at a time as plain chains."""
    parts, (requests, length) = Parts(engine.target, None, engine.ops), tokens.shape
    state = new_state(parts, requests, length + width)
    found = []
    with torch.no_grad():
        for start in range(0, length, width):
            part = tokens[:, start : start + width]
            tree = chain_tree(part[:, 1:], part[:, 0])
            logits, _ = verify(parts, state, tree)
            everything = Path(
                nodes=torch.arange(part.shape[1], dtype=torch.int32, device=part.device).expand(requests, -1),
                count=torch.full((requests,), part.shape[1] - 1, dtype=torch.int32, device=part.device),
                bonus=part[:, 0],
                tokens=part,
            )
            commit(parts, state, everything)
            found.append(logits.float())
    return torch.cat(found, 1)


def rounding_noise(engine: Engine, texts: Sequence[Sequence[int]], widths: Sequence[int], length: int = 128) -> float:
    """Largest change of a logit between 1-token and N-token forwards of the same texts, no tree involved."""
    length = min(length, *(len(t) for t in texts))
    tokens = torch.tensor([list(t[:length]) for t in texts], device=engine.target.home)
    one = teacher_logits(engine, tokens, 1)
    return max(float((teacher_logits(engine, tokens, w) - one).abs().max()) for w in widths)


def _reset_peak(engine: Engine) -> None:
    for d in set(engine.target.placement):
        if d.type == "cuda":
            torch.cuda.reset_peak_memory_stats(d)


def _peak(engine: Engine) -> int:
    return sum(torch.cuda.max_memory_allocated(d) for d in set(engine.target.placement) if d.type == "cuda")


@dataclass
class StepCost:
    """Milliseconds of a round and of its stages, each measured alone (as a graph of its own where there are graphs)."""

    kind: str
    round_ms: float
    stages: dict[str, float]
    state_bytes: int


@torch.no_grad()
def step_cost(engine: Engine, budget: int, context: int, repeats: int = 20, stages: bool = True) -> StepCost:
    """Cost of a round at this context length, batch 1. Lengths are set back before every round."""
    plain = budget == PLAIN_DECODE
    parts = Parts(engine.target, None if plain else engine.drafter, engine.ops)
    state = engine.state_for(1, context + 2 * (max(budget, engine.drafts) + 1))
    device, sampling = engine.target.home, Sampling()

    def reset() -> None:
        state.lengths.fill_(context)

    def whole() -> None:
        reset()
        run_round(parts, state, budget, sampling)

    reset()
    hidden = None if plain else draft(parts, state)
    offer = candidates(parts, hidden, budget)
    tree, best = propose(parts, state, offer, budget)
    logits, tapped = verify(parts, state, tree)
    path = accept(parts, tree, logits, sampling, None)

    def draft_all() -> None:
        candidates(parts, draft(parts, state), budget)

    def commit_again() -> None:
        reset()
        commit(parts, state, path)
        pack_result(path, best)

    def extend_again() -> None:
        reset()
        extend(parts, state, path, tapped)

    steps: dict[str, Callable[[], object]] = {
        "draft": draft_all,
        "build": lambda: propose(parts, state, offer, budget),
        "verify": lambda: verify(parts, state, tree),
        "accept": lambda: accept(parts, tree, logits, sampling, None),
        "commit": commit_again,
        "extend": extend_again,
    }
    graphs = not why_no_graphs(engine.target)
    timed = {}
    if stages:
        for name, step in steps.items():
            if not (plain and name in ("draft", "build", "extend")):
                reset()
                timed[name] = milliseconds(_captured(step) if graphs else step, repeats, device)
    reset()
    whole_ms = milliseconds(_captured(whole) if graphs else whole, repeats, device)
    return StepCost(label(budget), whole_ms, timed, state.bytes)


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def weight_bytes(engine: Engine, budget: int) -> int:
    """Bytes that a round must read at least once: all weights but the embedding, and the drafter's unless plain."""
    seen = {p.data_ptr(): p.numel() * p.element_size() for n, p in engine.target.named_parameters() if n != "embed"}
    total = sum(seen.values())
    if budget != PLAIN_DECODE and engine.drafter is not None:
        total += engine.drafter.bytes()
        total += engine.target.head.numel() * engine.target.head.element_size()  # the head runs for the draft, too
    return total


def machine() -> dict[str, str]:
    """Where this was measured."""
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m ddtree.standalone", *sys.argv[1:]]),
    }


def as_json(results: Sequence[ModeResult | StepCost], **more: Any) -> dict[str, Any]:
    """The bench's JSON."""
    return {"machine": machine(), "results": [asdict(r) for r in results], **more}
