"""A static KV cache and the writes on it. No shape depends on data, so a round can be one CUDA graph.

Layout: [layers, 2, R, rows, kv_heads, head_dim], keys at [:, 0]. Row = position of the token within its request. Rows
at or above a request's length hold anything: whoever reads must mask by length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.attention import tree_mask

# attend(q [R, n, heads, head_dim], keys [R, rows, kv_heads, head_dim], values, window) -> [R, n, heads, head_dim].
# The n new tokens' keys and values are in the cache already; whoever builds it fixes who sees what.
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def new_cache(
    layers: int, requests: int, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """An empty cache; zeros, since a masked row still takes part in products and must be finite."""
    return torch.zeros(layers, 2, requests, rows, kv_heads, head_dim, dtype=dtype, device=device)


def write_rows(cache: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write new [R, n, kv_heads, head_dim] at rows int64 [R, n] of cache [R, rows, kv_heads, head_dim]."""
    request = torch.arange(rows.shape[0], device=rows.device)[:, None]
    cache[request, rows] = new.to(cache.dtype)


def move_rows(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Move rows of every layer at once: source, destination int64 [R, n]; all are read before any is written.

    Args:
        cache: [layers, 2, R, rows, kv_heads, head_dim].
    """
    request = torch.arange(source.shape[0], device=source.device)[:, None]
    cache[:, :, request, destination] = cache[:, :, request, source]


def plain_attend(lengths: Tensor, words: Tensor, rows: int, depth: Tensor | None = None) -> Attend:
    """Tree attention over a static cache by torch's own kernels and a dense mask, made once for all layers.

    Args:
        lengths: int [R], context rows. words: int64 [R, n, W]. depth: int [R, n], needed with a sliding window.
    """
    masks: dict[int, Tensor] = {}

    def attend(q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
        if window not in masks:
            masks[window] = tree_mask(lengths, words, rows, depth, window)[:, None]
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        grouped = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=masks[window], enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend
