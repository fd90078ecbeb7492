"""What is measured, defined once: tau, acceptance per position, exactness, step time, and replay.

tau is the mean number of tokens that a round commits, **bonus included**: accepted drafts + 1. A round that the end of
the response cuts short counts with the tokens that were kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ddtree.drafter import Drafter
from ddtree.tree import build_tree, chain_tree
from ddtree.walk import walk

CHAIN = 0  # a budget of 0 stands for the chain of the drafter's best tokens


@dataclass(frozen=True)
class Acceptance:
    """What rounds accepted. ``accepted[a]`` rounds accepted a drafts; tokens were committed, bonus included."""

    accepted: tuple[int, ...]
    tokens: int

    @property
    def rounds(self) -> int:
        """Rounds in all."""
        return sum(self.accepted)

    @property
    def tau(self) -> float:
        """Tokens per round, bonus included."""
        return self.tokens / max(self.rounds, 1)

    @property
    def reached(self) -> list[float]:
        """Share of rounds that accepted at least the drafts up to each position (position 1 first)."""
        alive = [sum(self.accepted[d:]) for d in range(1, len(self.accepted))]
        return [a / max(self.rounds, 1) for a in alive]

    @property
    def conditional(self) -> list[float]:
        """Share of rounds that accepted position d among those that accepted position d - 1."""
        reached = [1.0, *self.reached]
        return [b / a if a else 0.0 for a, b in pairwise(reached)]

    def __add__(self, other: Acceptance) -> Acceptance:
        longest = max(len(self.accepted), len(other.accepted))
        padded = [x + (0,) * (longest - len(x)) for x in (self.accepted, other.accepted)]
        return Acceptance(tuple(a + b for a, b in zip(*padded, strict=True)), self.tokens + other.tokens)


def acceptance(counts: Iterable[int], tokens: int, drafts: int) -> Acceptance:
    """Acceptance from accepted drafts per round (0..drafts) and the tokens kept of them all."""
    accepted = [0] * (drafts + 1)
    for count in counts:
        accepted[count] += 1
    return Acceptance(tuple(accepted), tokens)


@dataclass(frozen=True)
class Document:
    """A recorded response: ids int64 [S] of prompt and response, the target's tapped states [S, m * H]."""

    ids: Tensor
    prompt_length: int
    features: Tensor


@torch.no_grad()
def replay(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    documents: Iterable[Document],
    budgets: Sequence[int],
    anchors_at_once: int = 256,
    logits_dtype: torch.dtype = torch.float32,
) -> dict[int, Acceptance]:
    """Acceptance that decoding these responses would have had, without running the target.

    Greedy speculative decoding reproduces the target's greedy response, so its rounds follow from the record: the walk
    takes the recorded token at every depth. Rounds start at the first response token, as a live run's do.

    Args:
        embedding, head: the target's, [V, H].
        budgets: tree budgets; CHAIN (0) is the chain.
        logits_dtype: of hidden and head for the draft's logits; float32 makes ties rare.
    Returns:
        Acceptance by budget.
    """
    drafts, head = drafter.config.drafts, head.to(logits_dtype)
    total = {b: Acceptance((0,) * (drafts + 1), 0) for b in budgets}
    for document in documents:
        first, end = document.prompt_length, len(document.ids)
        if end - first < 2:
            continue
        device = document.features.device
        ids = torch.nn.functional.pad(document.ids.to(device), (0, drafts + 1), value=-1)
        parts: dict[int, list[Tensor]] = {b: [] for b in budgets}
        for start in range(first, end - 1, anchors_at_once):
            anchors = torch.arange(start, min(start + anchors_at_once, end - 1), device=device)
            hidden = drafter(document.features[None], ids[anchors][None], anchors[None], embedding)[0]
            # With the target's choice at depth d being the token recorded there, a walk is a replayed round.
            truth = ids[anchors[:, None] + torch.arange(1, drafts + 2, device=device)]
            values, tokens = drafter.top(hidden.to(logits_dtype), head, max(*budgets, 1))
            for budget in budgets:
                if budget == CHAIN:
                    tree = chain_tree(tokens[:, :, 0], ids[anchors])
                else:
                    tree = build_tree((values[:, :, :budget], tokens[:, :, :budget]), ids[anchors], budget)
                parts[budget].append(walk(tree, truth.gather(1, tree.depth.long())).count)
        for budget in budgets:
            counts = torch.cat(parts[budget]).tolist()
            at, rounds = first, []
            while at < end - 1:
                rounds.append(counts[at - first])
                at += counts[at - first] + 1
            total[budget] = total[budget] + acceptance(rounds, end - 1 - first, drafts)
    return total


@dataclass(frozen=True)
class Divergence:
    """Where an output leaves plain decoding's, and how close the plain choice was."""

    prompt: int
    position: int  # response token index
    gap: float  # plain decoding's top-2 logit gap there

    def is_near_tie(self, noise: float) -> bool:
        """Whether rounding alone (see logit_noise) can have swapped the two best tokens."""
        return self.gap <= noise


def divergences(
    plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]]
) -> list[Divergence]:
    """First difference of each output from plain decoding; gaps hold plain decoding's top-2 gap per response token."""
    found = []
    for i, (a, b) in enumerate(zip(plain, other, strict=True)):
        at = next((p for p, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None and len(a) != len(b):
            at = min(len(a), len(b))
        if at is not None:
            found.append(Divergence(i, at, gaps[i][min(at, len(gaps[i]) - 1)]))
    return found


def logit_noise(forward: Callable[[Tensor, int], Tensor], tokens: Tensor, width: int) -> float:
    """Largest change of a logit between forwards of 1 and of ``width`` tokens at a time: rounding, no tree involved.

    Args:
        forward: (tokens int64 [S], tokens per step) -> logits [S, V] of a plain causal pass.
    """
    one, many = forward(tokens, 1).float(), forward(tokens, width).float()
    return float((one - many).abs().max())


def milliseconds(step: Callable[[], object], repeats: int, device: torch.device, warmup: int = 3) -> float:
    """Mean wall time of a step in ms, the device drained before and after."""

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warmup):
        step()
    drain()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    drain()
    return (time.perf_counter() - start) / repeats * 1e3
