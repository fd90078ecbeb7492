"""A round of tree speculative decoding as functions on device tensors: draft, propose, verify, accept, extend, commit.

Nothing here reads a tensor on the host and no shape depends on data, so a whole round can be captured in a CUDA graph.
Plain decoding is a round whose tree is its root; DFlash's chain is a round whose tree is a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree import gdn
from ddtree.drafter import Drafter, block_words
from ddtree.kvcache import Attend, new_cache, plain_attend
from ddtree.measure import CHAIN
from ddtree.standalone.config import LINEAR
from ddtree.standalone.model import PREFILL_CHUNK, LayerState, Step, Target
from ddtree.standalone.ops import Ops
from ddtree.standalone.packed import PackedDrafter
from ddtree.tree import Tree, chain_tree
from ddtree.walk import Path, commit_rows, sample_target

PLAIN_DECODE = -1  # budget of a round that drafts nothing; CHAIN (0) drafts a chain, N > 0 a tree of N nodes
PROMPT_CHUNK = 512  # prompt tokens per forward


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass
class State:
    """Static buffers of R requests. ``lengths`` rows of every cache are committed; the root is not in them yet."""

    lengths: Tensor  # int64 [R]
    roots: Tensor  # int64 [R], the last token of each request
    active: Tensor  # bool [R]; other requests stay where they are
    layers: list[LayerState]
    caches: list[Tensor]  # keys and values of a device's attention layers, [layers, 2, R, rows, kv_heads, hd]
    draft_cache: Tensor | None
    rows: int

    @property
    def bytes(self) -> int:
        """Bytes of all buffers but the stashes."""
        tensors = [*self.caches, *(t for s in self.layers for t in (s.conv, s.delta) if t is not None)]
        tensors += [self.draft_cache] if self.draft_cache is not None else []
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class Parts:
    """What rounds run on."""

    target: Target
    drafter: Drafter | PackedDrafter | None
    ops: Ops

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output the drafter reads."""
        return self.drafter.config.target_layer_ids if self.drafter else ()


def new_state(parts: Parts, requests: int, rows: int) -> State:
    """Empty buffers for R requests of up to ``rows`` cache rows each, the tree's own slots included."""
    c, placement, dtype = parts.target.config, parts.target.placement, parts.target.embed.dtype
    layers, caches = [LayerState() for _ in range(c.layers)], []
    for device in dict.fromkeys(placement):
        here = [i for i, d in enumerate(placement) if d == device]
        attention = [i for i in here if c.layer_types[i] != LINEAR]
        cache = new_cache(len(attention), requests, rows, c.kv_heads, c.head_dim, dtype, device)
        caches.append(cache)
        for place, i in enumerate(attention):
            layers[i].kv = cache[place]
        for i in (i for i in here if c.layer_types[i] == LINEAR):
            d = c.delta
            assert d is not None
            layers[i].conv = torch.zeros(requests, d.channels, d.kernel - 1, dtype=dtype, device=device)
            wide = torch.float64 if dtype == torch.float64 else torch.float32  # bfloat16 states drift
            layers[i].delta = torch.zeros(requests, d.value_heads, d.key_dim, d.value_dim, dtype=wide, device=device)
    home, draft_cache = parts.target.home, None
    if parts.drafter is not None:
        k = parts.drafter.config
        draft_dtype = parts.drafter.dtype
        draft_cache = new_cache(k.num_layers, requests, rows, k.num_kv_heads, k.head_dim, draft_dtype, home)
    return State(
        lengths=torch.zeros(requests, dtype=torch.int64, device=home),
        roots=torch.zeros(requests, dtype=torch.int64, device=home),
        active=torch.ones(requests, dtype=torch.bool, device=home),
        layers=layers,
        caches=caches,
        draft_cache=draft_cache,
        rows=rows,
    )


def make_steps(
    parts: Parts, lengths: Tensor, tree: Tree, rows: int, prefill: bool = False
) -> dict[torch.device, Step]:
    """Per device, what all its layers share: rows, rotations, visibility, convolution windows."""
    target, kernel = parts.target, parts.target.config.delta.kernel if parts.target.config.delta else 0
    slots = torch.arange(tree.size, device=lengths.device)
    cos, sin = target.rope(lengths[:, None] + tree.depth)
    write = lengths[:, None] + slots
    windows = gdn.conv_windows(tree.parents[:, :PREFILL_CHUNK] if prefill else tree.parents, kernel) if kernel else None
    steps = {}
    for d in dict.fromkeys(target.placement):
        words, here = tree.words.to(d), lengths.to(d)
        steps[d] = Step(
            rows=write.to(d),
            cos=cos.to(d),
            sin=sin.to(d),
            words=words,
            # Long chains of a prompt are no case for the kernels, which are made for few queries.
            attend=(plain_attend if prefill else parts.ops.attend)(here, words, rows, tree.depth.to(d)),
            windows=None if windows is None else windows.to(d),
            prefill=prefill,
        )
    return steps


def prefill(parts: Parts, state: State, request: int, prompt: Tensor) -> Tensor:
    """Run a prompt int64 [P] of one request from an empty state; returns its last logits [V]. Sets its length."""
    one = slice(request, request + 1)
    layers = []
    for s in state.layers:
        if s.kv is not None:
            layers.append(LayerState(kv=s.kv[:, one]))
        else:
            assert s.conv is not None and s.delta is not None
            s.conv[one].zero_()
            s.delta[one].zero_()
            layers.append(LayerState(conv=s.conv[one], delta=s.delta[one]))
    hidden = prompt.new_zeros(0)
    for start in range(0, len(prompt), PROMPT_CHUNK):
        tokens = prompt[None, start : start + PROMPT_CHUNK]
        lengths = torch.full((1,), start, dtype=torch.int64, device=prompt.device)
        chain = chain_tree(tokens[:, 1:], tokens[:, 0])
        steps = make_steps(parts, lengths, chain, state.rows, prefill=True)
        hidden, tapped = parts.target(tokens, steps, layers, parts.taps, parts.ops)
        if parts.drafter is not None and state.draft_cache is not None:
            rows = lengths[:, None] + torch.arange(tokens.shape[1], device=prompt.device)
            parts.drafter.extend(state.draft_cache[:, :, one], tapped, rows)
    state.lengths[request] = len(prompt)
    return parts.target.logits(hidden[0, -1])


def copy_prompt(state: State, source: int, to: list[int], length: int) -> None:
    """Give other requests the state of one whose prompt of ``length`` tokens has just been run."""
    for cache in [*state.caches, *([] if state.draft_cache is None else [state.draft_cache])]:
        cache[:, :, to, :length] = cache[:, :, source : source + 1, :length]
    for layer in state.layers:
        for t in (layer.conv, layer.delta):
            if t is not None:
                t[to] = t[source : source + 1]
    state.lengths[to] = length


def draft(parts: Parts, state: State) -> Tensor:
    """The drafter's hidden states of one block per request: [R, B, H]."""
    d, home = parts.drafter, state.lengths.device
    assert d is not None and state.draft_cache is not None
    requests, B = len(state.lengths), d.config.block_size
    depth = torch.arange(B, device=home).expand(requests, -1)

    def attend(causal: bool) -> Attend:
        return parts.ops.attend(state.lengths, block_words(B, causal, requests, home), state.rows, depth)

    both = (attend(False), attend(True))
    return d.draft(state.roots, state.draft_cache, state.lengths, parts.target.embed, both)


def candidates(parts: Parts, hidden: Tensor | None, budget: int) -> tuple[Tensor, Tensor] | None:
    """What a tree of this budget may need of every drafted position: values and ids [R, K, T], see Drafter.top."""
    if hidden is None or parts.drafter is None:
        return None
    return parts.drafter.top(hidden, parts.target.head, max(budget, 1))


def propose(
    parts: Parts, state: State, offer: tuple[Tensor, Tensor] | None, budget: int
) -> tuple[Tree, Tensor]:
    """The round's tree: its root (PLAIN_DECODE), the drafter's best chain (CHAIN), or its best ``budget`` nodes.

    Returns:
        the tree, and the best chain int64 [R, K] (K = 0 without a draft).
    """
    if offer is None:
        nothing = state.roots[:, None][:, :0]
        return chain_tree(nothing, state.roots), nothing
    best = offer[1][:, :, 0]
    if budget == CHAIN:
        return chain_tree(best, state.roots), best
    return parts.ops.build_tree(offer, state.roots, budget), best


def verify(parts: Parts, state: State, tree: Tree) -> tuple[Tensor, Tensor]:
    """Target logits [R, N+1, V] after every slot, and the tapped hidden states [R, N+1, m * H]."""
    steps = make_steps(parts, state.lengths, tree, state.rows)
    hidden, tapped = parts.target(tree.tokens, steps, state.layers, parts.taps, parts.ops)
    return parts.target.logits(hidden), tapped


def accept(
    parts: Parts, tree: Tree, logits: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> Path:
    """Choose the target's token after every slot, and walk."""
    chosen = sample_target(logits, sampling.temperature, sampling.top_k, sampling.top_p, generator)
    return parts.ops.walk(tree, chosen)


def extend(parts: Parts, state: State, path: Path, tapped: Tensor) -> None:
    """Hand the accepted path's hidden states to the drafter. Before commit: rows count from the old lengths."""
    if parts.drafter is not None and state.draft_cache is not None:
        rows = commit_rows(path, state.lengths)[1]
        at = path.nodes.clamp(min=0).long()[..., None].expand(-1, -1, tapped.shape[-1])
        parts.drafter.extend(state.draft_cache, tapped.gather(1, at), rows)


def commit(parts: Parts, state: State, path: Path) -> None:
    """Keep the accepted path in every cache and state of the target, and drop all else; the bonus is the new root."""
    source, destination = commit_rows(path, state.lengths)
    kept = torch.where(state.active, path.count, -1)
    for cache in state.caches:
        parts.ops.move_rows(cache, source.to(cache.device), destination.to(cache.device))
    nodes: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for layer in state.layers:
        if layer.stash is not None and layer.conv is not None and layer.delta is not None:
            d = layer.delta.device
            if d not in nodes:
                nodes[d] = (path.nodes.to(d), kept.to(d))
            parts.ops.gdn_commit(layer.stash, layer.conv, layer.delta, *nodes[d])
    state.lengths += kept + 1
    state.roots.copy_(torch.where(state.active, path.bonus, state.roots))


@dataclass(frozen=True)
class RoundResult:
    """One request's round, as the host sees it."""

    count: int  # accepted drafts
    tokens: list[int]  # committed: the accepted drafts and the bonus
    nodes: list[int]  # tree slots of the accepted drafts, ascending
    on_chain: int  # leading accepted drafts that are the drafter's best token of their position

    def within(self, budget: int) -> int:
        """Drafts that a tree of this smaller budget would have accepted: its nodes are the first of this one."""
        return sum(n <= budget for n in self.nodes)


def pack_result(path: Path, best: Tensor) -> Tensor:
    """All that the host needs of a round in one int64 tensor [R, 2 + 2 (D+1)]; see unpack_results."""
    agree = (path.tokens[:, : best.shape[1]] == best) & (path.nodes[:, 1:] >= 0)
    on_chain = agree.long().cumprod(1).sum(1, keepdim=True)
    return torch.cat([path.count[:, None].long(), on_chain, path.tokens, path.nodes.long()], 1)


def unpack_results(rows: list[list[int]]) -> list[RoundResult]:
    """RoundResults from pack_result's rows on the host."""
    half = (len(rows[0]) - 2) // 2
    return [RoundResult(r[0], r[2 : r[0] + 3], r[half + 3 : half + 3 + r[0]], r[1]) for r in rows]


def run_round(
    parts: Parts, state: State, budget: int, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """One round. Returns what the host needs (see pack_result), and the target's logits at the roots [R, V]."""
    hidden = None if budget == PLAIN_DECODE else draft(parts, state)
    tree, best = propose(parts, state, candidates(parts, hidden, budget), budget)
    logits, tapped = verify(parts, state, tree)
    path = accept(parts, tree, logits, sampling, generator)
    extend(parts, state, path, tapped)
    commit(parts, state, path)
    return pack_result(path, best), logits[:, 0]
