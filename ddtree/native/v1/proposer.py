"""DFlash drafting, then a tree from all of its distributions instead of a chain from their maxima."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.dflash import DFlashProposer

from ddtree.native.options import Options
from ddtree.native.state import TreeState, chained
from ddtree.tree import Tree, build_tree, top_logprobs


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

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, None]:
        """Keeps the logits [R * K, V] for the tree; the tokens returned to the stock code are not used."""
        self._logits = self.model.compute_logits(hidden_states)
        return hidden_states.new_zeros(hidden_states.shape[0], dtype=torch.int64), None

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draft one tree per request; returns its tokens int64 [R, N], which is what the scheduler counts."""
        hidden = kwargs["target_hidden_states"]
        total = hidden.shape[0]
        # The drafter's context must look as if the accepted path had been a chain: its rows first, linear positions.
        kwargs["target_positions"] = self.trees.step.linear[:total]
        if self.rows is not None:
            kwargs["target_hidden_states"] = hidden.index_select(0, self.rows[:total])
        super().propose(*args, **kwargs)
        logits, self._logits = self._logits, None
        assert logits is not None
        req_ids = self.runner.input_batch.req_ids[: kwargs["common_attn_metadata"].batch_size()]
        tree = self.draft(logits.view(len(req_ids), self.options.horizon, -1), kwargs["next_token_ids"])
        self.trees.keep(req_ids, tree)
        return tree.tokens[:, 1:].contiguous()

    def draft(self, logits: Tensor, root_tokens: Tensor) -> Tree:
        """Trees from logits [R, K, V]; requests whose sampling reads the draft as a history get a chain."""
        values, ids = top_logprobs(logits, self.options.top_k)
        tree = build_tree((values, ids), root_tokens, self.options.budget)
        return self.with_chains(tree, ids[:, :, 0])

    def with_chains(self, tree: Tree, best: Tensor) -> Tree:
        rows = self.chain_rows()
        if not any(rows):
            return tree
        only = torch.tensor(rows, pin_memory=tree.tokens.is_cuda).to(tree.tokens.device, non_blocking=True)
        return chained(tree, best, only)

    def chain_rows(self) -> list[bool]:
        """Which requests of the batch need a chain (structured output, penalties, bad words, min_tokens, budgets)."""
        runner = self.runner
        return [needs_chain(runner.requests[r].sampling_params) for r in runner.input_batch.req_ids]


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
