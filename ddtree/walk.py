"""The accept walk, target sampling, and the indices that a commit needs. Device only, fixed shapes, no host sync.

The walk is lossless: at every node the target chooses one token, greedily or by sampling, and the walk descends to
the child that carries it. The first choice that no child carries is the bonus. Each committed token is the target's
own choice given its prefix: at T = 0 the output is plain decoding's, at T > 0 its distribution is the target's.
(Sampling the target at every node and walking is SpecInfer's naive sampling, arXiv 2305.09781; exact for any drafter.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree import NEG_INF, Tree, self_bits


@dataclass(frozen=True)
class Path:
    """The accepted path of each of R requests; D = the tree's max_depth."""

    nodes: Tensor  # int32 [R, D+1]: slots from the root down, nodes[:, 0] = 0, -1 after the last accepted
    count: Tensor  # int32 [R]: accepted drafts, 0..D; count + 1 tokens are committed
    bonus: Tensor  # int64 [R]: the target's own token after the path, root of the next round
    tokens: Tensor  # int64 [R, D+1]: accepted drafts, then the bonus, then -1

    @property
    def last(self) -> Tensor:
        """Slot of the last accepted node (0 when nothing was accepted): int64 [R]."""
        return self.nodes.gather(1, self.count.long()[:, None])[:, 0].long()


def walk(tree: Tree, chosen: Tensor) -> Path:
    """Follow the target's choice from the root for as long as a child carries it.

    Args:
        chosen: int64 [R, N+1], the target's token after every slot: its argmax, or a sample (see sample_target).
            Siblings carry distinct tokens, as build_tree makes them.
    """
    R, M = tree.tokens.shape
    device = tree.tokens.device
    slots = torch.arange(M, device=device)
    bits = self_bits(M, device)
    match = tree.tokens == chosen.gather(1, tree.parents.clamp(min=0).long())
    match = match & (tree.parents >= 0) | (slots == 0)
    # A slot is accepted iff no ancestor-or-self failed; bits are distinct, so a sum is an or.
    failed = torch.where(match[..., None], 0, bits).sum(1, dtype=torch.int64)
    accepted = ((tree.words & failed[:, None]) == 0).all(-1)

    D = tree.max_depth
    depth = tree.depth.long()
    where = torch.where(accepted, depth, D + 1)  # one accepted slot per depth; the rest lands in a column cut off below
    nodes = torch.full((R, D + 2), -1, dtype=torch.int32, device=device)
    nodes = nodes.scatter(1, where, slots.int().expand(R, -1))[:, : D + 1]
    count = (nodes >= 0).sum(1, dtype=torch.int32) - 1
    last = nodes.gather(1, count.long()[:, None]).long()
    bonus = chosen.gather(1, last)[:, 0]
    at = torch.arange(D + 1, device=device)
    below = torch.cat([nodes[:, 1:], torch.full_like(nodes[:, :1], -1)], 1).long()
    drafts = torch.where(below >= 0, tree.tokens.gather(1, below.clamp(min=0)), -1)
    return Path(nodes, count, bonus, torch.where(at == count[:, None], bonus[:, None], drafts))


def walk_greedy(tree: Tree, target_argmax: Tensor) -> Path:
    """Greedy acceptance: ``walk`` over the target's argmax int64 [R, N+1]."""
    return walk(tree, target_argmax)


def walk_sampled(tree: Tree, target_sample: Tensor) -> Path:
    """Lossless sampling: ``walk`` over one sample of the target per slot, int64 [R, N+1], drawn by sample_target."""
    return walk(tree, target_sample)


def filter_logits(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits of the distribution that is sampled: temperature, then top-k, then top-p (the order of transformers).

    Args:
        logits: [..., V]. temperature: > 0. top_k: 0 keeps all; ties with the k-th are kept. top_p: 1 keeps all; the
            smallest set of tokens whose probability reaches top_p is kept, the best token always.
    Returns:
        float32 [..., V], -inf where a token cannot be sampled.
    """
    scaled = logits.float() / temperature
    if 0 < top_k < scaled.shape[-1]:
        kth = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, NEG_INF)
    if top_p < 1.0:
        ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
        mass = ranked.softmax(-1)
        drop = mass.cumsum(-1) - mass >= top_p
        drop[..., 0] = False
        scaled = scaled.masked_fill(drop.scatter(-1, ids, drop), NEG_INF)
    return scaled


def sample_target(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """One token per row: argmax at temperature 0, else a Gumbel-max sample of the filtered distribution.

    Args:
        logits: [..., V]; every row draws its own noise, so slots of a tree are sampled independently.
        noise: uniform [0, 1) of the logits' shape, to be used instead of drawing it (tests, replay).
    Returns:
        int64 [...].
    """
    if temperature <= 0.0:
        return logits.argmax(-1)
    kept = filter_logits(logits, temperature, top_k, top_p)
    if noise is None:
        noise = torch.rand(kept.shape, device=kept.device, dtype=torch.float32, generator=generator)
    # -log(-log u); u = 0 would give -inf for a token that may be sampled, so keep it off zero and one.
    tiny = torch.finfo(torch.float32).tiny
    gumbel = -(-(noise.clamp(tiny, 1.0 - 2.0**-24)).log()).log()
    return (kept + gumbel).argmax(-1)


def commit_rows(path: Path, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Which cache rows move where when a path is committed.

    Verification writes slot i of the tree at row ``lengths + i``; the path's rows move to ``lengths + 0..count``.
    Entries past the path move a row onto itself. Read all sources before writing: a row can be both.

    Args:
        lengths: int64 [R], committed rows before this round (the root's own row not counted).
    Returns:
        source int64 [R, D+1], destination int64 [R, D+1] (row indices).
    """
    steps = torch.arange(path.nodes.shape[1], device=lengths.device)
    destination = lengths.long()[:, None] + steps
    source = torch.where(path.nodes >= 0, lengths.long()[:, None] + path.nodes, destination)
    return source, destination


def committed_lengths(path: Path, lengths: Tensor) -> Tensor:
    """lengths [R] after the root and the accepted drafts were committed: the bonus is not in the cache yet."""
    return lengths + path.count + 1
