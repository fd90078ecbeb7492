"""Exact best-first draft trees on the device: fixed shapes, batched, no host sync (capturable in a CUDA graph).

A block drafter gives one distribution per position, so a draft is a tuple of tokens and its score the sum of its
log-probabilities. The tree of budget N that maximises the expected accepted length holds the N best prefixes
(DDTree, github.com/liranringel/ddtree, which finds them with a heap). Here a beam does the same without a heap:

* A prefix never scores above its own prefix (log p <= 0, and rounding is monotone), so some optimal set is
  prefix-closed, and a member of depth d has its parent among the N best of depth d-1. A beam of width N loses nothing.
* With beam and tokens both sorted, candidate (b, r) has (b+1)(r+1)-1 candidates at least as good, so only
  (b+1)(r+1) <= N need be scored: about N ln N instead of N * T.
* One stable sort over all depths, depth-major, puts every parent before its children, also when scores are equal.

The order is defined, so that another implementation can be compared slot by slot: within a depth by (score descending,
parent's place in its depth, token rank), over all by (score descending, depth, place in depth).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ddtree.errors import BudgetError

MAX_BUDGET = 1024
NEG_INF = float("-inf")


@dataclass(frozen=True)
class Tree:
    """R draft trees of up to N nodes; slot 0 is the root (the last committed token), parents come before children.

    Slots above ``n_nodes`` are padding: token 0, parent -1, depth 0, score -inf, only their own bit in ``words``. Such
    a slot is a second root that nobody descends from: no other slot attends to it, and the walk never enters it.
    """

    tokens: Tensor  # int64 [R, N+1]
    parents: Tensor  # int32 [R, N+1], -1 at the root
    depth: Tensor  # int32 [R, N+1], 0 at the root; position of a node = context length + depth
    words: Tensor  # int64 [R, N+1, W], W = ceil((N+1)/64): bit j%64 of word j//64 is set iff j is an ancestor or self
    scores: Tensor  # float32 [R, N+1], sum of log-probabilities from the root
    n_nodes: Tensor  # int32 [R], real nodes, root not counted
    max_depth: int  # K, the number of drafted positions (static)

    @property
    def size(self) -> int:
        """N+1: slots of a tree, root included."""
        return self.tokens.shape[1]


def check_budget(budget: int) -> None:
    """Refuse a budget that is no tree (BudgetError)."""
    if budget < 1:
        raise BudgetError("budget-too-small", f"tree budget {budget}", "at least 1 node is needed")
    if budget > MAX_BUDGET:
        raise BudgetError("budget-too-large", f"tree budget {budget} is above {MAX_BUDGET}", "a larger tree never pays")


def n_words(size: int) -> int:
    """int64 words that hold one bit per slot."""
    return (size + 63) // 64


@cache
def _candidates(budget: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(beam place, token rank) pairs that can be among a depth's budget best, in lexicographic order; int64 [C]."""
    pairs = [(b, r) for b in range(budget) for r in range(min(ranks, budget)) if (b + 1) * (r + 1) <= budget]
    places, rank = zip(*pairs, strict=True)
    return torch.tensor(places, device=device), torch.tensor(rank, device=device)


@cache
def self_bits(size: int, device: torch.device) -> Tensor:
    """Each slot's own bit: int64 [size, W]."""
    slot = torch.arange(size, device=device)
    bits = torch.zeros(size, n_words(size), dtype=torch.int64, device=device)
    bits[slot, slot // 64] = torch.ones_like(slot) << (slot % 64)
    return bits


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The count best log-probabilities of each row, sorted, and their ids.

    Args:
        logits: [..., V], any float dtype, unnormalised.
    Returns:
        values float32 [..., T] and ids int64 [..., T], T = min(count, V). NaN counts as -inf.
    """
    raw = logits.float().nan_to_num(nan=NEG_INF, neginf=NEG_INF)
    values, ids = raw.topk(min(count, raw.shape[-1]), dim=-1)
    return (values - raw.logsumexp(-1, keepdim=True)).nan_to_num(nan=NEG_INF, neginf=NEG_INF), ids


def build_tree(logprobs: Tensor | tuple[Tensor, Tensor], root_tokens: Tensor, budget: int) -> Tree:
    """The budget best prefixes of each row's product distribution.

    Args:
        logprobs: log-probabilities [R, K, V], or the best of them, descending: (values [R, K, T], ids [R, K, T]).
            T >= min(budget, V) makes the tree exact; a smaller T restricts it to the T best tokens of a position.
        root_tokens: int [R], the last committed token of each request.
        budget: N, the number of nodes besides the root (static).
    Raises:
        BudgetError: budget outside 1..MAX_BUDGET.
    """
    check_budget(budget)
    if isinstance(logprobs, Tensor):
        logprobs = logprobs.float().topk(min(budget, logprobs.shape[-1]), dim=-1)
    values, ids = logprobs
    R, K, T = values.shape
    device = values.device
    values = values.float().clamp(max=0.0)
    places, ranks = _candidates(budget, T, device)
    width = min(T, budget)

    # Depth 1 hangs from the root alone; short beams are filled with -inf, which sorts last and is no node.
    score = torch.nn.functional.pad(values[:, 0, :width], (0, budget - width), value=NEG_INF)
    token = torch.nn.functional.pad(ids[:, 0, :width], (0, budget - width))
    scores, tokens, parents = [score], [token], [torch.full_like(token, -1)]
    for d in range(1, K):
        best, pick = (score[:, places] + values[:, d, ranks]).sort(dim=1, descending=True, stable=True)
        score, pick = best[:, :budget], pick[:, :budget]
        scores.append(score)
        tokens.append(ids[:, d].gather(1, ranks[pick]))
        parents.append(places[pick] + (d - 1) * budget)

    best, pick = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
    best, pick = best[:, :budget], pick[:, :budget]
    real = best > NEG_INF
    slots = torch.arange(1, budget + 1, device=device).expand(R, -1)
    slot_of = torch.zeros(R, K * budget, dtype=torch.int64, device=device).scatter_(1, pick, slots)
    above = torch.cat(parents, 1).gather(1, pick)
    parent = torch.where(above < 0, 0, slot_of.gather(1, above.clamp(min=0)))

    def with_root(root: Tensor, nodes: Tensor, padding: int) -> Tensor:
        return torch.cat([root[:, None], torch.where(real, nodes, padding)], 1)

    zero = torch.zeros(R, dtype=torch.int32, device=device)
    parent = with_root(zero - 1, parent.int(), -1)
    return Tree(
        tokens=with_root(root_tokens.long(), torch.cat(tokens, 1).gather(1, pick), 0),
        parents=parent,
        depth=with_root(zero, (pick // budget + 1).int(), 0),
        words=ancestor_words(parent, K),
        scores=torch.cat([torch.zeros_like(best[:, :1]), best], 1),
        n_nodes=real.sum(1, dtype=torch.int32),
        max_depth=K,
    )


def chain_tree(drafts: Tensor, root_tokens: Tensor) -> Tree:
    """A chain as a tree: drafts int [R, K] below root_tokens int [R]; scores are 0."""
    R, K = drafts.shape
    slots = torch.arange(K + 1, device=drafts.device, dtype=torch.int32).expand(R, -1)
    return Tree(
        tokens=torch.cat([root_tokens.long()[:, None], drafts.long()], 1),
        parents=slots - 1,
        depth=slots.clone(),
        words=ancestor_words(slots - 1, K),
        scores=torch.zeros(R, K + 1, device=drafts.device),
        n_nodes=torch.full((R,), K, dtype=torch.int32, device=drafts.device),
        max_depth=K,
    )


def ancestor_words(parents: Tensor, max_depth: int) -> Tensor:
    """Ancestor-or-self bit words of any forest, by pointer doubling: ceil(log2(max_depth + 1)) steps.

    Args:
        parents: int [R, M], -1 at roots.
    Returns:
        int64 [R, M, W], W = ceil(M/64).
    """
    R, M = parents.shape
    bits = self_bits(M, parents.device)
    # One more slot, without bits and its own parent, stands above every root.
    words = torch.nn.functional.pad(bits, (0, 0, 0, 1)).expand(R, -1, -1)
    jump = torch.where(parents < 0, M, parents).long()
    jump = torch.nn.functional.pad(jump, (0, 1), value=M)
    for _ in range(max_depth.bit_length()):
        words = words | words.gather(1, jump[..., None].expand(-1, -1, words.shape[-1]))
        jump = jump.gather(1, jump)
    return words[:, :M].contiguous()


def dense_mask(words: Tensor) -> Tensor:
    """bool [R, M, M] from ancestor words int64 [R, M, W]: (i, j) is True iff j is an ancestor of i, or i itself."""
    slot = torch.arange(words.shape[1], device=words.device)
    return ((words[:, :, slot // 64] >> (slot % 64)) & 1).bool()
