"""The DFlash block-diffusion drafter (arXiv 2602.06036): one pass drafts a whole block from the target's hidden states.

Per layer the block's queries see two kinds of keys, made by the same projections: context keys from the target's tapped
hidden states (one vector per committed position below the anchor) and keys of the block itself. The block is the anchor
(the last committed token, whose own target states do not exist yet) followed by mask tokens; slot k predicts the token
at anchor + k, so slot 0 predicts nothing. Embedding and head are the target's, frozen, unless a checkpoint has its own.

Two forwards, one set of weights, equal to each other: ``forward`` trains many anchors of a row at once, ``draft`` runs
one block per request over a cache of context keys and values that ``extend`` fills.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.kvcache import Attend, write_rows
from ddtree.layers import MLP, Linear, RMSNorm, apply_rope, rope_from_config
from ddtree.tree import n_words, self_bits, top_logprobs


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and meaning of a drafter, whatever file format it came in."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int  # rows of the target's embedding
    block_size: int  # anchor included: block_size - 1 tokens are drafted
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # id i taps the output of target layer i, counted from 0 (z-lab's convention)
    target_hidden_size: int
    windows: tuple[int, ...]  # per layer: sliding window in tokens, the query's own included; 0 = full
    causal: tuple[bool, ...]  # per layer: a block slot sees only slots up to its own
    num_target_layers: int | None = None  # what it was trained for, where the checkpoint says so
    draft_vocab_size: int | None = None  # set iff the head predicts a reduced vocabulary, mapped by d2t
    own_head: bool = False
    own_embedding: bool = False
    attention_bias: bool = False
    rope: dict[str, Any] = field(default_factory=dict)  # rope keys of the config, as found

    @property
    def drafts(self) -> int:
        """K: tokens drafted per block."""
        return self.block_size - 1


def visible_context(
    anchors: Tensor, starts: Tensor | None, rows: int, block_size: int, window: int
) -> Tensor:
    """Context rows that block slots may see: bool [b, n, block_size, rows], or [b, n, 1, rows] without a window.

    Slot k of the block at anchor a sees starts <= row < a, and with a window also row >= a + k - (window - 1).
    """
    row = torch.arange(rows, device=anchors.device)
    anchor = anchors[..., None, None]
    seen = row < anchor
    if starts is not None:
        seen = seen & (row >= starts[..., None, None])
    if window > 0:
        slot = torch.arange(block_size, device=anchors.device)[:, None]
        seen = seen & (row >= anchor + slot - (window - 1))
    return seen


def block_attention(
    q: Tensor, ctx_k: Tensor, ctx_v: Tensor, own_k: Tensor, own_v: Tensor, seen: Tensor, causal: bool
) -> Tensor:
    """Attention of many blocks of a row over the row's shared context and each block's own slots, in one softmax.

    Args:
        q: [b, n, B, heads, hd]. ctx_k, ctx_v: [b, S, kv, hd]. own_k, own_v: [b, n, B, kv, hd].
        seen: bool [b, n, B or 1, S], context visibility. causal: slots see only slots up to their own.
    Returns:
        [b, n, B, heads * hd].
    """
    b, n, B, heads, hd = q.shape
    S, kv = ctx_k.shape[1:3]
    g = heads // kv
    q = (q * hd**-0.5).view(b, n, B, kv, g, hd).permute(0, 3, 1, 2, 4, 5).reshape(b, kv, n, B * g, hd)
    own_k, own_v = own_k.permute(0, 3, 1, 2, 4), own_v.permute(0, 3, 1, 2, 4)  # [b, kv, n, B, hd]
    on_ctx = q.reshape(b, kv, n * B * g, hd) @ ctx_k.permute(0, 2, 3, 1)
    on_ctx = on_ctx.view(b, kv, n, B, g, S).masked_fill(~seen[:, None, :, :, None], float("-inf"))
    on_own = (q @ own_k.transpose(-1, -2)).view(b, kv, n, B, g, B)
    if causal:
        later = torch.ones(B, B, dtype=torch.bool, device=q.device).triu(1)
        on_own = on_own.masked_fill(later[:, None], float("-inf"))
    weight = torch.cat([on_ctx, on_own], -1).float().softmax(-1).to(q.dtype)
    out = weight[..., :S].reshape(b, kv, n * B * g, S) @ ctx_v.transpose(1, 2)
    out = out.view(b, kv, n, B * g, hd) + weight[..., S:].reshape(b, kv, n, B * g, B) @ own_v
    return out.view(b, kv, n, B, g, hd).permute(0, 2, 3, 1, 4, 5).reshape(b, n, B, heads * hd)


class DraftAttention(nn.Module):
    """Projections of a draft layer; context and block share k_proj, v_proj and k_norm."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.hd = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = Linear(c.hidden_size, self.heads * self.hd, c.attention_bias)
        self.k_proj = Linear(c.hidden_size, self.kv * self.hd, c.attention_bias)
        self.v_proj = Linear(c.hidden_size, self.kv * self.hd, c.attention_bias)
        self.o_proj = Linear(self.heads * self.hd, c.hidden_size, c.attention_bias)
        self.q_norm, self.k_norm = RMSNorm(self.hd, c.rms_norm_eps), RMSNorm(self.hd, c.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., H] -> [..., heads, hd]."""
        return apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.hd))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> two of [..., kv, hd]."""
        k = apply_rope(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv, self.hd))), cos, sin)
        return k, self.v_proj(x).unflatten(-1, (self.kv, self.hd))


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU, as in Qwen3."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual and MLP after attention: attended [..., heads * hd]."""
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """A DFlash drafter. Parameter names are those of the published checkpoints.

    ``lm_head`` and ``embed_tokens`` are set only where the checkpoint has its own; ``d2t`` int64 [draft_vocab] maps the
    ids of a reduced vocabulary to the target's.
    """

    d2t: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fc = Linear(len(c.target_layer_ids) * c.target_hidden_size, c.hidden_size)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rope = rope_from_config(
            {"hidden_size": c.hidden_size, "num_attention_heads": c.num_heads, **c.rope}, c.head_dim
        )
        self.lm_head = Linear(c.hidden_size, c.draft_vocab_size or c.vocab_size) if c.own_head else None
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if c.own_embedding else None
        self.register_buffer("d2t", None, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def blocks(self, anchor_tokens: Tensor, embedding: Tensor) -> Tensor:
        """Embedded blocks [..., B, H] of anchor tokens int [...]; embedding [V, H] is the target's."""
        tokens = F.pad(anchor_tokens.long()[..., None], (0, self.config.drafts), value=self.config.mask_token_id)
        return F.embedding(tokens, embedding if self.embed_tokens is None else self.embed_tokens.weight)

    def context(self, features: Tensor) -> Tensor:
        """Tapped target states [..., m * H_target], layers concatenated in target_layer_ids' order -> [..., H]."""
        return self.hidden_norm(self.fc(features))  # type: ignore[no-any-return]

    def forward(
        self,
        features: Tensor,
        anchor_tokens: Tensor,
        anchors: Tensor,
        embedding: Tensor,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Draft hidden states of many blocks per row (training, replay).

        Args:
            features: [b, S, m * H_target] of a row's tokens; only rows below a block's anchor reach it.
            anchor_tokens: int [b, n], the tokens at the anchors.
            anchors: int [b, n], row indices of the anchors, 0..S.
            embedding: [V, H], the target's.
            positions: int [b, S], rope positions of the rows when documents are packed (then anchors < S).
            starts: int [b, n], first row of each anchor's document when packed.
        Returns:
            [b, n, B, H] after the final norm; slot k predicts the token at anchor + k, slot 0 nothing.
        """
        c, S = self.config, features.shape[1]
        ctx = self.context(features)
        x = self.blocks(anchor_tokens, embedding).to(ctx.dtype)
        slots = torch.arange(c.block_size, device=x.device)
        if positions is None:
            rotate_ctx, first = self.rope(torch.arange(S, device=x.device)[None]), anchors
        else:
            rotate_ctx, first = self.rope(positions), positions.gather(1, anchors.long())
        rotate_own = self.rope(first[..., None] + slots)
        seen = {w: visible_context(anchors, starts, S, c.block_size, w) for w in set(c.windows)}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            h, attn = layer.input_layernorm(x), layer.self_attn
            own_k, own_v = attn.keys_values(h, *rotate_own)
            ctx_k, ctx_v = attn.keys_values(ctx, *rotate_ctx)
            q = attn.queries(h, *rotate_own)
            x = layer.close(x, block_attention(q, ctx_k, ctx_v, own_k, own_v, seen[c.windows[i]], c.causal[i]))
        return self.norm(x)  # type: ignore[no-any-return]

    def extend(self, cache: Tensor, features: Tensor, rows: Tensor) -> None:
        """Write context keys and values of features [R, n, m * H_target] at rows int64 [R, n] (= positions).

        Args:
            cache: [layers, 2, R, rows, kv_heads, head_dim]; see ddtree.kvcache.
        """
        ctx, rotate = self.context(features), self.rope(rows)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            k, v = layer.self_attn.keys_values(ctx, *rotate)
            write_rows(cache[i, 0], rows, k)
            write_rows(cache[i, 1], rows, v)

    def draft(
        self, root_tokens: Tensor, cache: Tensor, lengths: Tensor, embedding: Tensor, attend: tuple[Attend, Attend]
    ) -> Tensor:
        """Draft one block per request over the context cache.

        The block's own keys and values go to rows lengths..lengths+B-1 and are overwritten by the next ``extend``.

        Args:
            root_tokens: int [R], the anchors' tokens. lengths: int64 [R], context rows = anchors' positions.
            attend: attention of the block over the cache, for non-causal and for causal layers (see block_words).
        Returns:
            [R, B, H] after the final norm.
        """
        c = self.config
        x = self.blocks(root_tokens, embedding).to(self.fc.weight.dtype)
        rows = lengths.long()[:, None] + torch.arange(c.block_size, device=x.device)
        rotate = self.rope(rows)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DraftLayer)
            h, attn = layer.input_layernorm(x), layer.self_attn
            k, v = attn.keys_values(h, *rotate)
            write_rows(cache[i, 0], rows, k)
            write_rows(cache[i, 1], rows, v)
            out = attend[c.causal[i]](attn.queries(h, *rotate), cache[i, 0], cache[i, 1], c.windows[i])
            x = layer.close(x, out.flatten(-2))
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Logits over the drafter's own vocabulary; head [V, H] is the target's, used unless the drafter has one."""
        return F.linear(hidden, head.to(hidden.dtype)) if self.lm_head is None else self.lm_head(hidden)

    def bytes(self) -> int:
        """Of all weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def top(self, hidden: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Best log-probabilities of every drafted position and their ids in the target's vocabulary.

        Args:
            hidden: [R, B, H] of draft.
        Returns:
            values float32 [R, K, T], ids int64 [R, K, T]; T = min(count, vocabulary).
        """
        values, ids = top_logprobs(self.logits(hidden[:, 1:], head), count)
        return values, ids if self.d2t is None else self.d2t[ids]


def block_words(block_size: int, causal: bool, requests: int, device: torch.device) -> Tensor:
    """Visibility among a block's own slots as bit words, int64 [R, B, W]: all of them, or up to one's own."""
    bits = self_bits(block_size, device)
    seen = bits.cumsum(0) if causal else bits.sum(0, keepdim=True).expand(block_size, n_words(block_size))
    return seen.expand(requests, -1, -1)
