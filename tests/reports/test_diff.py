"""The difference of two audits: what moved, which way, by which files."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from reports.diff import compare, render
from reports.model import Install, Record
from tests.reports.samples import EVIDENCE, audit, everywhere, item, verdict
from tests.reports.test_markdown import HOSTILE, MARKDOWN


def test_two_audits_of_one_install_do_not_differ() -> None:
    diff = compare(audit(), audit())
    assert not diff.moved and not diff.lists and set(diff.same) == {v.id for v in audit().verdicts}
    assert "none of 8 moved" in render(audit(), audit())
    assert "same files, byte for byte" in render(audit(), audit())


@pytest.mark.parametrize(
    ("before", "after", "direction"),
    [
        ("no", "yes", "better"),
        ("no", "partial", "better"),
        ("n/a", "yes", "better"),
        ("yes", "no", "worse"),
        ("yes", "partial", "worse"),
        ("n/a", "no", "worse"),
        ("yes", "unknown", "other"),
        ("unknown", "yes", "other"),
        ("no", "n/a", "other"),
    ],
)
def test_directions(before: Any, after: Any, direction: str) -> None:
    old, new = (audit(verdicts=(verdict("gdn-gate-gather", outcome),)) for outcome in (before, after))
    (move,) = compare(old, new).moved
    assert (move.before, move.after, move.direction) == (before, after, direction)


def test_the_files_that_moved_a_verdict_are_named() -> None:
    other = dataclasses.replace(EVIDENCE, sha256="ee" * 32)
    same = dataclasses.replace(EVIDENCE, file="vllm/same.py")
    gone = dataclasses.replace(EVIDENCE, file="vllm/gone.py")
    old = audit(verdicts=(verdict("aux-layer-offset", "no", evidence=(EVIDENCE, same, gone)),))
    new = audit(verdicts=(verdict("aux-layer-offset", "yes", evidence=(other, same)),))
    (move,) = compare(old, new).moved
    assert move.files == (("vllm/gone.py", "before"), (EVIDENCE.file, "changed"))
    text = render(old, new)
    assert (
        "## Better now" in text and "; seen before in" in text and "vllm/gone.py" in text and "vllm/same.py" not in text
    )


def test_lists_say_what_came_and_went() -> None:
    old = audit(verdicts=(verdict("verifiers", "yes", items=(item("a"), item("b"))),))
    new = audit(verdicts=(verdict("verifiers", "yes", items=(item("b", shape="tree"), item("c"))),))
    (change,) = compare(old, new).lists
    assert [text.split()[0] for text in (*change.added, *change.removed)] == ["`c`", "`a`"]
    assert change.changed[0].endswith("shape chain → tree")
    runner = [
        audit(verdicts=(verdict("runner-in-force", "yes", items=({"target": "hybrid", "runner": r},)),))
        for r in ("V1", "V2")
    ]
    assert compare(*runner).lists[0].changed == ("hybrid: runner V1 → V2",)


def test_a_verdict_that_is_missing_in_one_is_said() -> None:
    old, new = audit(verdicts=(verdict("tree-walk", "no"),)), audit(verdicts=(verdict("tree-build", "no"),))
    assert {(m.id, m.before, m.after) for m in compare(old, new).moved} == {
        ("tree-walk", "no", "not judged"),
        ("tree-build", "not judged", "no"),
    }


def test_it_opens_with_what_it_means() -> None:
    old = audit(install=Install("0.20.2", Record("clean", files=1723), "aa"))
    lines = render(old, audit()).split("\n")
    assert lines[0] == "# From vLLM 0.20.2 to vLLM 0.33.0"
    assert lines[2].startswith("- **Before**: No verifier in vLLM 0.20.2") and lines[3].startswith("- **After**: ")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text(text: str) -> None:
    hostile = everywhere(audit(), text)
    rendered = render(hostile, dataclasses.replace(hostile, verdicts=hostile.verdicts[::2]))
    rendered.encode()
    assert "\x1b" not in rendered and "\u202e" not in rendered
    tokens = [t.type for block in MARKDOWN.parse(rendered) for t in (block, *(block.children or ()))]
    assert not {"html_block", "html_inline", "image", "s_open"} & set(tokens)
