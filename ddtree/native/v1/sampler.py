"""Acceptance: the target chooses a token after every node, the walk keeps the path that the draft has.

Every token emitted is the target's own choice given its prefix, so greedy output is plain decoding's and sampled output
has the target's distribution, whatever the tree (naive sampling of SpecInfer, arXiv 2305.09781). No draft
probabilities are needed.
"""

# mypy: disable-error-code="misc"
# vLLM, whose classes are derived from, is not there when types are checked.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler

from ddtree.native.step_kernels import walk

_GREEDY_BELOW = 1e-5  # vLLM's own bound


class TreeRejectionSampler(RejectionSampler):
    """Takes the place of vLLM's RejectionSampler; same call, same output: token ids [R, K+1], -1 after the last."""

    def __init__(self, sampler: Any, spec_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(sampler, spec_config, device)
        self._runner = [runner]  # in a list, so that it is no submodule
        self._nodes: Tensor | None = None
        self.stock = False  # while vLLM profiles memory with metadata of no real batch

    def take_nodes(self) -> Tensor | None:
        """The last walk's nodes int32 [R, K+1], once."""
        nodes, self._nodes = self._nodes, None
        return nodes

    def forward(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        if self.stock:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        runner = self._runner[0]
        count = len(metadata.num_draft_tokens)
        processed = self.processed(metadata, logits, sampling_metadata)
        chosen, final = self.choose(metadata, processed, sampling_metadata)
        total = int(runner.query_start_loc.np[count])
        rows = torch.arange(total, device=logits.device)
        trees = runner.trees
        tokens, self._nodes = walk(
            chosen,
            runner.input_ids.gpu,
            runner.query_start_loc.gpu,
            metadata.cu_num_sampled_tokens,
            trees.drafts[:count],
            trees.step.parents,
            rows,
            runner.ddtree.horizon + 1,
        )
        runner.drafter.rows = rows
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            source = final if self.is_processed_logprobs_mode else logits
            logprobs = self.logprobs(metadata, source, tokens, self._nodes, sampling_metadata.max_num_logprobs)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def processed(self, metadata: Any, logits: Tensor, sampling_metadata: Any) -> Tensor:
        """Logits after allow-lists, penalties, bad words and the like; requests with a history carry chains."""
        holder = getattr(sampling_metadata, "thinking_budget_state_holder", None)
        plain = (
            sampling_metadata.no_penalties
            and not sampling_metadata.bad_words_token_ids
            and sampling_metadata.allowed_token_ids_mask is None
            and not any(
                isinstance(p, MinTokensLogitsProcessor) and p.min_toks
                for p in sampling_metadata.logitsprocs.non_argmax_invariant
            )
            and not (holder is not None and holder.has_tracked_requests())
        )
        if plain:
            return logits
        bonus, target = metadata.bonus_logits_indices, metadata.target_logits_indices
        out = logits.float()
        out[bonus] = self.sampler.apply_logits_processors(out[bonus], sampling_metadata, True)
        out[target] = self.apply_logits_processors(out[target], sampling_metadata, metadata)
        return out

    def choose(self, metadata: Any, logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor]:
        """One token per row int64 [S], and the logits it was drawn from."""
        if sampling_metadata.all_greedy:
            return logits.argmax(-1), logits
        owner = self.owner(metadata, logits)
        temperature = sampling_metadata.temperature[owner]
        greedy = temperature < _GREEDY_BELOW
        best = None if sampling_metadata.all_random else logits.argmax(-1)
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
        scaled = apply_top_k_top_p(
            scaled, None if top_k is None else top_k[owner], None if top_p is None else top_p[owner]
        )
        noise = torch.empty_like(scaled)
        generators = sampling_metadata.generators
        if len(generators) != len(metadata.num_draft_tokens):
            noise.exponential_()
        start = 0
        for r, n in enumerate(metadata.num_draft_tokens):
            if r in generators:
                noise[start : start + n + 1].exponential_(generator=generators[r])
            start += n + 1
        drawn = scaled.softmax(-1).div_(noise).argmax(-1)
        return (drawn if best is None else torch.where(greedy, best, drawn)), scaled

    @staticmethod
    def owner(metadata: Any, logits: Tensor) -> Tensor:
        """Request of every logits row: int64 [S]; built without reading the device."""
        counts = torch.tensor([n + 1 for n in metadata.num_draft_tokens])
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        return owner.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else owner

    def logprobs(self, metadata: Any, logits: Tensor, tokens: Tensor, nodes: Tensor, most: int) -> Any:
        """Log-probabilities of the emitted tokens, each from its own node's row: R * (K+1) rows, padding included."""
        end = metadata.cu_num_sampled_tokens
        start = torch.zeros_like(end)
        start[1:] = end[:-1]
        rows = (start[:, None] + nodes.clamp(min=0)).flatten().long()
        values = logits[rows].float()
        if not self.is_logits_logprobs_mode:
            values = self.sampler.compute_logprobs(values)
        return self.sampler.gather_logprobs(values, most, tokens.clamp(min=0).flatten().long())
