"""The Markdown report: the answer first, nothing of a host's text as markup, the same bytes from the same audit."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reports import summary
from reports.links import sentence
from reports.markdown import render
from reports.model import Audit, Install, Record, audit_from_json, to_json
from reports.text import brief
from tests.reports.samples import EVIDENCE, SAMPLER, audit, everywhere, item, verdict

MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})


def test_the_answer_stands_in_the_first_three_lines() -> None:
    first = render(audit()).split("\n")[:3]
    assert first[0].startswith("# No verifier in vLLM 0.33.0 walks a tree")
    assert "2 accept functions are all chains" in first[0]
    assert "build no, mask partial, walk no, commit no" in first[1] and "3,231 files, all as released" in first[1]
    assert "standalone" in first[2]
    assert [line.lstrip("#- *").rstrip("*") for line in first] == summary.lines(audit())


@pytest.mark.parametrize(
    ("walk", "commit", "says"),
    [
        ("yes", "yes", "Yes: vLLM 0.33.0 verifies a tree"),
        ("yes", "no", "walks a tree, but the path that it accepted is not kept by index."),
        ("partial", "no", "switched off or that no sampler reaches"),
        ("unknown", "no", "Cannot tell"),
        ("no", "no", "No verifier in vLLM 0.33.0 walks a tree"),
    ],
)
def test_the_headline_follows_the_verdicts(walk: str, commit: str, says: str) -> None:
    changed = audit(verdicts=(verdict("tree-walk", walk), verdict("tree-commit", commit)))
    assert says in summary.headline(changed)


def test_a_scan_that_did_not_get_there_does_not_answer_no() -> None:
    assert summary.headline(audit(verdicts=())).startswith("Not answered")
    assert "not judged" in render(audit(verdicts=()))


def test_every_section_is_there_and_each_verdict_has_its_details() -> None:
    text = render(audit())
    for title in (
        "Recommendation: standalone",
        "The install and its integrity",
        "The four stages",
        "Every verifier found",
        "The other questions",
        "Models and flags",
        "Measured on the host",
        "Details, one question each",
        "Assumptions tested",
        "The trail",
        "Seen and dismissed",
        "Scope",
        "Check every finding by hand",
        "What would change these answers",
        "What went wrong during the audit",
        "Glossary",
    ):
        assert f"\n## {title}\n" in text, title
    for found in audit().verdicts:
        assert f"<b>{found.id}</b>" in text


def test_links_lead_to_the_tag_only_where_the_file_is_the_releases() -> None:
    address = f"https://github.com/vllm-project/vllm/blob/v0.33.0/{SAMPLER}#L793"
    assert address in render(audit())
    for record, version in (
        (Record("changed", changed=(SAMPLER,)), "0.33.0"),
        (Record("changed", orphans=(SAMPLER,)), "0.33.0"),
        (Record("unknown"), "0.33.0"),
        (Record("clean"), "0.33.0+fork"),
        (Record("clean"), "0.34.0.dev12"),
    ):
        assert "#L793" not in render(audit(install=Install(version, record)))
    overlay = audit(verdicts=(verdict("verifiers", "yes", items=(item(origin="pythonpath:0"),)),), assumptions=())
    assert "#L793" not in render(overlay)


def test_a_file_that_an_overlay_replaces_is_linked_nowhere() -> None:
    ours = dataclasses.replace(audit().verdicts[2].evidence[0], origin="pythonpath:0")
    text = render(audit(verdicts=(verdict("tree-walk", "no", f"see {SAMPLER}:793", evidence=(ours,)),)))
    assert f"`{SAMPLER}:793`" in text and "#L793" not in text and "of `pythonpath:0`" in text


def test_places_in_sentences_are_linked_and_code_stays_code() -> None:
    said = f"see {SAMPLER}:793 and `{SAMPLER}:12`, not `cat {SAMPLER}:5 | x` nor x{SAMPLER} or a/b.py:3, mixed_qkv"
    text = sentence(audit(), said)
    base = f"https://github.com/vllm-project/vllm/blob/v0.33.0/{SAMPLER}"
    assert text.startswith(f"see [`{SAMPLER}:793`]({base}#L793) and [`{SAMPLER}:12`]({base}#L12), not `cat ")
    assert text.endswith("or `a/b.py:3`, mixed_qkv")


def test_what_differs_from_the_release_is_named_before_anything_else_of_the_install() -> None:
    text = render(
        audit(install=Install("0.33.0", Record("changed", ("vllm/a.py",), ("vllm/b.py",), ("vllm/c.py",), 3231)))
    )
    assert "NOT as released: 1 changed (vllm/a.py)" in text.split("\n")[1]
    for name in ("vllm/a.py", "vllm/b.py", "vllm/c.py"):
        assert f"- `{name}`" in text


def test_only_the_line_of_its_making_tells_two_scans_apart() -> None:
    first = audit()
    second = dataclasses.replace(first, made=dataclasses.replace(first.made, at="2027-01-01T00:00:00Z", seconds=9.0))
    pairs = zip(render(first).split("\n"), render(second).split("\n"), strict=True)
    assert [a for a, b in pairs if a != b] == [
        line for line in render(first).split("\n") if line.startswith("Audit of ")
    ]


def test_json_renders_to_the_same_bytes() -> None:
    for one in (audit(), everywhere(audit(), "\x1b[31m `</details>` | \udcff")):
        again = audit_from_json(json.loads(json.dumps(to_json(one))))
        assert again == one
        assert render(again) == render(one)


HOSTILE = (
    "\x1b[31mred\x1b[0m",
    "</details></summary><script>alert(1)</script>",
    "```\n# Owned\n```",
    "````` five",
    "a | b | c",
    "[x](http://evil.example)",
    "![x](http://evil.example/x.png)",
    "<img src=x onerror=alert(1)>",
    "@somebody look",
    "\u202egnp.exe",
    "\r\nlast line",
    "\udcff\udcfe",
    "&lt;b&gt; &amp; <b>",
    "`unbalanced",
    "$x$ ~~y~~ **z** __w__",
    "\x00\x07\x9b2J",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_from_a_host_becomes_markup(text: str) -> None:
    _check(everywhere(audit(), text))


# No digits: in front of a version they make another release.
NASTY = st.one_of(
    st.sampled_from("`|<>&[]()*_~#@\\!\n\r\t\x1b\x00\u202e\udcff -/:a"), st.characters(exclude_categories=("Nd",))
)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=NASTY, min_size=1, max_size=40))
def test_no_text_at_all_becomes_markup(text: str) -> None:
    _check(everywhere(audit(), text))


def _check(hostile: Audit) -> None:
    """The report has the same skeleton (headings, tables, folds, links) as without the hostile text, and no raw control
    character."""
    rendered = render(hostile)
    rendered.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", rendered)
    assert _skeleton(rendered) == _skeleton(render(everywhere(audit(), "x y ")))


def _skeleton(text: str) -> list[str]:
    kept = (
        "heading_open",
        "table_open",
        "tr_open",
        "td_open",
        "html_block",
        "html_inline",
        "link_open",
        "image",
        "fence",
        "strong_open",
        "s_open",
    )
    found = []
    for token in MARKDOWN.parse(text):
        for part in [token, *(token.children or [])]:
            if part.type == "link_open":
                found.append(f"link {str(part.attrs['href']).split('#')[0].split('/')[0]}")
            elif part.type == "html_block":
                found.append(re.sub(r"<summary>.*</summary>", "<summary>", part.content.strip()))
            elif part.type in kept:
                found.append(part.type)
    return found


def test_how_a_verifier_is_reached_is_said() -> None:
    items = (
        item("a", via=["Runner.sample", "Sampler.forward"], also_accepts=["ratio"]),
        item("b", reachable=False, off="VLLM_TREE", origin="changed file"),
        item("c", reachable=False, shape="tree"),
    )
    text = render(audit(verdicts=(verdict("verifiers", "yes", items=items),)))
    assert "- `a`: `Runner.sample` → `Sampler.forward`" in text and "| greedy, ratio |" in text
    assert "only if `VLLM_TREE`, which is off" in text and "**(changed file)**" in text
    assert "| **tree** | greedy | V1 | **no** |" in text


def test_a_check_by_hand_says_what_it_prints() -> None:
    checks = (
        verdict("tree-walk", "no", recheck="grep -c x vllm/a.py", recheck_expect="17\n"),
        verdict("tree-build", "yes", recheck="sed -n 10,12p vllm/a.py"),
        verdict("tree-mask", "partial", recheck="grep -rn qq_bias vllm || true"),
        verdict("verifiers", "yes", recheck="grep -n def vllm/a.py", evidence=(EVIDENCE, EVIDENCE)),
    )
    text = render(audit(verdicts=checks))
    for said in ("17", "(prints 3 lines: 10 to 12 of the file)", "(prints nothing)", "(prints 2 lines, one a function"):
        assert f"#= {said}" in text


def test_a_summary_in_a_table_is_brief() -> None:
    assert brief("V2 A (a/b.py:3), V2 B (a/b.py:3), V1 C (a/c.py:3)") == "V2 A, V2 B (a/b.py:3), V1 C (a/c.py:3)"
    signature = "takes (" + "argument, " * 40 + ")"
    assert brief(f"none fits; it lacks 2; {signature}; more") == "none fits; it lacks 2; … (all of it: see the details)"
    own = (
        "distutils-precedence.pth: import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') "
        "== 'local'; enabled and __import__('_distutils_hack').add_shim();"
    )
    named = "distutils-precedence.pth (setuptools' own)"
    assert brief(f"a 1.0; {own}; b") == f"a 1.0; {named}; b" and brief(f"{own} (and 2 entry points)").startswith(named)
    assert "evil" in brief(f"{own} import evil")


def test_long_lists_are_folded_and_long_lines_cut() -> None:
    many = tuple(f"vllm/f{n}.py" for n in range(50))
    text = render(audit(install=Install("0.33.0", Record("changed", changed=many))))
    assert "<details><summary>Changed after the release" in text
    long = dataclasses.replace(audit().verdicts[2].evidence[0], snippet="x" * 10_000)
    text = render(audit(verdicts=(verdict("tree-walk", "no", evidence=(long,)),)))
    assert "more characters)" in text and max(map(len, text.split("\n"))) < 2_000
