"""The terminal's summary and the three plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from reports import summary, terminal
from tests.reports.samples import audit, everywhere
from tests.reports.test_markdown import HOSTILE


def shown(one: object, width: int = 100, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    console.print(terminal.render(one))  # type: ignore[arg-type]
    return out.getvalue()


def test_one_screen_with_the_answer_on_top() -> None:
    text = shown(audit())
    lines = text.split("\n")
    assert lines[0].startswith("No verifier in vLLM 0.33.0 walks a tree")
    assert "rejection_greedy_sample_kernel" in text and "vllm/v1/sample/rejection_sampler.py:793" in text
    assert all(v.id in text for v in audit().verdicts if not v.id.startswith(("tree-", "verifiers")))
    assert len(lines) < 50 and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    "text", [*HOSTILE, "[bold red]x[/bold red]", "[link=http://evil.example]x[/link]", ":skull:", "[/]"]
)
def test_a_hosts_text_is_text(text: str) -> None:
    hostile = everywhere(audit(), text)
    plain = shown(hostile, width=400)
    assert "\x1b" not in plain and "\x9b" not in plain and "\u202e" not in plain
    if text.startswith(("[", ":")):
        assert text in plain
    coloured = shown(hostile, width=400, colour=True)
    assert "evil.example\x1b\\" not in coloured and "\x1b[2J" not in coloured
    for line in summary.lines(hostile):
        assert line.isprintable()
