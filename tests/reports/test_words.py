"""The words of a report cover every question, and its text helpers hold their promises."""

from __future__ import annotations

import pytest

from reports.model import VERDICT_IDS
from reports.text import code, count, fence, listed, one_line, prose, table, visible
from reports.words import GLOSSARY, MEANING, STAGES


def test_every_question_has_its_meaning_and_the_glossary_ten_lines() -> None:
    assert set(MEANING) == set(VERDICT_IDS)
    assert len(GLOSSARY) == 10
    assert {id for id, _, _ in STAGES} <= set(VERDICT_IDS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\udcff", "\\xff"),
        ("\ud800", "\\ud800"),
        ("a\u202eb", "a\\u202eb"),
        ("\x9b", "\\x9b"),
        ("é…日本", "é…日本"),
    ],
)
def test_hidden_characters_are_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown == one_line(text)


@pytest.mark.parametrize(
    ("text", "span"),
    [("a", "`a`"), ("a`b", "``a`b``"), ("`a`", "`` `a` ``"), ("", "—"), ("a\nb", "`a\\nb`"), ("``", "``` `` ```")],
)
def test_code_spans(text: str, span: str) -> None:
    assert code(text) == span


def test_fences_are_longer_than_what_they_hold() -> None:
    assert fence("a\n````\nb", "py") == "`````py\na\n````\nb\n`````"
    assert fence("a\r\nb\r\n") == "```\na\nb\n```"


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a `b_c` d", "a `b_c` d"),
        ("a `b", "a \\`b"),
        ("- x", "\\- x"),
        ("# x", "\\# x"),
        ("1. x", "1\\. x"),
        ("0.33.0", "0.33.0"),
        ("num_accepted_tokens and _x", "num_accepted_tokens and \\_x"),
        ("a > b < c", "a > b &lt; c"),
        ("@user a@b", "&#64;user a@b"),
        ("*_mtp", "\\*\\_mtp"),
    ],
)
def test_prose(text: str, markdown: str) -> None:
    assert prose(text) == markdown


def test_tables_and_counts() -> None:
    assert table(("a", "b"), [("x|y", "1\n2")]).split("\n")[-1] == "| x\\|y | 1 2 |"
    assert (count(1, "file"), count(3231, "file"), count(2, "entry", "entries")) == (
        "1 file",
        "3,231 files",
        "2 entries",
    )
    assert (listed([]), listed(["a"]), listed(["a", "b", "c"])) == ("none", "a", "a, b and c")
