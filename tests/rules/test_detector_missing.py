"""A file that is not there must not make a confident answer: on a copy of a real release."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reports.model import Verdict
from rules.engine import judge
from rules.loading import load_rules
from rules.testing import tree_from_dir

PARTS = ("v1/sample", "v1/worker", "v1/spec_decode", "config", "v1/core/sched")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("facts")


def judged(site: Path, facts: Path) -> dict[str, Verdict]:
    return {v.id: v for v in judge(tree_from_dir(site), cache=facts).verdicts}


@pytest.mark.wheel
@pytest.mark.parametrize("gone", ["", "vllm/v1/sample/rejection_sampler.py", "vllm/v1/worker/gpu_model_runner.py"])
def test_the_runner_in_force_without_its_sampler_is_unknown(
    gone: str, wheel_tree: Callable[[str], Path], tmp_path: Path, facts: Path
) -> None:
    for part in PARTS:
        shutil.copytree(wheel_tree("0.23.0") / "vllm" / part, tmp_path / "vllm" / part)
    if gone:
        (tmp_path / gone).write_text("")
    answers = judged(tmp_path, facts)
    assert answers["runner-in-force"].items[0]["runner"] == "V1"
    assert answers["tree-walk"].outcome == ("unknown" if gone else "no"), answers["tree-walk"].summary
    assert answers["verifiers"].outcome == ("unknown" if gone else "yes"), answers["verifiers"].summary


def test_a_rule_that_does_not_parse_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("X = 1\n")
    load_rules([tmp_path])
    (tmp_path / "broken.py").write_text('ID = "broken"\ndef (\n')
    with pytest.raises(ValueError, match=r"broken\.py does not parse"):
        load_rules([tmp_path])


RAISES = '''"""Asks nothing, and falls over."""
from reports.model import Verdict
from rules.base import Example

ID = "falls-over"
QUESTION = "Does it?"
CHANGES_IF = "never"
NEEDLES = (b"class",)
VALID = INVALID = ()


def extract(path, source):
    return [{"x": 1 / 0}]


def judge(ctx):
    return Verdict(ID, "no", "nothing found")
'''


def test_a_users_rule_whose_extract_raises_answers_unknown(tmp_path: Path) -> None:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "a.py").write_text("class A: ...\n")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "falls_over.py").write_text(RAISES)
    found = judge(tree_from_dir(tmp_path / "site"), cache=tmp_path / "cache", extra_rules=[tmp_path / "rules"])
    answer = next(v for v in found.verdicts if v.id == "falls-over")
    assert answer.outcome == "unknown" and "ZeroDivisionError" in answer.summary
    assert any(e["code"] == "rule-failed" for e in found.errors)
