"""DFlash drafting, then a tree from all of its distributions instead of a chain from their maxima."""

# mypy: disable-error-code="misc"
# vLLM, whose classes are derived from, is not there when types are checked.

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.dflash import DFlashProposer

from ddtree.native.build_kernel import build
from ddtree.native.options import Options
from ddtree.native.state import TreeState
from ddtree.native.top_kernel import top_logprobs

# "torch": topk and logsumexp of torch; "kernel": both in two launches, ties in order of ids.
TOP = os.environ.get("DDTREE_TOP", "torch")


class DDTreeProposer(DFlashProposer):
    """Buffers are sized for the budget by the stock constructor; drafting itself runs at the horizon."""

    def __init__(
        self, vllm_config: Any, device: torch.device, runner: Any, options: Options, trees: TreeState
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.options, self.trees = options, trees
        self.num_speculative_tokens = options.horizon
        self.use_local_argmax_reduction = False
        # Rows of this step's hidden states with each accepted path in front; None where no tree was verified.
        self.rows: Tensor | None = None
        self._logits: Tensor | None = None
        self._chains: dict[str, bool] = {}

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, None]:
        """Keeps the logits [R * K, V] for the tree; the tokens returned to the stock code are not used."""
        self._logits = self.model.compute_logits(hidden_states)
        return hidden_states.new_zeros(hidden_states.shape[0], dtype=torch.int64), None

    def _greedy_sample(self, hidden_states: Tensor) -> Tensor:
        """What 0.20 and 0.21 call in its place."""
        return self._sample_draft_tokens(hidden_states, None)[0]

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draft one tree per request; returns its tokens int64 [R, N], which is what the scheduler counts."""
        hidden = kwargs["target_hidden_states"]
        total = hidden.shape[0]
        # The drafter's context must look as if the accepted path had been a chain: its rows first, linear positions.
        kwargs["target_positions"] = self.trees.step.linear[:total]
        if self.rows is not None:
            kwargs["target_hidden_states"] = hidden.index_select(0, self.rows[:total])
        if "num_speculative_tokens" in kwargs:  # from 0.24 on the runner says how many, and means the budget
            kwargs["num_speculative_tokens"] = self.options.horizon
        super().propose(*args, **kwargs)
        logits, self._logits = self._logits, None
        assert logits is not None
        return self.draft(logits.view(-1, self.options.horizon, logits.shape[-1]), kwargs["next_token_ids"])

    def draft(self, logits: Tensor, root_tokens: Tensor) -> Tensor:
        """Trees from logits [R, K, V], stored for the next step; returns their tokens int64 [R, N].

        Requests whose sampling reads the draft as a history get a chain.
        """
        runner = self.runner
        req_ids = runner.input_batch.req_ids[: logits.shape[0]]
        slots, chains = self.trees.claim(req_ids, [self.needs_chain(r) for r in req_ids])
        rows, depth, vocabulary = logits.shape
        if TOP == "kernel":
            values, ids = top_logprobs(logits.view(-1, vocabulary), self.options.top_k)
        else:
            raw = logits.view(-1, vocabulary).float()
            values, ids = raw.topk(self.options.top_k, dim=-1)
            values = values - raw.logsumexp(-1, keepdim=True)
        values, ids = values.view(rows, depth, -1), ids.view(rows, depth, -1)
        return build(values, ids, root_tokens, slots, chains, self.trees.stored)

    def needs_chain(self, request: str) -> bool:
        known = self._chains.get(request)
        if known is None:
            known = self._chains[request] = needs_chain(self.runner.requests[request].sampling_params)
        return known

    def forget(self, req_ids: Iterable[str]) -> None:
        """Requests that are gone; an id may come back with other parameters."""
        for request in req_ids:
            self._chains.pop(request, None)


def needs_chain(params: Any) -> bool:
    """Whether a request's logits depend on the tokens drafted before a node, which vLLM's code expands as a chain."""
    return params is not None and bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.min_tokens
        or params.structured_outputs is not None
        or getattr(params, "thinking_token_budget", None) is not None
    )
