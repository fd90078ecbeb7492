"""Generation: prompts in, tokens out, in one of four modes. The host reads one small tensor per round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.drafter import Drafter
from ddtree.errors import RequestError
from ddtree.measure import CHAIN, Acceptance, acceptance
from ddtree.standalone.auto import Auto
from ddtree.standalone.graphs import Graphs, why_no_graphs
from ddtree.standalone.model import Target
from ddtree.standalone.ops import PLAIN, Ops
from ddtree.standalone.packed import PackedDrafter
from ddtree.standalone.rounds import (
    PLAIN_DECODE,
    Parts,
    Sampling,
    State,
    copy_prompt,
    new_state,
    prefill,
    unpack_results,
)
from ddtree.tree import check_budget
from ddtree.walk import sample_target

MODES = ("ar", "chain", "tree", "auto")
AUTO_BUDGETS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Request:
    """What to generate."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()  # the token is kept and ends the response
    stop_strings: tuple[str, ...] = ()  # the token that completes one is the last; needs the engine's ``decode``


@dataclass
class Response:
    """What came out. ``counts`` are accepted drafts per round, ``budgets`` what each round ran."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""  # "eos", "stop", "length" (max_new_tokens) or "context"
    counts: list[int] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # top-2 logit gap at every token, where asked for

    def acceptance(self, drafts: int) -> Acceptance:
        """The rounds' acceptance; the first token comes from the prompt's own forward and is no round's."""
        return acceptance(self.counts, max(len(self.tokens) - 1, 0), drafts)


# on_tokens(request index, new tokens): called as soon as the host knows them.
OnTokens = Callable[[int, list[int]], None]


class Engine:
    """A target, a drafter and buffers for R requests at a time.

    Args:
        context: longest text (prompt and response) in tokens; default what the target was made for.
        decode: token ids -> text, needed for stop strings.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        ops: Ops = PLAIN,
        context: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.target, self.ops, self.decode = target, ops, decode
        self.drafter: Drafter | PackedDrafter | None = drafter
        if drafter is not None and ops is not PLAIN:
            self.drafter = PackedDrafter(drafter, ops)
        self.context = min(context or target.config.context, target.config.context)
        self.auto = Auto(AUTO_BUDGETS)
        self._told = False
        self._state: State | None = None
        self._graphs: dict[bool, Graphs] = {}  # by whether the drafter takes part

    @property
    def drafts(self) -> int:
        """Tokens drafted per block; 0 without a drafter."""
        return self.drafter.config.drafts if self.drafter else 0

    def state_for(self, requests: int, rows: int) -> State:
        """Buffers for R requests of ``rows`` rows; kept and reused while they are large enough."""
        old = self._state
        if old is None or len(old.lengths) != requests or old.rows < rows:
            self._state, self._graphs = None, {}
            old = self._state = new_state(Parts(self.target, self.drafter, self.ops), requests, rows)
        return old

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        mode: str = "tree",
        budget: int = 64,
        sampling: Sampling = Sampling(),
        generator: torch.Generator | None = None,
        on_tokens: OnTokens | None = None,
        record_gaps: bool = False,
    ) -> list[Response]:
        """Generate for all requests at once, in lockstep rounds.

        Raises:
            RequestError: unknown-mode, no-drafter, empty-prompt, prompt-too-long, token-outside-vocabulary,
                bad-sampling, no-decode.
            BudgetError: a tree budget that is no tree.
        """
        self.check(requests, mode, budget, sampling)
        plain = mode == "ar"
        parts = Parts(self.target, None if plain else self.drafter, self.ops)
        run = {"ar": PLAIN_DECODE, "chain": CHAIN, "tree": budget, "auto": max(AUTO_BUDGETS)}[mode]
        longest = max(min(len(r.prompt) + r.max_new_tokens, self.context) for r in requests)
        slots = max(run, self.drafts, 0) + 1
        state = self.state_for(len(requests), longest + slots + self.drafts + 1)
        responses = [Response() for _ in requests]
        graphs = self._graphs.setdefault(plain, Graphs(parts, state, why_no_graphs(self.target)))
        if graphs.reason and self.target.home.type == "cuda" and not self._told:
            self._told = True
            print(f"ddtree: rounds run without CUDA graphs: {graphs.reason}", file=sys.stderr)
        for b in (PLAIN_DECODE, CHAIN, *AUTO_BUDGETS) if mode == "auto" else (run,):
            graphs.prepare(b, sampling)
        logits = self.run_prompts(parts, state, requests)
        state.roots.copy_(sample_target(logits, sampling.temperature, sampling.top_k, sampling.top_p, generator))
        gaps = _gaps(logits) if record_gaps else None
        active = [
            self.keep(r, requests[r], responses[r], [token], gaps and [gaps[r]], on_tokens)
            for r, token in enumerate(state.roots.tolist())
        ]
        state.active.copy_(torch.tensor(active))
        while not all(x.finish for x in responses):
            began = time.perf_counter()
            chosen = self.auto.choose() if mode == "auto" else run
            out, logits = graphs.run(chosen, sampling, generator)
            results = unpack_results(out.tolist())
            gaps = _gaps(logits) if record_gaps else None
            seen, active = [], [False] * len(results)
            for r, result in enumerate(results):
                if responses[r].finish:
                    continue
                seen.append(result)
                responses[r].counts.append(result.count)
                responses[r].budgets.append(chosen)
                active[r] = self.keep(r, requests[r], responses[r], result.tokens, gaps and [gaps[r]], on_tokens)
            if len(seen) > sum(active):
                state.active.copy_(torch.tensor(active))
            if mode == "auto":
                self.auto.learn(chosen, time.perf_counter() - began, seen)
        return responses

    def run_prompts(self, parts: Parts, state: State, requests: Sequence[Request]) -> Tensor:
        """Run every distinct prompt once; returns the logits after each request's prompt [R, V]."""
        same: dict[tuple[int, ...], list[int]] = {}
        for r, request in enumerate(requests):
            same.setdefault(request.prompt, []).append(r)
        rows: dict[int, Tensor] = {}
        for prompt, (first, *others) in same.items():
            logits = prefill(parts, state, first, torch.tensor(prompt, device=self.target.home))
            if others:
                copy_prompt(state, first, others, len(prompt))
            rows |= dict.fromkeys((first, *others), logits)
        return torch.stack([rows[r] for r in range(len(requests))])

    def keep(
        self,
        index: int,
        request: Request,
        response: Response,
        tokens: list[int],
        gaps: list[float] | None,
        on_tokens: OnTokens | None,
    ) -> bool:
        """Append a round's tokens up to the first reason to stop; returns whether there is none."""
        room = min(request.max_new_tokens, self.context - len(request.prompt))
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            response.tokens.append(token)
            if token in request.stop_tokens:
                response.finish = "eos"
            elif request.stop_strings and self.stopped(request, response.tokens):
                response.finish = "stop"
            elif len(response.tokens) >= room:
                response.finish = "length" if room == request.max_new_tokens else "context"
            if response.finish:
                break
        response.gaps += (gaps or [])[: len(kept)]
        if on_tokens is not None:
            on_tokens(index, kept)
        return not response.finish

    def stopped(self, request: Request, tokens: list[int]) -> bool:
        """Whether the last token completed a stop string; only a tail long enough to hold one is decoded."""
        assert self.decode is not None
        tail = self.decode(tokens[-max(len(s) for s in request.stop_strings) - 8 :])
        return any(s in tail for s in request.stop_strings)

    def check(self, requests: Sequence[Request], mode: str, budget: int, sampling: Sampling) -> None:
        """Refuse what cannot be served; see generate."""
        vocabulary = self.target.config.vocab_size
        if mode not in MODES:
            raise RequestError("unknown-mode", f"mode {mode!r}", f"one of {', '.join(MODES)}")
        if mode != "ar" and self.drafter is None:
            raise RequestError("no-drafter", f"mode {mode} needs a drafter", "give one, or use mode ar")
        if mode == "tree":
            check_budget(budget)
        if sampling.temperature < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
            raise RequestError("bad-sampling", f"{sampling}", "temperature >= 0, top_k >= 0, 0 < top_p <= 1")
        for i, r in enumerate(requests):
            if not r.prompt:
                raise RequestError("empty-prompt", f"prompt {i} has no token")
            if r.max_new_tokens < 1:
                raise RequestError("bad-length", f"prompt {i}: max_new_tokens {r.max_new_tokens}")
            if len(r.prompt) >= self.context:
                raise RequestError(
                    "prompt-too-long", f"prompt {i} has {len(r.prompt)} tokens, the context {self.context}"
                )
            if not 0 <= min(r.prompt) <= max(r.prompt) < vocabulary:
                raise RequestError(
                    "token-outside-vocabulary",
                    f"prompt {i} has token {max(r.prompt)}, the target's vocabulary {vocabulary}",
                    "is this the target's tokenizer?",
                )
            if r.stop_strings and self.decode is None:
                raise RequestError("no-decode", f"prompt {i} has stop strings, but the engine no tokenizer")


def _gaps(logits: Tensor) -> list[float]:
    """Gap between the two best logits of each row [R, V]."""
    best = logits.float().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()
