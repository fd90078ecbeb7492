"""Ranks, gradients across them, and signals: what the training loop needs of torch.distributed, with or without it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddtree.drafter import Drafter


def init_distributed() -> torch.device:
    """Join torchrun's process group when started by it; returns this rank's device."""
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo")
        return torch.device("cuda", local) if cuda else torch.device("cpu")
    return torch.device("cuda" if cuda else "cpu")


def wrap(drafter: Drafter, sharding: str) -> nn.Module:
    """DDP, or FSDP2 with float32 master shards, when there is a process group; the drafter itself otherwise.

    FSDP2 shards weights, gradients and moments at the root: a drafter's bfloat16 weights fit whole for one pass.
    """
    if not dist.is_initialized():
        return drafter
    if sharding == "ddp":
        return DistributedDataParallel(drafter)
    from torch.distributed.fsdp import fully_shard

    fully_shard(drafter)
    return drafter


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only with the last micro-batch of a step."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    synchronise = getattr(model, "set_requires_gradient_sync", None)  # FSDP2 adds it
    if callable(synchronise):
        synchronise(last)
    yield


def add_up(value: Tensor) -> None:
    """Replace a tensor by its sum over ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)


def on_any(flag: bool, device: torch.device) -> bool:
    """True on every rank if on one: all must stop at the same step."""
    if not dist.is_initialized():
        return flag
    t = torch.tensor(float(flag), device=device)
    dist.all_reduce(t)
    return bool(t.item() > 0)


def apply_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, weight: Tensor, world: int, rate: float, clip: float
) -> Tensor:
    """Divide by the global weight, clip, step. DDP and FSDP averaged over ranks: undo that. Returns the norm."""
    scale = world / weight.clamp(min=1e-12)
    parameters = [p for p in model.parameters() if p.grad is not None]
    for p in parameters:
        assert p.grad is not None
        getattr(p.grad, "_local_tensor", p.grad).mul_(scale)
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    full = getattr(norm, "full_tensor", None)
    return full() if full is not None else norm


def agreed(value: int, device: torch.device) -> int:
    """Rank 0's value."""
    if not dist.is_initialized():
        return value
    t = torch.tensor(value, device=device)
    dist.broadcast(t, 0)
    return int(t.item())


class Signals:
    """SIGTERM and SIGUSR1 ask for a save and an orderly end after the current step."""

    def __enter__(self) -> Signals:
        self.asked = False
        self.old: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGTERM, signal.SIGUSR1):
                self.old[sig] = signal.signal(sig, self._ask)
        return self

    def _ask(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked = True

    def __exit__(self, *_exc: object) -> None:
        for sig, handler in self.old.items():
            signal.signal(sig, handler)
