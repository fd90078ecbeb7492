"""Trees between the step that drafts them and the step that verifies them; all tensors at fixed addresses.

A tree belongs to a request, not to a batch row: rows are reordered, and a request may sit out a step and keep its
drafts. So trees live in slots, and the host knows which request has which slot. Whatever is lost (a zeroed draft, a
preempted request) becomes a chain, which is always right: only a tree's acceptance depends on this bookkeeping, never
what is emitted, since mask, positions, walk and commit of a step all read the same gathered rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ddtree.native.step_kernels import Step, Stored
from ddtree.tree import Tree, n_words


class TreeState:
    """Slots for waiting trees, and the current step's buffers.

    Args:
        budget: N. max_reqs: rows of a batch. max_tokens: query rows of a step. device: of everything.
    """

    def __init__(self, budget: int, max_reqs: int, max_tokens: int, device: torch.device) -> None:
        size, width = budget + 1, n_words(budget + 1)
        self.budget, self.size = budget, size
        self.max_reqs = max_reqs
        # One spare slot takes the trees of requests that got no slot; nobody reads it.
        slots = 2 * max_reqs + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.stored = Stored(
            zeros(slots, size), zeros(slots, size), zeros(slots, size), zeros(slots, size, width, dtype=torch.int64)
        )
        self.step = Step(
            words=zeros(max_tokens, width, dtype=torch.int64),
            parents=zeros(max_reqs, size),
            tree_len=zeros(max_reqs),
            context_len=zeros(max_reqs),
            linear=zeros(max_tokens, dtype=torch.int64),
        )
        self.slots = zeros(max_reqs)
        self.drafts = zeros(max_reqs)
        pin = device.type == "cuda"
        # Written by the host each step; two sets, since the copy of one may still be in flight (async scheduling).
        self._host = [torch.zeros(4, max_reqs, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
        self._turn = 0
        self.slot_of: dict[str, int] = {}
        # Oldest first: a slot that this step reads is not written by the same step's drafting.
        self._free = deque(range(2 * max_reqs))
        self.spare = 2 * max_reqs
        # What the attention metadata of this step must be; set by the host before it is built.
        self.tree_step = False  # some rows go through the tree kernel
        self.mixed = False  # some do not
        self.live = 0

    def host(self, row: int, values: Sequence[int]) -> Tensor:
        """int32 values in pinned memory, to be copied without waiting."""
        out = self._host[self._turn][row, : len(values)]
        out.copy_(torch.tensor(values, dtype=torch.int32))
        return out

    def begin(self, req_ids: Sequence[str], drafts: Sequence[int], rows: Sequence[int]) -> None:
        """Choose each request's tree for this step and upload the choice. Trees are used once: they leave the map.

        Args:
            drafts: scheduled draft tokens per request. rows: query rows per request.
        """
        self._turn ^= 1
        chosen = []
        for request, n in zip(req_ids, drafts, strict=True):
            slot = self.slot_of.pop(request, -1)
            if slot >= 0:
                self._free.append(slot)
            chosen.append(slot if n > 0 else -1)
        count = len(chosen)
        self.live = count
        self.slots[:count].copy_(self.host(0, chosen), non_blocking=True)
        self.drafts[:count].copy_(self.host(1, list(drafts)), non_blocking=True)
        longest = max(rows)
        self.tree_step = longest <= self.size or any(slot >= 0 for slot in chosen)
        self.mixed = longest > self.size

    def dummy(self, tree_step: bool) -> None:
        """No trees at all, for warm-up and graph capture: addresses are recorded, values come later."""
        self.step.tree_len.zero_()
        self.step.context_len.zero_()
        self.tree_step, self.mixed = tree_step, False

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop the trees of requests that are gone."""
        for request in req_ids:
            slot = self.slot_of.pop(request, -1)
            if slot >= 0:
                self._free.append(slot)

    def claim(self, req_ids: Sequence[str], chains: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """A slot for each request's next tree: slots int32 [R] and, uploaded with them, chains int32 [R]."""
        slots = []
        for request in req_ids:
            slot = self.slot_of.get(request, -1)
            if slot < 0 and self._free:
                slot = self.slot_of[request] = self._free.popleft()
            slots.append(slot if slot >= 0 else self.spare)
        count = len(slots)
        both = self._host[self._turn]
        both[2, :count].copy_(torch.tensor(slots, dtype=torch.int32))
        both[3, :count].copy_(torch.tensor(chains, dtype=torch.int32))
        there = both[2:].to(self.slots.device, non_blocking=True)
        return there[0, :count], there[1, :count]


def chained(tree: Tree, chain: Tensor, only: Tensor | None) -> Tree:
    """The tree with some requests' rows replaced by a chain: chain int [R, K] first, then padding tokens 0.

    Args:
        only: bool [R], which rows; None for all.
    """
    rows, size = tree.tokens.shape
    device = tree.tokens.device
    n = torch.arange(size, device=device, dtype=torch.int32)
    tokens = torch.zeros_like(tree.tokens)
    tokens[:, 0] = tree.tokens[:, 0]
    length = min(chain.shape[1], size - 1)
    tokens[:, 1 : length + 1] = chain[:, :length]
    word = torch.arange(tree.words.shape[-1], device=device) * 64
    upto = (n[:, None] - word).clamp(-1, 63)
    low = torch.where(upto >= 63, -1, (torch.ones_like(upto, dtype=torch.int64) << (upto + 1).clamp(max=63)) - 1)
    pick = torch.ones(rows, dtype=torch.bool, device=device) if only is None else only
    return Tree(
        tokens=torch.where(pick[:, None], tokens, tree.tokens),
        parents=torch.where(pick[:, None], n - 1, tree.parents),
        depth=torch.where(pick[:, None], n, tree.depth),
        words=torch.where(pick[:, None, None], low, tree.words),
        scores=tree.scores,
        n_nodes=torch.where(pick, size - 1, tree.n_nodes).int(),
        max_depth=tree.max_depth,
    )
