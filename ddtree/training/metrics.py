"""Where numbers go while training: JSON lines, TensorBoard, a progress bar, and a plot of tau over steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Metrics:
    """Writes on one rank; does nothing on the others."""

    def __init__(self, folder: Path, steps: int, start: int, active: bool) -> None:
        self.folder, self.active = folder, active
        self.bar = tqdm(total=steps, initial=start, desc="train", unit="step", disable=not active, mininterval=0.5)
        self.board: Any = None
        if active:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
            except ImportError:
                tqdm.write("tensorboard is not installed: metrics go to metrics.jsonl alone")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One line; numbers also go to TensorBoard."""
        if not self.active:
            return
        with (self.folder / "metrics.jsonl").open("a") as handle:
            handle.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, step)

    def progress(self, steps: int, **shown: str) -> None:
        """Advance the bar."""
        self.bar.update(steps)
        if shown:
            self.bar.set_postfix(shown, refresh=False)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.active:
            tqdm.write(text)

    def close(self) -> None:
        """Flush everything."""
        self.bar.close()
        if self.board is not None:
            self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All logged lines of a run."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def plot_tau(folder: Path, out: Path) -> bool:
    """tau over steps as an image; False when there is nothing to plot or no matplotlib."""
    lines = [m for m in read_metrics(folder) if "tau/chain" in m]
    if not lines:
        return False
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in sorted({k for m in lines for k in m if k.startswith("tau/")}):
        axes.plot([m["step"] for m in lines], [m.get(name) for m in lines], marker=".", label=name.removeprefix("tau/"))
    axes.set(xlabel="step", ylabel="tau (tokens per round, bonus included)", title="replay tau on held-out rows")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return True
