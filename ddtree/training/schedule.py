"""The run's settings, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddtree.training.losses import LossConfig
from ddtree.training.packing import Shape


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run's numbers; stored with it, and a resumed run must agree.

    Learning rate 6e-4 from scratch, 1e-4 from a released drafter, AdamW betas .9/.95, no weight decay, cosine after a
    warm-up of 4%, clip 1: what published DFlash trainers agree on.
    """

    steps: int = 0  # 0: epochs decides
    epochs: float = 3.0
    rows_per_step: int = 64  # packed rows of one optimiser step over all ranks
    shape: Shape = field(default_factory=Shape)
    block: int = 16
    layers: int = 5
    layer_ids: tuple[int, ...] = ()  # empty: the default rule
    mask_token_id: int = -1
    loss: LossConfig = field(default_factory=LossConfig)
    lr: float = 0.0  # 0: 6e-4 from scratch, 1e-4 from --init
    min_lr: float = 0.0  # share of lr at the end
    warmup: float = 0.04
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    dtype: str = "bfloat16"  # of activations; weights, gradients and optimiser are float32
    eval_every: int = 500
    eval_rows: int = 256
    eval_budgets: tuple[int, ...] = (16, 64)
    select: str = "chain"  # rule whose replay tau picks the best checkpoint: chain or tree-B
    patience: int = 0  # stop after so many evaluations without a new best; 0 never stops
    save_every: int = 500  # 0 never saves (benchmarks)
    keep: int = 2
    log_every: int = 20
    compile: bool = True

    def learning_rate(self, step: int, steps: int, warm_start: bool) -> float:
        """Rate of optimiser step ``step`` (from 0) of ``steps``: linear warm-up, then cosine."""
        top = self.lr or (1e-4 if warm_start else 6e-4)
        warm = max(1, round(self.warmup * steps))
        if step < warm:
            return top * (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, steps - warm))
        return top * (self.min_lr + (1 - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))
