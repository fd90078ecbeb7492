"""Device work of one verification step, each kernel beside the plain-torch twin that defines it.

Three launches per step, none of which waits for the host: ``prepare`` (positions, masks and tokens of this step's
trees), ``walk`` (accept a path per request) and ``commit`` (move the path's K and V to linear slots, all layers).
Rows of a request are the last ``drafts + 1`` of its query: the root (last sampled token), then the nodes in
topological order. Chains are trees too: a request without a tree gets parents ``i - 1``, plain causal decoding.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Trees waiting to be verified, one row per slot; N = budget, W = ceil((N+1)/64)."""

    tokens: Tensor  # int32 [S, N+1], root first
    parents: Tensor  # int32 [S, N+1], -1 at the root
    depth: Tensor  # int32 [S, N+1]
    words: Tensor  # int64 [S, N+1, W], ancestor-or-self bits


@dataclass(frozen=True)
class Step:
    """What this step's attention and walk read; fixed addresses, so CUDA graphs may hold them."""

    words: Tensor  # int64 [T, W], by flat query row, bits count rows of the same request
    parents: Tensor  # int32 [R, N+1], by request row, node 0 is the root
    tree_len: Tensor  # int32 [R]: query rows if the tree kernel serves the request, else 0
    context_len: Tensor  # int32 [R]: cached tokens before this step, 0 where tree_len is 0
    linear: Tensor  # int64 [T]: position of every row as if its query were a chain (= its cache slot)


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare(
    slots, drafts, query_start, computed,
    s_tokens, s_parents, s_depth, s_words,
    input_ids, positions,
    words, parents, tree_len, context_len,
    num_reqs,
    SIZE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    if r >= num_reqs:
        tl.store(tree_len + r, 0)
        tl.store(context_len + r, 0)
        return
    first = tl.load(query_start + r)
    rows = tl.load(query_start + r + 1) - first
    n = tl.load(drafts + r)
    slot = tl.load(slots + r).to(tl.int64)
    base = tl.load(computed + r)
    small = rows <= SIZE
    tree = (slot >= 0) & (n > 0) & (rows == n + 1)
    tl.store(tree_len + r, tl.where(small, rows, 0))
    tl.store(context_len + r, tl.where(small, base, 0))

    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    here = (small & (i < rows)) != 0
    stored = (tree & here) != 0
    at = slot * SIZE + i
    parent = tl.where(tree, tl.load(s_parents + at, mask=stored, other=-1), i - 1)
    tl.store(parents + r.to(tl.int64) * SIZE + i, parent, mask=inside)
    depth = tl.where(tree, tl.load(s_depth + at, mask=stored, other=0), i)
    tl.store(positions + first + i, (base + depth).to(tl.int64), mask=here)
    token = tl.load(input_ids + first + i, mask=here, other=0)
    node = tl.load(s_tokens + at, mask=stored & (i > 0), other=0)
    token = tl.where(tree & (i > 0), node, tl.maximum(token, 0))
    tl.store(input_ids + first + i, token, mask=here)
    for w in tl.static_range(W):
        # Bits 64w .. min(i, 64w+63): one shift would overflow at 64 bits, hence the two cases.
        upto = i - w * 64
        ones = tl.full((BLOCK,), 1, tl.int64)
        low = (ones << tl.minimum(tl.maximum(upto + 1, 0), 63).to(tl.int64)) - 1
        causal = tl.where(upto >= 63, -ones, low)
        word = tl.where(tree, tl.load(s_words + at * W + w, mask=stored, other=0), causal)
        tl.store(words + (first + i).to(tl.int64) * W + w, word, mask=here)


def prepare(
    stored: Stored,
    step: Step,
    slots: Tensor,
    drafts: Tensor,
    query_start: Tensor,
    computed: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    num_reqs: int,
) -> None:
    """Lay this step's trees out over the batch.

    Args:
        slots: int32 [R], where each request's tree is stored, -1 for a chain. drafts: int32 [R] scheduled draft tokens.
        query_start: int32 [R+1] first query row of each request. computed: int32 [R] cached tokens.
        input_ids: int32 [T], positions: int64 [T] as for a chain; both are rewritten in place for trees.
        num_reqs: live requests; rows above are cleared, since a CUDA graph may run over them.
    """
    size, width = stored.parents.shape[1], stored.words.shape[2]
    _prepare[(step.tree_len.shape[0],)](
        slots, drafts, query_start, computed,
        stored.tokens, stored.parents, stored.depth, stored.words,
        input_ids, positions,
        step.words, step.parents, step.tree_len, step.context_len,
        num_reqs,
        SIZE=size, W=width, BLOCK=triton.next_power_of_2(size),
    )  # fmt: skip


def prepare_twin(
    stored: Stored,
    step: Step,
    slots: Tensor,
    drafts: Tensor,
    query_start: Tensor,
    computed: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    num_reqs: int,
) -> None:
    """``prepare`` in plain torch, request by request (defines it; waits for the host)."""
    size, width = stored.parents.shape[1], stored.words.shape[2]
    step.tree_len.zero_()
    step.context_len.zero_()
    ones = torch.tril(torch.ones(size, size, dtype=torch.bool))
    for r in range(num_reqs):
        first, rows = int(query_start[r]), int(query_start[r + 1] - query_start[r])
        slot, base = int(slots[r]), int(computed[r])
        step.parents[r] = torch.arange(size, dtype=torch.int32) - 1
        if rows > size:
            continue
        step.tree_len[r], step.context_len[r] = rows, base
        here = slice(first, first + rows)
        if slot >= 0 and int(drafts[r]) > 0 and rows == int(drafts[r]) + 1:
            step.parents[r] = -1
            step.parents[r, :rows] = stored.parents[slot, :rows]
            positions[here] = base + stored.depth[slot, :rows].long()
            input_ids[first] = input_ids[first].clamp(min=0)
            input_ids[first + 1 : first + rows] = stored.tokens[slot, 1:rows]
            step.words[here] = stored.words[slot, :rows]
        else:
            positions[here] = base + torch.arange(rows)
            input_ids[here] = input_ids[here].clamp(min=0)
            step.words[here] = pack(ones[:rows, :rows], width)


def pack(mask: Tensor, width: int) -> Tensor:
    """Bit words of a dense mask: bool [M, M'] -> int64 [M, width]."""
    out = torch.zeros(mask.shape[0], width, dtype=torch.int64, device=mask.device)
    for j in range(mask.shape[1]):
        out[:, j // 64] |= mask[:, j].long() << (j % 64)
    return out


@triton.jit
def _walk(
    chosen, input_ids, query_start, sampled_end, drafts, parents,
    out_tokens, out_nodes, out_rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    n = tl.load(drafts + r)
    root = tl.load(query_start + r + 1) - (n + 1)  # flat row of the root
    logit = tl.load(sampled_end + r) - (n + 1)  # its row among the logits
    i = tl.arange(0, BLOCK)
    here = i <= n
    token = tl.load(input_ids + root + i, mask=here, other=-1)
    parent = tl.load(parents + r.to(tl.int64) * SIZE + i, mask=here & (i < SIZE), other=-2)
    step = tl.arange(0, PAD)
    node = n * 0
    alive = n >= 0
    nodes = tl.where(step == 0, 0, -1)
    pick = tl.load(chosen + logit).to(tl.int32)
    tokens = tl.where(step == 0, pick, -1)
    for s in tl.static_range(1, STEPS):
        match = here & (i > node) & (parent == node) & (token == pick) & alive
        child = tl.min(tl.where(match, i, BLOCK), axis=0)
        alive = child < BLOCK
        node = tl.where(alive, child, node)
        pick = tl.load(chosen + logit + node).to(tl.int32)
        nodes = tl.where((step == s) & alive, node, nodes)
        tokens = tl.where((step == s) & alive, pick, tokens)
    keep = step < STEPS
    tl.store(out_nodes + r * STEPS + step, nodes, mask=keep)
    tl.store(out_tokens + r * STEPS + step, tokens, mask=keep)
    # Rows of the path first, the rest in place: the drafter reads accepted rows as if they had been a chain.
    rows = tl.where(nodes >= 0, root + nodes, root + step)
    tl.store(out_rows + root + step, rows.to(tl.int64), mask=keep & (step <= n))


def walk(
    chosen: Tensor,
    input_ids: Tensor,
    query_start: Tensor,
    sampled_end: Tensor,
    drafts: Tensor,
    parents: Tensor,
    rows: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Follow the target's own choices down each request's tree.

    Args:
        chosen: int64 [S], the target's token after every logits row. sampled_end: int32 [R], inclusive cumulative sum
            of ``drafts + 1``. rows: int64 [T], filled with its own indices; rows of accepted nodes are written first.
        steps: tokens committed at most, K + 1.
    Returns:
        tokens int32 [R, steps] (accepted, bonus, then -1) and nodes int32 [R, steps] (0, accepted nodes, then -1).
    """
    count, size = drafts.shape[0], parents.shape[1]
    tokens = torch.empty(count, steps, dtype=torch.int32, device=chosen.device)
    nodes = torch.empty_like(tokens)
    _walk[(count,)](
        chosen, input_ids, query_start, sampled_end, drafts, parents, tokens, nodes, rows,
        SIZE=size, BLOCK=triton.next_power_of_2(size), STEPS=steps, PAD=triton.next_power_of_2(steps),
    )  # fmt: skip
    return tokens, nodes


def walk_twin(
    chosen: Tensor,
    input_ids: Tensor,
    query_start: Tensor,
    sampled_end: Tensor,
    drafts: Tensor,
    parents: Tensor,
    rows: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """``walk`` in plain Python, for tests."""
    count = drafts.shape[0]
    tokens = torch.full((count, steps), -1, dtype=torch.int32)
    nodes = torch.full((count, steps), -1, dtype=torch.int32)
    for r in range(count):
        n = int(drafts[r])
        root, logit = int(query_start[r + 1]) - (n + 1), int(sampled_end[r]) - (n + 1)
        path = [0]
        while len(path) < steps:
            pick = int(chosen[logit + path[-1]])
            children = [
                c for c in range(path[-1] + 1, n + 1) if parents[r, c] == path[-1] and input_ids[root + c] == pick
            ]
            if not children:
                break
            path.append(children[0])
        for s, node in enumerate(path):
            nodes[r, s], tokens[r, s] = node, int(chosen[logit + node])
            rows[root + s] = root + node
    return tokens, nodes


@triton.jit(do_not_specialize=["block_size", "stride_block", "stride_kv", "stride_slot", "stride_head"])
def _commit(
    pointers, nodes, query_start, drafts, slot_mapping,
    block_size, stride_block, stride_kv, stride_slot, stride_head,
    HEAD: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    layer = tl.program_id(1) // 2
    half = tl.program_id(1) % 2  # K or V
    step = tl.arange(0, PAD)
    node = tl.load(nodes + r * STEPS + step, mask=step < STEPS, other=-1)
    moved = node > step
    if tl.max(moved.to(tl.int32), axis=0) == 0:
        return
    root = tl.load(query_start + r + 1) - (tl.load(drafts + r) + 1)
    source = tl.load(slot_mapping + root + node, mask=moved, other=0)
    target = tl.load(slot_mapping + root + step, mask=moved, other=0)
    c = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    lane = (c // HEAD).to(tl.int64) * stride_head + c % HEAD
    base = tl.load(pointers + layer).to(tl.pointer_type(tl.int16)) + half * stride_kv
    mask = moved[:, None] & (c < CHANNELS)[None, :]
    at = (source // block_size) * stride_block + (source % block_size) * stride_slot
    value = tl.load(base + at[:, None] + lane[None, :], mask=mask, other=0)
    # A slot can be one step's source and another's target: all reads come before all writes.
    tl.debug_barrier()
    at = (target // block_size) * stride_block + (target % block_size) * stride_slot
    tl.store(base + at[:, None] + lane[None, :], value, mask=mask)


@dataclass(frozen=True)
class CacheGroup:
    """KV caches of one geometry: [blocks, 2, block_size, heads, head_size] views with equal strides, 16-bit items."""

    pointers: Tensor  # int64 [L], addresses on the device
    views: tuple[Tensor, ...]  # keeps them alive; the twin reads them
    group: int  # KV cache group, whose slot mapping applies


def commit(caches: CacheGroup, nodes: Tensor, query_start: Tensor, drafts: Tensor, slot_mapping: Tensor) -> None:
    """Move K and V of each accepted path to the slots that follow the root, in every layer: one launch.

    Args:
        nodes: int32 [R, K+1] from ``walk``. slot_mapping: int64 [T], the step's slots of this cache group.
    """
    view = caches.views[0]
    _, _, block_size, heads, head = view.shape
    count, steps = nodes.shape
    channels = heads * head
    chunk = min(256, triton.next_power_of_2(channels))
    _commit[(count, 2 * len(caches.views), triton.cdiv(channels, chunk))](
        caches.pointers, nodes, query_start, drafts, slot_mapping,
        block_size, view.stride(0), view.stride(1), view.stride(2), view.stride(3),
        HEAD=head, CHANNELS=channels, CHUNK=chunk, STEPS=steps, PAD=triton.next_power_of_2(steps),
    )  # fmt: skip


def commit_twin(caches: CacheGroup, nodes: Tensor, query_start: Tensor, drafts: Tensor, slot_mapping: Tensor) -> None:
    """``commit`` in plain torch, for tests."""
    for r in range(nodes.shape[0]):
        root = int(query_start[r + 1] - drafts[r] - 1)
        path = [int(n) for n in nodes[r] if n >= 0]
        source = slot_mapping[root + torch.tensor(path)]
        target = slot_mapping[root : root + len(path)]
        for view in caches.views:
            size = view.shape[2]
            view[target // size, :, target % size] = view[source // size, :, source % size]
