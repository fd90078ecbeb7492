"""A training run's folder, and checkpoints that any number of ranks can go on from.

    run/config.json      settings, target, data: what a resumed run must agree with
    run/metrics.jsonl    one JSON object a logged step;  run/tensorboard/ the same
    run/step-000500/     model.safetensors (float32), optimizer.pt, state.json;  run/latest names the newest
    run/best/            the drafter with the best replay tau, and tau.json

State dicts are whole (not sharded) and hold no rank's own randomness: the data plan is a function of the step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ddtree.training.errors import ResumeError
from ddtree.training.files import atomic, read_json, write_json, write_text

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def begin(folder: Path, config: dict[str, Any]) -> None:
    """Write the run's config, or refuse to go on with another one.

    Raises:
        ResumeError: ``run-config-changed`` naming what differs.
    """
    file = folder / "config.json"
    config = json.loads(json.dumps(config))
    if file.exists():
        known = read_json(file)
        changed = sorted(k for k in {*known, *config} if known.get(k) != config.get(k))
        if changed:
            detail = "; ".join(f"{k}: {known.get(k)!r} -> {config.get(k)!r}" for k in changed)
            raise ResumeError(
                "run-config-changed", f"{folder}: {detail}"[:600], "use another --out, or the same settings"
            )
    elif rank() == 0:
        write_json(file, config)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights, float32, on the CPU of rank 0 (all ranks call)."""
    return {k: v for k, v in get_model_state_dict(model, options=_WHOLE).items() if isinstance(v, Tensor)}


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> None:
    """Save after ``step`` optimiser steps (all ranks call; rank 0 writes), then drop all but the newest ``keep``."""
    weights = whole_weights(model)
    moments = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    if rank() == 0:
        with atomic(folder / f"step-{step:06d}") as tmp:
            tmp.mkdir()
            save_file({k: v.contiguous() for k, v in weights.items()}, tmp / "model.safetensors")
            torch.save(moments, tmp / "optimizer.pt")
            (tmp / "state.json").write_text(json.dumps({"step": step, **state}))
        write_text(folder / "latest", f"step-{step:06d}\n")
        for old in sorted(folder.glob("step-??????"))[:-keep]:
            shutil.rmtree(old)
    if dist.is_initialized():
        dist.barrier()


def newest(folder: Path) -> Path | None:
    """The newest checkpoint. A folder of that name is whole, so it counts even if a kill came before ``latest``."""
    found = sorted(folder.glob("step-??????"))
    return found[-1] if found else None


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the newest checkpoint into model and optimiser; None when there is none."""
    at = newest(folder)
    if at is None:
        return None
    weights = load_file(at / "model.safetensors")
    set_model_state_dict(model, dict(weights.items()), options=StateDictOptions(full_state_dict=True))
    moments = torch.load(at / "optimizer.pt", map_location="cpu", weights_only=True)
    set_optimizer_state_dict(model, optimizer, moments, options=StateDictOptions(full_state_dict=True))
    return dict(read_json(at / "state.json"))


def truncate_metrics(folder: Path, step: int) -> None:
    """Forget metrics of steps after ``step``: a killed run logged past its last checkpoint, and will log them again."""
    file = folder / "metrics.jsonl"
    if file.exists():
        kept = [line for line in file.read_text().splitlines() if _step_of(line) <= step]
        write_text(file, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):  # a line cut by the kill
        return float("inf")
