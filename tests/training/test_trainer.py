"""Training: tau rises, runs resume bitwise, ranks do not matter, a signal or a kill loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddtree.training.errors import DataError, PreflightError, ResumeError
from ddtree.training.metrics import read_metrics
from ddtree.training.pipeline import TrainJob, run_train
from ddtree.training.smoke import smoke_config

from .conftest import World

ROOT = Path(__file__).parents[2]
Trained = tuple[Path, dict[str, object]]


def job(world: World, out: Path, steps: int = 12, **changes: object) -> TrainJob:
    config = replace(smoke_config(steps), eval_every=1000, save_every=1000, log_every=1, **changes)  # type: ignore[arg-type]
    return TrainJob(world.target, [world.train], out, config, [], dtype="float32")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / (out / "latest").read_text().strip() / "model.safetensors")


def losses(out: Path) -> list[float]:
    return [m["loss"] for m in read_metrics(out) if "loss" in m]


def command(world: World, out: Path, steps: int, *extra: str, ranks: int = 1) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [
        sys.executable,
        *run,
        "-m",
        "ddtree.training",
        "train",
        "--target",
        str(world.target),
        "--tokens",
        str(world.train),
        "--out",
        str(out),
        "--steps",
        str(steps),
        "--rows-per-step",
        "4",
        "--rows",
        "2",
        "--width",
        "160",
        "--anchors",
        "48",
        "--anchors-per-doc",
        "48",
        "--block",
        "8",
        "--layers",
        "2",
        "--layer-ids",
        "0,1,2",
        "--mask-token-id",
        "3",
        "--lr",
        "0.004",
        "--dtype",
        "float32",
        "--save-every",
        "5",
        *extra,
    ]


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_tau_rises(trained: Trained) -> None:
    out, _summary = trained
    taus = [m["tau/chain"] for m in read_metrics(out) if "tau/chain" in m]
    assert taus[-1] > 1.3 and taus[-1] >= taus[0]
    first = next(m["anchor_tau"] for m in read_metrics(out) if "anchor_tau" in m)
    assert taus[-1] >= first + 0.3
    assert (out / "best" / "model.safetensors").exists() and list((out / "tensorboard").iterdir())


@pytest.mark.parametrize("kind", ["ce_decay", "tree"])
def test_other_losses_train_too(world: World, tmp_path: Path, kind: str) -> None:
    base = job(world, tmp_path / kind, 12)
    run_train(replace(base, config=replace(base.config, loss=replace(base.config.loss, kind=kind))))
    found = losses(tmp_path / kind)
    assert found[-1] < found[0]


def test_resume_is_bitwise(world: World, tmp_path: Path) -> None:
    run_train(job(world, tmp_path / "whole"))
    part = replace(job(world, tmp_path / "parts"), stop_after=5)
    assert run_train(part)["step"] == 5
    summary = run_train(replace(part, stop_after=0))
    assert summary["step"] == 12
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_changed_setting_is_no_resume(world: World, tmp_path: Path) -> None:
    run_train(replace(job(world, tmp_path / "run"), stop_after=2))
    with pytest.raises(ResumeError, match="run-config-changed"):
        run_train(job(world, tmp_path / "run", lr=1.0))


def test_two_ranks_are_one_with_accumulation(world: World, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    base = job(world, one, 10)
    run_train(replace(base, config=replace(base.config, save_every=5)))
    subprocess.run(command(world, two, 10, ranks=2), env=ENV, check=True, capture_output=True, timeout=300)
    logged = [m for m in read_metrics(two) if "loss" in m]
    mine = {m["step"]: m for m in read_metrics(one) if "loss" in m}
    # the command logs every 20 steps, and at its saves: sums over the steps between
    a, b = weights(one), weights(two)
    assert logged[-1]["blocks"] == sum(mine[s]["blocks"] for s in range(6, 11))
    assert all(torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-5) for k in a)


def test_resume_on_another_number_of_ranks_sharded(world: World, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cli = command(world, whole, 10, "--no-compile")
    subprocess.run(cli, env=ENV, check=True, capture_output=True, timeout=300)
    # five steps on one rank, the rest sharded over two: drop what came after step 5
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "step-000010")
    (parts / "latest").write_text("step-000005\n")
    cli = command(world, parts, 10, "--no-compile", "--sharding", "fsdp", ranks=2)
    subprocess.run(cli, env=ENV, check=True, capture_output=True, timeout=300)
    a, b = weights(whole), weights(parts)
    assert all(torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-5) for k in a)


def test_sigterm_saves_and_a_kill_loses_at_most_a_save(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    cli = command(world, out, 400, "--no-compile")

    def start_and(sig: signal.Signals, wait_for: str) -> int:
        process = subprocess.Popen(cli, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 120
        while not (out / wait_for).exists() and time.time() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(sig)
        return process.wait(60)

    assert start_and(signal.SIGKILL, "step-000005") != 0
    reached = max(int(f.name.removeprefix("step-")) for f in out.glob("step-??????"))
    assert start_and(signal.SIGTERM, f"step-{reached + 5:06d}") == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reason"] == "stopped" and reached < summary["step"] < 400
    saved = json.loads((out / f"step-{summary['step']:06d}" / "state.json").read_text())
    assert saved["step"] == summary["step"]
    steps = [m["step"] for m in read_metrics(out)]
    assert steps == sorted(set(steps)), "no step is logged twice"


def test_warm_start_keeps_the_released_shape(world: World, trained: Trained, tmp_path: Path) -> None:
    start = replace(job(world, tmp_path / "warm", 4), init=trained[0] / "best")
    run_train(start)
    assert losses(tmp_path / "warm")[0] < losses(trained[0])[0] * 0.8
    config = json.loads((tmp_path / "warm" / "config.json").read_text())
    assert config["warm_start"] and config["train"]["block"] == 8


def test_too_little_data_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too-little-data"):
        run_train(job(world, tmp_path / "run", rows_per_step=4000))
    with pytest.raises(PreflightError, match="loss-unknown"):
        replace(smoke_config().loss, kind="best")


def test_a_disk_cache_changes_nothing_and_is_used_again(world: World, tmp_path: Path) -> None:
    run_train(job(world, tmp_path / "plain", 6))
    cached = replace(job(world, tmp_path / "cached", 6), state_budget=50_000_000, state_cache=tmp_path / "states")
    run_train(cached)
    assert losses(tmp_path / "cached") == losses(tmp_path / "plain")
    assert (tmp_path / "plain" / "best" / "config.json").exists(), "without held-out rows the last weights are kept"
    shards = {f: f.stat().st_mtime_ns for f in (tmp_path / "states").rglob("*.bin")}
    assert shards
    run_train(replace(cached, out=tmp_path / "again"))
    assert losses(tmp_path / "again") == losses(tmp_path / "plain")
    assert {f: f.stat().st_mtime_ns for f in shards} == shards
