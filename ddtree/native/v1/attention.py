"""Attention backend "CUSTOM": FlashAttention over the cached context, our kernel among the tree, merged exactly.

A step without trees or with nothing but prefill is the stock backend's. Rows of prefills in a mixed batch go through
the stock causal call; the tree kernel then overwrites the rows of tree requests.
"""

# mypy: disable-error-code="misc"
# vLLM, whose classes are derived from, is not there when types are checked.

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from ddtree.kernels.attention import paged_attention
from ddtree.native.attend import attend
from ddtree.native.options import OptionError
from ddtree.native.state import TreeState

_STATE: list[TreeState] = []
# "split": FlashAttention over the context, then the tree kernel; "fused": one Triton kernel for both.
KIND = os.environ.get("DDTREE_ATTENTION", "split")


@cache
def layout() -> str:
    """How this vLLM lays a layer's KV cache out: "2B" (up to 0.22), "B2" (0.23 to 0.25), "packed" (0.26 on)."""
    shape = tuple(FlashAttentionBackend.get_kv_cache_shape(5, 16, 3, 64))
    known = {(2, 5, 16, 3, 64): "2B", (5, 2, 16, 3, 64): "B2", (5, 3, 16, 128): "packed"}
    if shape not in known:
        raise OptionError("ddtree-kv-layout", f"a KV cache of shape {shape} for 5 blocks of 16 tokens, 3 heads of 64")
    return known[shape]


def kv_view(cache: Tensor, head_size: int, kind: str | None = None) -> Tensor:
    """A layer's KV cache as [blocks, 2, block size, heads, head size], without a copy, whatever its layout."""
    kind = kind or layout()
    if kind == "packed":  # [blocks, heads, block size, 2 * head size], K first
        return cache.view(*cache.shape[:-1], 2, head_size).permute(0, 3, 2, 1, 4)
    return cache.transpose(0, 1) if kind == "2B" else cache


def use(trees: TreeState) -> None:
    """Make a runner's trees those that the metadata builders of this process read."""
    _STATE[:] = [trees]


@dataclass
class DDTreeMetadata(FlashAttentionMetadata):
    """seq_lens and the scheduler metadata are those of the context call where ``words`` is set."""

    words: Tensor | None = None  # int64 [T, W]
    tree_len: Tensor | None = None  # int32 [R]
    full_seq_lens: Tensor | None = None  # int32 [R]; set where the batch has other rows than trees
    max_rows: int = 0
    reach: int = 0  # longest context that a CUDA graph of this step is planned for


class DDTreeMetadataBuilder(FlashAttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        trees = _STATE[0]
        if not trees.tree_step or not common_attn_metadata.causal:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        context = copy.copy(common_attn_metadata)
        count = context.num_reqs
        context.seq_lens = trees.step.context_len[:count]
        context.causal = False
        base = super().build(0, context, fast_build)
        return DDTreeMetadata(
            **vars(base),
            words=trees.step.words,
            tree_len=trees.step.tree_len[:count],
            full_seq_lens=common_attn_metadata.seq_lens if trees.mixed else None,
            max_rows=trees.size,
            reach=min(self.model_config.max_model_len, 4096),
        )

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class DDTreeImpl(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = {
            "ALiBi": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != (-1, -1),
            "logits soft cap": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            f"KV cache dtype {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "bfloat16", "float16"),
            "KV sharing between layers": self.kv_sharing_target_layer_name is not None,
        }
        if names := [name for name, is_so in found.items() if is_so]:
            raise OptionError("ddtree-unsupported", f"the target's attention has {', '.join(names)}")

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        words = getattr(attn_metadata, "words", None)
        if words is None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
            return output
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization with ddtree")
        n = attn_metadata.num_actual_tokens
        query, out = query[:n], output[:n]
        key_cache, value_cache = kv_view(kv_cache, self.head_size).unbind(1)
        if KIND == "fused" and attn_metadata.full_seq_lens is None:
            paged_attention(
                query,
                key_cache,
                value_cache,
                attn_metadata.query_start_loc,
                attn_metadata.max_rows,
                attn_metadata.seq_lens,
                words,
                attn_metadata.block_table,
                out=out,
                scale=self.scale,
                reach=attn_metadata.reach,
            )
            return output
        common = {
            "q": query,
            "k": key_cache,
            "v": value_cache,
            "cu_seqlens_q": attn_metadata.query_start_loc,
            "max_seqlen_q": attn_metadata.max_query_len,
            "max_seqlen_k": attn_metadata.max_seq_len,
            "softmax_scale": self.scale,
            "block_table": attn_metadata.block_table,
            "fa_version": self.vllm_flash_attn_version,
        }
        if attn_metadata.full_seq_lens is not None:
            flash_attn.flash_attn_varlen_func(out=out, seqused_k=attn_metadata.full_seq_lens, causal=True, **common)
        context, lse = flash_attn.flash_attn_varlen_func(
            seqused_k=attn_metadata.seq_lens,
            causal=False,
            return_softmax_lse=True,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            num_splits=attn_metadata.max_num_splits,
            **common,
        )
        attend(
            query,
            key[:n],
            value[:n],
            context,
            lse,
            words,
            attn_metadata.query_start_loc,
            attn_metadata.tree_len,
            attn_metadata.seq_lens,
            out,
            self.scale,
            attn_metadata.max_rows,
        )
        return output


class DDTreeAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[DDTreeImpl]:
        return DDTreeImpl

    @staticmethod
    def get_builder_cls() -> type[DDTreeMetadataBuilder]:
        return DDTreeMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"
