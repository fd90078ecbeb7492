"""plan: what a run will cost, by arithmetic alone. No GPU, no weights: the target's config.json is enough.

FLOPs are counted per document of S tokens with n anchors and blocks of B: the target's prefill up to the last
tapped layer (2 per weight and token), fc and the context keys and values (forward, weight and, behind fc, input
gradients), the block's layers (3 forward-equivalents), attention of each slot over half the document, and the
frozen head (logits, and their gradient back to the hidden states; no weight gradient).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddtree.training.errors import PreflightError
from ddtree.training.export import draft_heads
from ddtree.training.target import default_layer_ids


@dataclass(frozen=True)
class Shapes:
    """Of target and drafter."""

    hidden: int
    inner: int
    heads: int
    kv: int
    head_dim: int
    vocab: int
    target_layers: int
    target_parameters: int
    layer_parameters: int  # of one target layer
    draft_heads: int
    draft_kv: int
    draft_head_dim: int
    draft_layers: int
    taps: int
    last_tap: int

    @property
    def drafter_layer(self) -> int:
        """Weights of a draft layer."""
        attention = self.hidden * self.draft_head_dim * (2 * self.draft_heads + 2 * self.draft_kv)
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden + 2 * self.draft_head_dim

    @property
    def drafter(self) -> int:
        """Trained weights: fc, norms, layers."""
        return self.taps * self.hidden**2 + 2 * self.hidden + self.draft_layers * self.drafter_layer


def shapes(config: dict[str, Any], draft_layers: int = 5, layer_ids: tuple[int, ...] = ()) -> Shapes:
    """Shapes from a target's config.json. GDN layers count as attention layers of equal width: an estimate.

    Raises:
        PreflightError: a config without the needed keys.
    """
    text = {**config, **(config.get("text_config") or {})}
    try:
        H, layers, heads, V = (
            text[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        )
        inner = text["intermediate_size"]
    except KeyError as error:
        raise PreflightError("target-config", f"config.json has no {error}") from None
    hd = text.get("head_dim") or H // heads
    kv = text.get("num_key_value_heads") or heads
    layer = H * hd * (2 * heads + 2 * kv) + 3 * H * inner + 2 * H
    ids = layer_ids or default_layer_ids(layers)
    total = layers * layer + V * H * (1 if text.get("tie_word_embeddings") else 2) + H
    own = draft_heads(SimpleNamespace(**text))
    return Shapes(H, inner, heads, kv, hd, V, layers, total, layer, *own, draft_layers, len(ids), max(ids))


@dataclass(frozen=True)
class Cost:
    """Of one document, in FLOP."""

    prefill: float
    context: float
    blocks: float
    head: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.prefill + self.context + self.blocks + self.head


def cost(s: Shapes, tokens: float, anchors: float, block: int) -> Cost:
    """FLOP of one document in one epoch: target prefill and drafter step."""
    wide, narrow = s.draft_heads * s.draft_head_dim, s.draft_kv * s.draft_head_dim
    prefill = 2 * s.layer_parameters * (s.last_tap + 1) * tokens + 2 * s.heads * s.head_dim * tokens**2 * (
        s.last_tap + 1
    )
    context = 4 * s.taps * s.hidden**2 * tokens + 6 * s.draft_layers * 2 * s.hidden * narrow * tokens
    rows = anchors * block
    attention = 4 * wide * (tokens / 2 + block) * s.draft_layers * rows
    blocks = 6 * s.draft_layers * s.drafter_layer * rows + 3 * attention
    head = 4 * s.vocab * s.hidden * anchors * (block - 1)
    return Cost(prefill, context, blocks, head)


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    target: float
    drafter: float  # float32 weights, gradients and two moments; bfloat16 copies made on the way
    features: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Peak: the sum."""
        return self.target + self.drafter + self.features + self.activations + self.logits


def memory(
    s: Shapes, width: int, rows: int, anchors: int, block: int, chunk: int = 1024, gpus: int = 1, sharded: bool = False,
) -> Memory:  # fmt: skip
    """Peak per GPU of a micro-batch of ``rows`` packed rows of ``width`` tokens with ``anchors`` blocks each."""
    share = gpus if sharded else 1
    slots, tokens = rows * anchors * block, rows * width
    wide, narrow = s.draft_heads * s.draft_head_dim, s.draft_kv * s.draft_head_dim
    # The compiled backward pass keeps, per layer: both residuals, q, k, v, attention's output, gate and up; attention
    # weights in bfloat16. Norms and products are made again. (Eager, the activations are about 2.2 times as much.)
    per_slot = 2 * s.hidden + 2 * wide + 2 * narrow + 2 * s.inner
    scores = rows * s.draft_heads * anchors * block * (width + block)
    return Memory(
        target=2.0 * s.target_parameters,
        drafter=16.0 * s.drafter / share + 2.0 * s.drafter,
        features=2.0 * tokens * s.taps * s.hidden * 2,
        activations=(2.0 * slots * per_slot + 2.0 * scores + 4.0 * tokens * narrow) * s.draft_layers,
        logits=chunk * s.vocab * 4.0 + 4.0 * slots * s.hidden,
    )


@dataclass(frozen=True)
class Plan:
    """What plan prints."""

    drafter_parameters: int
    target_parameters: int
    rows: int
    tokens: float
    epochs: float
    tflop_per_row: float
    prefill_share: float
    hours: float
    tokens_per_s_per_gpu: float
    generation_hours: float
    memory: dict[str, float]
    disk: dict[str, float]
    states_if_cached: float


def plan(
    config: dict[str, Any], rows: int, mean_tokens: float, response_share: float = 0.9, gpus: int = 8,
    anchors: int = 256, block: int = 16, layers: int = 5, epochs: float = 3.0, width: int = 4096, tflops: float = 989.0,
    mfu: float = 0.28, generate_tok_s: float = 2500.0, keep: int = 2, sharded: bool = False,
) -> Plan:  # fmt: skip
    """Arithmetic of a whole run.

    Args:
        tflops: dense bfloat16 peak of one GPU. mfu: share of it that is reached; 0.28 is what this trainer,
            compiled, measured on one H200 at a Qwen3-8B shape with 256 anchors.
        generate_tok_s: response tokens per second and GPU (measure it on 500 rows first).
        anchors: blocks of a document, at most; a short document has half its response tokens.
    """
    s = shapes(config, layers)
    n = min(anchors, 0.5 * response_share * mean_tokens)
    one = cost(s, mean_tokens, n, block)
    rate = tflops * 1e12 * mfu
    per_row = max(1, round(width / mean_tokens))
    use = memory(s, width, 1, int(n * per_row), block, gpus=gpus, sharded=sharded)
    return Plan(
        drafter_parameters=s.drafter,
        target_parameters=s.target_parameters,
        rows=rows,
        tokens=rows * mean_tokens,
        epochs=epochs,
        tflop_per_row=one.total / 1e12,
        prefill_share=one.prefill / one.total,
        hours=rows * epochs * one.total / rate / gpus / 3600,
        tokens_per_s_per_gpu=mean_tokens * rate / one.total,
        generation_hours=rows * mean_tokens * response_share / generate_tok_s / gpus / 3600,
        memory={**asdict(use), "total": use.total},
        disk={
            "tokens": rows * (mean_tokens * 4 + 400),
            "checkpoints": (keep + 1) * 12.0 * s.drafter,
            "export": 2.0 * s.drafter,
        },
        states_if_cached=rows * mean_tokens * s.taps * s.hidden * 2,
    )


def text(p: Plan, gpus: int) -> str:
    """The plan for people."""
    gb = 1e9
    lines = [
        f"drafter      {p.drafter_parameters / 1e6:,.1f} M parameters ({2 * p.drafter_parameters / gb:.2f} GB bf16)",
        f"target       {p.target_parameters / 1e9:,.2f} B parameters ({2 * p.target_parameters / gb:.1f} GB bf16)",
        f"data         {p.rows:,} rows, {p.tokens / 1e9:,.3f} B tokens, {p.epochs:g} epochs",
        f"compute      {p.tflop_per_row:,.1f} TFLOP a row and epoch, {p.prefill_share:.0%} of it the target's prefill",
        f"speed        {p.tokens_per_s_per_gpu:,.0f} tokens/s per GPU",
        f"generate     {p.generation_hours:,.1f} h on {gpus} GPUs",
        f"train        {p.hours:,.1f} h on {gpus} GPUs",
        "per GPU      " + ", ".join(f"{k} {v / gb:.1f}" for k, v in p.memory.items()) + " GB",
        "disk         " + ", ".join(f"{k} {v / gb:.1f}" for k, v in p.disk.items()) + " GB",
        f"not cached   {p.states_if_cached / 1e12:,.2f} TB of hidden states, computed again in each epoch instead",
    ]
    return "\n".join(lines)


def read_config(folder: Path) -> dict[str, Any]:
    """A target's config.json.

    Raises:
        PreflightError: ``target-missing``.
    """
    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise PreflightError("target-missing", f"{file} does not exist")
    return dict(json.loads(file.read_text()))
