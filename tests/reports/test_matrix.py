"""Several audits side by side."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from reports import matrix
from reports.model import Install, Record, Target
from tests.reports.samples import audit, everywhere, verdict
from tests.reports.test_markdown import HOSTILE, MARKDOWN


def test_one_row_a_target_and_the_differences() -> None:
    one = audit(target=Target("a", "ssh"))
    patched = audit(
        target=Target("b", "ssh"),
        install=Install("0.33.0", Record("changed", changed=("vllm/x.py",)), "1"),
        verdicts=(*(v for v in one.verdicts if v.id != "tree-walk"), verdict("tree-walk", "yes")),
    )
    text = matrix.render([one, patched], {"c": "it refused the key"})
    assert text.startswith("# 2 targets audited, 1 failed\n")
    assert "| `a` | `0.33.0` | as released | no | partial | no | no | standalone |" in text
    assert "| `b` | `0.33.0` | 1 differ | no | partial | yes | no | standalone |" in text
    assert "**tree-walk**" in text and "no on `a`; yes on `b`" in text and "**tree-mask**" not in text
    assert "- `c`: it refused the key" in text


def test_alike_is_said() -> None:
    pair = [audit(target=Target(name, "ssh")) for name in "ab"]
    assert "alike" in matrix.render(pair)
    assert "alike" not in matrix.render(pair[:1])
    assert matrix.render([], {"a": "why"}).startswith("# 0 targets audited, 1 failed")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text(text: str) -> None:
    hostile = everywhere(audit(), text)
    other = dataclasses.replace(hostile, verdicts=hostile.verdicts[::2])
    rendered = matrix.render([hostile, other], {text: text})
    rendered.encode()
    tokens = [t.type for block in MARKDOWN.parse(rendered) for t in (block, *(block.children or ()))]
    assert not {"html_block", "html_inline", "image", "link_open", "s_open"} & set(tokens)
    out = io.StringIO()
    Console(file=out, width=300).print(matrix.terminal([hostile], {text: text}))
    assert "\x1b" not in out.getvalue() and "\u202e" not in out.getvalue()
