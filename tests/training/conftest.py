"""One synthetic target, its tokens and one short run, shared by the tests of the training package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ddtree.training.decode import Sampler  # noqa: E402
from ddtree.training.pipeline import TrainJob, run_train  # noqa: E402
from ddtree.training.smoke import make_tokens, smoke_config  # noqa: E402
from ddtree.training.synthetic import make_target  # noqa: E402


@dataclass(frozen=True)
class World:
    work: Path
    target: Path
    train: Path
    held: Path
    greedy: Path


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("training")
    make_target(work / "target", steps=60)
    sampled = Sampler(temperature=0.6, top_k=8, max_new=40)
    held = make_tokens(work, 24, 11, "held", sampled)
    train = make_tokens(work, 160, 12, "train", sampled, [work / "held.jsonl"])
    greedy = make_tokens(work, 12, 13, "greedy", Sampler(max_new=40))
    return World(work, work / "target", train, held, greedy)


@pytest.fixture(scope="session")
def trained(world: World) -> tuple[Path, dict[str, object]]:
    """A finished run of 100 steps, and its summary."""
    out = world.work / "run"
    job = TrainJob(world.target, [world.train], out, smoke_config(100), [world.held], dtype="float32")
    return out, run_train(job)
