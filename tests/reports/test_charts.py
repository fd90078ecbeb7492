"""Charts: valid SVG, the same bytes from the same numbers, the numbers in the right places."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from reports import charts
from reports.charts import Round

REACHED = {"chain": [0.9, 0.7, 0.5], "tree 8": [0.95, 0.8, 0.6]}
ROUNDS = [
    Round(b, n, t, tau)
    for b in (1, 8)
    for n, t, tau in (("plain", 0.01, 1.0), ("chain", 0.02, 4.0), ("tree 8", 0.03, 4.5))
]


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_same_numbers_same_bytes() -> None:
    pytest.importorskip("matplotlib")
    assert charts.acceptance_svg(REACHED) == charts.acceptance_svg(REACHED)
    assert charts.break_even_svg(ROUNDS) == charts.break_even_svg(ROUNDS)
    assert charts.acceptance_svg(REACHED) != charts.acceptance_svg({**REACHED, "chain": [0.9, 0.7, 0.4]})


def test_they_say_what_they_show() -> None:
    pytest.importorskip("matplotlib")
    assert {"chain", "tree 8", "draft position"} <= set(texts(charts.acceptance_svg(REACHED)))
    shown = texts(charts.break_even_svg(ROUNDS))
    assert {"plain", "tree 8", "chain (break-even)", "batch size", "1", "8"} <= set(shown)


@pytest.mark.parametrize("name", ["$x_{2", "_hidden", "<script>", "\x1b[31m", "", "a" * 500])
def test_odd_names(name: str) -> None:
    pytest.importorskip("matplotlib")
    assert "<script" not in charts.acceptance_svg({name: [0.5]})
    ElementTree.fromstring(charts.acceptance_svg({name: [0.5]}))


def test_speed_is_tau_over_seconds() -> None:
    assert Round(1, "chain", 0.02, 4.0).speed == pytest.approx(200.0)


def test_bars_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(charts.acceptance_bars({"chain": [1.0, 0.5, 0.0], "[red]": [0.25]}, width=8))
    lines = out.getvalue().rstrip("\n").split("\n")
    assert [line.count("█") for line in lines] == [8, 4, 0, 2]
    assert lines[0].startswith("chain") and "100.0%" in lines[0] and lines[3].startswith("[red]")
