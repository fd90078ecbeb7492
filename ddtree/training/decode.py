"""Batched generation with a Hugging Face target: a slot cache with one length per row, refilled as responses end.

The model runs with a cache of its own kind, ``SlotCache``: every row writes at its own position, so a finished
row's slot is handed to the next prompt and the batch stays full. Decoding attends group by group without copying
keys for each query head. On a GPU the decode step is one CUDA graph per batch size. Works for attention-only
targets; hybrids carry recurrent state that a slot cannot take over, and go through ``transformers``' own generate
(see generate.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.training.target import Target
from ddtree.walk import sample_target

ATTENTION = "ddtree_slots"
SYNC_EVERY = 16  # decode steps between looks at which rows have ended


@dataclass(frozen=True)
class Sampler:
    """How the target is sampled; temperature 0 is greedy. Recorded with every row."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class Response:
    """Token ids as generated, the end token included; ``reason`` is ``stop``, ``length`` or ``error: ...``."""

    ids: list[int]
    reason: str


def slot_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **_kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Grouped-query attention: query [b, heads, n, hd], key and value [b, kv, L, hd], bool mask [b, 1, n, L]."""
    b, heads, n, hd = query.shape
    kv = key.shape[1]
    if n > 1:  # a prefill, over its own keys alone: the fused kernel is faster, and its mask is the causal one
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    q = query.view(b, kv, heads // kv, hd)
    score = (q @ key.transpose(-1, -2)).float() * scaling
    assert attention_mask is not None
    score = score.masked_fill(~attention_mask[:, :, 0, None], float("-inf"))
    out = score.softmax(-1).to(value.dtype) @ value
    return out.view(b, heads, 1, hd).transpose(1, 2), None


class SlotCache:
    """Keys and values [layers][slots, kv, rows, hd]. What ``transformers`` asks of a cache, and no more.

    In decoding every row writes at ``at``; in a prefill the rows ``slots`` write at 0.. and attend to the new keys
    alone.
    """

    is_compileable = False

    def __init__(self, target: Target, slots: int, rows: int) -> None:
        c = target.config
        kv = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        hd = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        shape = (slots, kv, rows, hd)
        self.keys = [target.embedding.new_zeros(shape) for _ in range(c.num_hidden_layers)]
        self.values = [target.embedding.new_zeros(shape) for _ in range(c.num_hidden_layers)]
        self.lane = torch.arange(slots, device=target.device)
        self.at = torch.zeros(slots, dtype=torch.int64, device=target.device)
        self.prefill: Tensor | None = None
        self.rows = self.limit = rows  # rows that decoding looks at

    def update(self, key: Tensor, value: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values [b, kv, n, hd]; returns what is attended to."""
        if self.prefill is not None:
            self.keys[layer][self.prefill, :, : key.shape[2]] = key
            self.values[layer][self.prefill, :, : key.shape[2]] = value
            return key, value
        n = key.shape[0]
        self.keys[layer][self.lane[:n], :, self.at[:n]] = key[:, :, 0]
        self.values[layer][self.lane[:n], :, self.at[:n]] = value[:, :, 0]
        return self.keys[layer][:n, :, : self.limit], self.values[layer][:n, :, : self.limit]

    def get_seq_length(self, *_args: Any) -> int:
        """Unused: positions are given."""
        return 0


def supports_slots(target: Target) -> bool:
    """Whether every layer is full attention (no recurrent state, no sliding window, no cross attention)."""
    kinds = getattr(target.config, "layer_types", None)
    return (not kinds or set(kinds) == {"full_attention"}) and not getattr(target.config, "sliding_window", None)


class SlotGenerator:
    """Continuous batched generation.

    Args:
        slots: rows decoded at once. rows: longest prompt + response.
    """

    def __init__(self, target: Target, stop: Sequence[int], slots: int = 64, rows: int = 1024) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, slot_attention)
        self.target, self.slots, self.rows = target, slots, rows
        self.stop = torch.tensor(sorted(stop), device=target.device)
        self.cache = SlotCache(target, slots, rows)
        device = target.device
        self.token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.left = torch.zeros(slots, dtype=torch.int64, device=device)  # tokens that may still be generated
        self.count = torch.zeros(slots, dtype=torch.int64, device=device)
        self.out = torch.zeros(slots, rows + 1, dtype=torch.int64, device=device)
        self.columns = torch.arange(rows, device=device)
        # transformers 5.2x renamed the argument, and will drop the old name
        known = inspect.signature(target.base.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"
        self.graphs: dict[int, Any] = {}
        self.pool: Any = None

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        config = self.target.base.config
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            cache = {self.cache_name: self.cache}
            out = self.target.base(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **cache)
        finally:
            config._attn_implementation = before
        return out.last_hidden_state  # type: ignore[no-any-return]

    def _record(self, chosen: Tensor, lanes: Tensor) -> None:
        """Append a token to rows that are still running; rows that end keep their count."""
        live = self.left[lanes] > 0
        column = torch.where(live, self.count[lanes], self.rows)  # the last column is a bin
        self.out[lanes, column] = chosen
        self.token[lanes] = chosen
        self.count[lanes] += live.long()
        ended = (chosen[:, None] == self.stop).any(-1)
        self.left[lanes] = torch.where(live & ~ended, self.left[lanes] - 1, 0)

    def _step(self, sampler: Sampler) -> None:
        """One token for every slot; slots without work repeat their last position, which nobody reads."""
        live = self.left > 0
        mask = (self.columns[: self.cache.limit] <= self.cache.at[:, None])[:, None, None]
        hidden = self._forward(self.token[:, None], self.cache.at[:, None], mask)
        self.cache.at += live.long()
        self._record(self._choose(hidden[:, -1], sampler), self.cache.lane)

    def _choose(self, hidden: Tensor, sampler: Sampler) -> Tensor:
        logits = nn.functional.linear(hidden, self.target.head)
        return sample_target(logits, sampler.temperature, sampler.top_k, sampler.top_p)

    def _prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], sampler: Sampler) -> None:
        device = self.target.device
        lengths = torch.tensor([len(p) for p in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for i, p in enumerate(prompts):
            ids[i, : len(p)] = torch.tensor(p)
        lanes, lengths, ids = torch.tensor(slots, device=device), lengths.to(device), ids.to(device)
        self.cache.prefill = lanes
        positions = torch.arange(ids.shape[1], device=device)[None].expand(len(prompts), -1)
        # transformers passes a four-dimensional mask on as it is; the prefill attends causally whatever it says
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        hidden = self._forward(ids, positions, mask)
        self.cache.prefill = None
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        self.cache.at[lanes] = lengths
        self.count[lanes] = 0
        self.left[lanes] = (self.rows - lengths).clamp(max=sampler.max_new)
        self._record(self._choose(last, sampler), lanes)

    def _run_steps(self, sampler: Sampler, steps: int, longest: int) -> None:
        """Decode; ``longest`` is the most tokens that a running row has so far."""
        self.cache.limit = min(self.rows, -(-(longest + steps + 1) // 64) * 64)
        if self.target.device.type != "cuda":
            for _ in range(steps):
                self._step(sampler)
            return
        graph = self.graphs.get(self.cache.limit)
        if graph is None:
            graph = self.graphs[self.cache.limit] = self._capture(sampler)
        for _ in range(steps):
            graph.replay()

    def _capture(self, sampler: Sampler) -> Any:
        """A decode step over the first ``cache.limit`` rows as a CUDA graph; advances nothing."""
        state = (self.token, self.left, self.count, self.cache.at)
        saved = [t.clone() for t in state]
        self.left.zero_()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(sampler)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._step(sampler)
        self.pool = self.pool or graph.pool()
        for t, s in zip(state, saved, strict=True):
            t.copy_(s)
        return graph

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[tuple[int, Response]]:
        """Responses as they end: (prompt index, response). A prompt that leaves no room is an error row."""
        if self.target.device.type == "cuda":
            torch.cuda.manual_seed(sampler.seed)
        torch.manual_seed(sampler.seed)
        waiting = [i for i, p in enumerate(prompts) if 0 < len(p) < self.rows]
        for i, p in enumerate(prompts):
            if not 0 < len(p) < self.rows:
                yield i, Response([], f"error: prompt of {len(p)} tokens, {self.rows} rows")
        waiting.sort(key=lambda i: len(prompts[i]), reverse=True)  # similar lengths are prefilled together
        owner: list[int | None] = [None] * self.slots
        stop = set(self.stop.tolist())
        lengths = [len(p) for p in prompts]
        done = [0] * self.slots
        self.graphs.clear()
        while waiting or any(o is not None for o in owner):
            free = [s for s, o in enumerate(owner) if o is None]
            # refill in bunches: a prefill of a few rows costs as much as a step of all of them
            if waiting and (len(free) >= max(1, self.slots // 16) or len(free) == self.slots):
                new = [waiting.pop(0) for _ in range(min(len(free), len(waiting)))]
                for at in range(0, len(new), 256):
                    part = new[at : at + 256]
                    self._prefill([prompts[i] for i in part], free[at : at + len(part)], sampler)
                for slot, i in zip(free, new, strict=False):
                    owner[slot], done[slot] = i, 1
            longest = max(lengths[o] + done[s] for s, o in enumerate(owner) if o is not None)
            self._run_steps(sampler, SYNC_EVERY, longest)
            left, count = self.left.tolist(), self.count.tolist()
            done = count
            ended = [s for s, o in enumerate(owner) if o is not None and left[s] == 0]
            if ended:
                rows = self.out[torch.tensor(ended, device=self.out.device)].tolist()
                for slot, row in zip(ended, rows, strict=True):
                    index, owner[slot] = owner[slot], None
                    assert index is not None
                    ids = row[: count[slot]]
                    yield index, Response(ids, "stop" if ids and ids[-1] in stop else "length")
