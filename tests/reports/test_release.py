"""The report of a real release: its script can be run by hand and says what it says, its links have targets, its
trail is there."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache

import pytest

from audit_cli.recommend import recommend
from reports import diff
from reports.markdown import render
from reports.model import Audit, Install, Made, Target, audit_from_json, to_json
from tests.releases import judged, release, unpacked
from tests.reports.test_markdown import MARKDOWN

pytestmark = pytest.mark.wheel


@cache
def audited(version: str) -> Audit:
    judgement, tree, spec = judged(version), release(version), f"pypi:vllm=={version}"
    return Audit(
        target=Target(spec, "pypi"),
        install=Install(tree.vllm_version, tree.record, "ab" * 32),
        verdicts=judgement.verdicts,
        recommendation=recommend(judgement.verdicts, spec=spec, vllm_version=version),
        errors=judgement.errors,
        trail=judgement.trail,
        assumptions=judgement.assumptions,
        made=Made("2026-11-29T00:00:00Z", 1.0, judgement.facts, 0, judgement.rules_sha256),
        ddaudit="0.1.0",
    )


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
def test_the_answer_of_a_release(version: str) -> None:
    lines = render(audited(version)).split("\n")
    assert lines[0].startswith(f"# No verifier in vLLM {version} walks a tree: its 5 accept functions are all chains.")
    build, mask = ("yes", "yes") if version == "0.20.2" else ("no", "partial")
    assert f"build {build}, mask {mask}, walk no, commit no" in lines[1]
    assert "all as released" in lines[1] and "Recommended: standalone" in lines[2]


def test_it_is_short_where_it_is_not_folded() -> None:
    text = render(audited("0.33.0"))
    depth = shown = 0
    for line in text.split("\n"):
        depth += line.startswith("<details>")
        shown += depth == 0
        depth -= line == "</details>"
    assert depth == 0 and 100 < shown < 350
    assert max(len(line) for line in text.split("\n")) < 4_000


def test_json_gives_the_same_bytes() -> None:
    one = audited("0.33.0")
    assert render(audit_from_json(json.loads(json.dumps(to_json(one))))) == render(one)


def test_every_link_inside_the_report_has_its_target() -> None:
    text = render(audited("0.33.0"))
    ids = set(re.findall(r'<a id="([^"]+)"></a>', text))
    wanted = set()
    for token in MARKDOWN.parse(text):
        for part in token.children or ():
            href = str(part.attrs.get("href", ""))
            if href.startswith("#"):
                wanted.add(href[1:])
            elif href:
                assert href.startswith("https://github.com/vllm-project/vllm/"), href
    assert wanted and wanted <= ids


def test_the_script_prints_what_the_report_says() -> None:
    text = render(audited("0.33.0"))
    section = text.split("## Check every finding by hand")[1].split("\n## ")[0]
    fence = re.search(r"(`{3,})sh\n(.*?)\n\1", section, re.S)
    assert fence
    blocks = fence.group(2).split("\n\n")
    first = _run(blocks[0])
    assert first and all(line.endswith(": OK") for line in first)
    checks = re.findall(r"^# ([\w-]+): [\w/]+\n(.*?)(?=\n\n# [\w-]+: [\w/]+\n|\Z)", fence.group(2), re.S | re.M)
    assert len(checks) >= 10
    for id, body in checks:
        lines = body.split("\n")
        commands = [line for line in lines if not line.startswith("#=")]
        expected = [line[2:].removeprefix(" ") for line in lines if line.startswith("#=")]
        printed = _run("\n".join(commands))
        promise = re.fullmatch(r"\(prints (nothing|(\d+) lines?\b|).*\)", expected[0])
        if promise and promise[1] == "nothing":
            assert printed == [""], id
        elif promise:  # so many lines, or some
            assert any(printed) and len(printed) == int(promise[2] or len(printed)), id
        else:
            assert [line.rstrip() for line in printed] == [line.rstrip() for line in expected], id


def _run(script: str) -> list[str]:
    done = subprocess.run(
        ["sh", "-c", script], cwd=unpacked("0.33.0"), capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout.rstrip("\n").split("\n")


def test_an_upgrade_reads_like_release_notes() -> None:
    text = diff.render(audited("0.20.2"), audited("0.33.0"))
    assert text.startswith("# From vLLM 0.20.2 to vLLM 0.33.0\n")
    moves = {move.id: (move.before, move.after) for move in diff.compare(audited("0.20.2"), audited("0.33.0")).moved}
    assert moves["tree-build"] == ("yes", "no") and moves["tree-mask"] == ("yes", "partial")
    assert moves["gdn-gate-gather"] == ("no", "yes") and moves["aux-layer-offset"] == ("no", "yes")
    assert "tree-walk" not in moves
    assert (
        "seen before in [`vllm/v1/attention/backends/tree_attn.py`]" in text
        and "`_strict_rejection_sample_kernel" in text
    )
