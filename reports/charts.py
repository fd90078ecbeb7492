"""Two small charts of a measurement, as SVG files beside a report and as bars on a terminal.

The SVG ones need the extra ``ddaudit[charts]`` (matplotlib); the same numbers give the same bytes. tau is tokens per
round, bonus included.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from reports.text import visible

_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e")


@dataclass(frozen=True)
class Round:
    """One way to decode at one batch size: seconds per round (CUDA graphs on), tokens committed per round."""

    batch: int
    name: str  # "plain", "chain", "tree 8", ...
    seconds: float
    tau: float

    @property
    def speed(self) -> float:
        """Tokens per second of one sequence."""
        return self.tau / self.seconds


def acceptance_svg(reached: Mapping[str, Sequence[float]]) -> str:
    """Share of rounds that accepted the drafts up to each position, one line a method. Raises ModuleNotFoundError
    without matplotlib."""
    figure, axes = _figure()
    for colour, (name, shares) in zip(_cycle(len(reached)), reached.items(), strict=True):
        positions = range(1, len(shares) + 1)
        axes.plot(positions, shares, marker="o", markersize=3.5, linewidth=1.6, color=colour, label=_label(name))
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of rounds accepted up to here")
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, axes)


def break_even_svg(rounds: Sequence[Round]) -> str:
    """Speed against the chain by batch size: above 1 a method pays. Batch sizes without a chain are left out."""
    figure, axes = _figure()
    chains = {r.batch: r.speed for r in rounds if r.name == "chain"}
    names = list(dict.fromkeys(r.name for r in rounds if r.name != "chain"))
    for colour, name in zip(_cycle(len(names)), names, strict=True):
        points = sorted((r.batch, r.speed / chains[r.batch]) for r in rounds if r.name == name and r.batch in chains)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            color=colour,
            label=_label(name),
        )
    axes.axhline(1.0, color="#59636e", linewidth=1, linestyle="--", label="chain (break-even)")
    axes.set_xscale("log", base=2)
    batches = sorted(chains)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_ylabel("speed / chain")
    axes.set_ylim(bottom=0)
    return _svg(figure, axes)


def acceptance_bars(reached: Mapping[str, Sequence[float]], width: int = 40) -> Table:
    """The first chart for a terminal: one bar a position and method."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for number, (name, shares) in enumerate(reached.items()):
        for position, share in enumerate(shares, 1):
            filled = round(max(0.0, min(1.0, share)) * width)
            bar = Text("█" * filled, style=_COLOURS[number % len(_COLOURS)])
            bar.append("░" * (width - filled), style="dim")
            table.add_row(
                Text(_label(name) if position == 1 else ""), Text(f"{position:>2}"), bar, Text(f"{share:5.1%}")
            )
    return table


def _figure() -> tuple[Any, Any]:
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "ddaudit", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    )
    figure = figures.Figure(figsize=(6.0, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d1d9e0", linewidth=0.6)
    return figure, axes


def _svg(figure: Any, axes: Any) -> str:
    axes.legend(frameon=False, fontsize=8)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "ddaudit"})
    return out.getvalue()


def _cycle(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _label(name: str) -> str:
    # A dollar would start a formula, an underscore hides the line from the legend.
    return visible(name).replace("$", r"\$").lstrip("_")[:40] or "?"
