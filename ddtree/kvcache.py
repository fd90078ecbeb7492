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
from ddtree.layers import apply_rope, rms_norm

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


def rotate_and_write(
    qgkv: Tensor,
    heads: int,
    gated: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys; write keys and values to a layer's cache.

    Args:
        qgkv: [R, n, (heads * (1 or 2) + 2 kv_heads) * hd]: queries, gates if gated (left alone), keys, values.
        heads: may be 0, for a context that has no queries.
        q_weight, k_weight: [hd] of the norms over a head, or None for no norm.
        cos, sin: float32 [R, n, 1, rot]. rows: int64 [R, n]. keys, values: [R, rows, kv_heads, hd].
    Returns:
        queries [R, n, heads, hd].
    """
    kv, hd = keys.shape[2:]
    widths = [heads * hd, heads * hd * gated, kv * hd, kv * hd]
    q, _, k, v = (t.reshape(*t.shape[:-1], t.shape[-1] // hd, hd) for t in torch.split(qgkv, widths, -1))
    write_rows(keys, rows, apply_rope(k if k_weight is None else rms_norm(k, k_weight, eps), cos, sin))
    write_rows(values, rows, v)
    if not heads:
        return q
    return apply_rope(q if q_weight is None else rms_norm(q, q_weight, eps), cos, sin)


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
