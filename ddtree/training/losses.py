"""Losses of a draft block under the frozen head, without ever holding a graph over logits.

For slot k = 1..B-1 with target y_k, l_k = log q_k(y_k):  L = sum_k w_k * (-l_k) / sum_k w_k,  w detached, both sums
over ranks and accumulation steps (the caller divides once). Weights:

* ``ce_decay``: exp(-(k-1)/g), DFlash (arXiv 2602.06036).
* ``dpace``: sum_{j>=k} prod_{i<=j} ((1-a) q_i + a), the gradient of the smoothed expected chain length (arXiv
  2605.18810).
* ``tree``: with S_d = sum_{k<=d} l_k and theta the log-probability of the budget-th best prefix, a best-first tree
  of that budget accepts #{d : S_d >= theta} drafts. Its smoothed count sum_d sigmoid((S_d - theta)/t) has weights
  sum_{d>=k} sigmoid'; a little ce_decay is added, for the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.training.errors import PreflightError

KINDS = ("ce_decay", "dpace", "tree")


@dataclass(frozen=True)
class LossConfig:
    """Which loss, and its constants."""

    kind: str = "dpace"
    decay: float = 0.0  # g; 0 picks 7 for blocks above 8, else 4
    alpha: float = 0.5  # smoothing of dpace
    budget: int = 64  # tree: the serving budget
    temperature: float = 1.0  # tree: of the sigmoid
    cold: float = 0.15  # tree: share of ce_decay
    top: int = 32  # tree: tokens of a slot that may enter the tree
    chunk: int = 1024  # rows of logits alive at once

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PreflightError("loss-unknown", f"loss {self.kind!r}", f"one of {', '.join(KINDS)}")

    def g(self, block: int) -> float:
        """Decay constant for a block size."""
        return self.decay or (7.0 if block > 8 else 4.0)


def tree_threshold(top: Tensor, budget: int) -> Tensor:
    """Log-probability of the budget-th best prefix of product distributions.

    Prefixes rank by their product and none above its own prefix, so the budget best per depth hold all of the
    budget best.

    Args:
        top: [M, D, K] the best log-probabilities of each slot, sorted; exact for K >= min(budget, vocabulary).
    Returns:
        [M]; -inf when there are fewer prefixes than ``budget``.
    """
    K = min(budget, top.shape[2])
    i, j = torch.meshgrid(torch.arange(budget), torch.arange(K), indexing="ij")
    keep = (i + 1) * (j + 1) <= budget  # a pair with more pairs above it than the budget cannot be kept
    i, j = i[keep].to(top.device), j[keep].to(top.device)
    score = F.pad(top[:, 0, :K], (0, budget - K), value=float("-inf"))
    parts = [score]
    for d in range(1, top.shape[1]):
        score = (score[:, i] + top[:, d, j]).topk(budget, 1).values
        parts.append(score)
    return torch.cat(parts, 1).topk(budget, 1).values[:, -1]


def slot_weights(config: LossConfig, block: int, logq: Tensor, valid: Tensor, theta: Tensor | None) -> Tensor:
    """Detached weights [M, D] from log q(y) [M, D], validity bool [M, D] (a prefix of each block) and theta [M]."""
    logq, mask = logq.detach().float(), valid.float()
    k = torch.arange(logq.shape[1], device=logq.device, dtype=torch.float32)
    decay = torch.exp(-k / config.g(block))
    if config.kind == "ce_decay":
        return decay * mask
    if config.kind == "dpace":
        smooth = (1 - config.alpha) * logq.exp() + config.alpha
        prefix = (smooth * mask + (1 - mask)).cumprod(-1) * mask
        return prefix.flip(-1).cumsum(-1).flip(-1) * mask
    assert theta is not None
    s = torch.sigmoid(((logq * mask).cumsum(-1) - theta[:, None]) / config.temperature)
    slope = s * (1 - s) / config.temperature * mask
    return (slope.flip(-1).cumsum(-1).flip(-1) + config.cold * decay) * mask


@dataclass(frozen=True)
class LossSums:
    """Sums over blocks, on the device; divide by ``weight`` for the loss. All float32."""

    loss: Tensor  # sum of w * -log q
    weight: Tensor  # sum of w
    hits: Tensor  # [D], argmax hits at valid slots
    valid: Tensor  # [D], valid slots
    accepted: Tensor  # sum over blocks of the correct argmax prefix
    blocks: Tensor  # blocks with a valid slot

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(a + b for a, b in zip(self.stacked(), other.stacked(), strict=True)))

    def stacked(self) -> tuple[Tensor, ...]:
        """The fields in order."""
        return self.loss, self.weight, self.hits, self.valid, self.accepted, self.blocks


def _chunk(
    h: Tensor, head: Tensor, y: Tensor, valid: Tensor, config: LossConfig, block: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradient of sum(w * -log q) with respect to h [M, D, H], and the sums of LossSums."""
    logits = F.linear(h, head)
    lse = logits.float().logsumexp(-1)
    logq = logits.gather(-1, y[..., None])[..., 0].float() - lse
    theta = None
    if config.kind == "tree":
        top = logits.topk(min(config.top, config.budget, logits.shape[-1]), -1).values.float() - lse[..., None]
        theta = tree_threshold(top, config.budget)
    w = slot_weights(config, block, logq, valid, theta)
    p = (logits.float() - lse[..., None]).exp()
    hot = torch.arange(logits.shape[-1], device=y.device) == y[..., None]
    grad = ((p - hot.float()) * w[..., None]).to(logits.dtype) @ head
    hit = (logits.argmax(-1) == y) & valid
    mask = valid.float()
    sums = (
        -(logq * w).sum(), w.sum(), hit.float().sum(0), mask.sum(0),
        hit.float().cumprod(-1).sum(), valid.any(-1).float().sum(),
    )  # fmt: skip
    return grad, sums


ChunkFn = Callable[[Tensor, Tensor, Tensor, Tensor, LossConfig, int], tuple[Tensor, tuple[Tensor, ...]]]


@torch.no_grad()
def head_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, valid: Tensor, config: LossConfig, chunk_fn: ChunkFn = _chunk
) -> tuple[LossSums, Tensor]:
    """Loss sums of draft hidden states, and d(sum of w * -log q)/d hidden, a few rows of logits at a time.

    The head is frozen: hand the gradient to ``hidden.backward``. Divide gradients by the global weight sum afterwards.

    Args:
        hidden: [..., D, H], slots 1..B-1 (after the drafter's norm). head: [V, H]. targets: int64 [..., D].
        valid: bool [..., D], true up to some slot of each block and false after it.
        chunk_fn: ``_chunk`` or a compiled version of it.
    """
    D, H = hidden.shape[-2:]
    h, y, ok = hidden.detach().reshape(-1, D, H), targets.reshape(-1, D), valid.reshape(-1, D)
    blocks = max(1, config.chunk // D)
    total: LossSums | None = None
    grads = []
    for i in range(0, len(h), blocks):
        grad, sums = chunk_fn(h[i : i + blocks], head, y[i : i + blocks], ok[i : i + blocks], config, D + 1)
        grads.append(grad)
        total = LossSums(*sums) if total is None else total + LossSums(*sums)
    assert total is not None
    return total, torch.cat(grads).view_as(hidden)
