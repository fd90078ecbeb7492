"""The V1 model runner with trees: lay out before the forward pass, walk and commit after it.

Step order in the stock runner (execute_model, then sample_tokens): _prepare_inputs -> attention metadata -> forward ->
_sample -> propose_draft_token_ids. Slots stay linear (row i of a request writes slot base + i); only RoPE positions and
the mask follow the tree, so scheduler and block tables never learn that there is one.
"""

# mypy: disable-error-code="misc"
# vLLM, whose classes are derived from, is not there when types are checked.

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ddtree.native.options import OptionError, Options, block_size_of, resolve
from ddtree.native.state import TreeState
from ddtree.native.step_kernels import CacheGroup, commit, prepare
from ddtree.native.v1 import attention
from ddtree.native.v1.proposer import DDTreeProposer
from ddtree.native.v1.sampler import TreeRejectionSampler


def options_of(vllm_config: Any) -> Options:
    """The options that travelled in additional_config, checked against the drafter that was really loaded."""
    speculative = vllm_config.speculative_config
    given = dict((vllm_config.additional_config or {}).get("ddtree") or {})
    given.setdefault("budget", speculative.num_speculative_tokens)
    hf_config = speculative.draft_model_config.hf_config
    known = {name: getattr(hf_config, name, None) for name in ("block_size", "dflash_config")}
    options = resolve(given, block_size_of(known))
    if attention.layout() == "2B" and options.horizon >= options.budget:
        raise OptionError(
            "ddtree-horizon",
            f"horizon {options.horizon} with a budget of {options.budget}",
            "up to 0.22 the scheduler reserves one slot less, so the budget must be larger than the horizon",
        )
    return options


class DDTreeModelRunner(GPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.ddtree = options_of(vllm_config)
        self.trees = TreeState(self.ddtree.budget, self.max_num_reqs, self.max_num_tokens, device)
        attention.use(self.trees)
        self.drafter = DDTreeProposer(vllm_config, device, self, self.ddtree, self.trees)
        self.rejection_sampler = TreeRejectionSampler(self.sampler, self.speculative_config, device, self)
        self.tree_caches: list[CacheGroup] = []
        self.cascade_attn_enabled = False  # a shared prefix would switch full graphs off, for the drafter's layers only

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        trees, count = self.trees, self.input_batch.num_reqs
        total = scheduler_output.total_num_scheduled_tokens
        trees.forget(scheduler_output.finished_req_ids)
        self.drafter.forget(scheduler_output.finished_req_ids)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        req_ids = self.input_batch.req_ids[:count]
        trees.begin(req_ids, [len(drafts.get(r, ())) for r in req_ids], num_scheduled_tokens.tolist())
        trees.step.linear[:total].copy_(self.positions[:total])
        prepare(
            trees.stored,
            trees.step,
            trees.slots,
            trees.drafts,
            self.query_start_loc.gpu,
            self.num_computed_tokens,
            self.input_ids.gpu,
            self.positions,
            count,
        )
        return prepared

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        self.drafter.rows = None
        output = super()._sample(logits, spec_decode_metadata)
        nodes = self.rejection_sampler.take_nodes()
        if nodes is not None:
            count = nodes.shape[0]
            for caches in self.tree_caches:
                slots = self.input_batch.block_table[caches.group].slot_mapping.gpu
                commit(caches, nodes, self.query_start_loc.gpu, self.trees.drafts[:count], slots)
        return output

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """As stock, with the drafter's real query length: root and horizon, not the whole budget."""
        if common_attn_metadata is None:
            return False
        rows = 1 + self.ddtree.horizon
        return bool(common_attn_metadata.max_seq_len + rows <= self.effective_drafter_max_model_len)

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """0.20.2 takes DFlash's target_layer_ids as they are, one layer too early: they count outputs, from 0."""
        hf_config = self.speculative_config.draft_model_config.hf_config
        ids = (getattr(hf_config, "dflash_config", None) or {}).get("target_layer_ids")
        if ids and not getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None):
            return tuple(i + 1 for i in ids)
        found: tuple[int, ...] | None = super()._get_eagle3_aux_layers_from_config()
        return found

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        self.trees.dummy(tree_step=bool(kwargs.get("uniform_decode", False)))
        return super()._dummy_run(*args, **kwargs)

    def _dummy_sampler_run(self, *args: Any, **kwargs: Any) -> Any:
        """Memory profiling with made-up metadata: the stock sampler's peak is no smaller than the walk's."""
        self.rejection_sampler.stock = True
        try:
            return super()._dummy_sampler_run(*args, **kwargs)
        finally:
            self.rejection_sampler.stock = False

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling)
        self.tree_caches = [] if is_profiling else self._cache_groups()

    def _cache_groups(self) -> list[CacheGroup]:
        """KV caches of the target's layers by cache group and geometry; shared caches once."""
        layers = self.compilation_config.static_forward_context
        found: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        seen: set[int] = set()
        drafter = self.drafter._draft_attn_layer_names  # up to 0.21 the drafter runs on the target's backend
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                layer = layers[name]
                if name in drafter or not isinstance(getattr(layer, "impl", None), attention.DDTreeImpl):
                    continue
                cache = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
                cache = attention.kv_view(cache, layer.impl.head_size)
                if cache.ndim != 5 or cache.shape[1] != 2 or cache.element_size() != 2 or cache.stride(4) != 1:
                    shape = tuple(cache.shape)
                    raise RuntimeError(f"ddtree: layer {name} has a KV cache of shape {shape}, {cache.dtype}")
                if cache.data_ptr() in seen:
                    continue
                seen.add(cache.data_ptr())
                found.setdefault((gid, cache.shape[2:], cache.stride()), []).append(cache)
        if not found:
            raise RuntimeError("ddtree: no layer of the target uses ddtree's attention backend")
        return [
            CacheGroup(torch.tensor([c.data_ptr() for c in caches], device=self.device), tuple(caches), key[0])
            for key, caches in found.items()
        ]
