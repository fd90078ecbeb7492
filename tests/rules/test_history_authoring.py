"""Rules as their authors meet them: list, show, test, new, and the worked example of docs/rules.md."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reports.model import VERDICT_IDS
from rules import authoring
from rules.base import Example
from rules.engine import judge
from rules.extraction import Unit
from rules.loading import load_rules
from rules.testing import tree_from_dir
from tests.rules.history import HISTORY

DOCS = Path(__file__).parents[2] / "docs" / "rules.md"
MINE = "who-writes-num-accepted-tokens"


@pytest.fixture
def my_rules(tmp_path: Path) -> Path:
    """A folder with the rule that docs/rules.md shows, as a reader would copy it."""
    folder = tmp_path / "my_rules"
    folder.mkdir()
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert len(blocks) == 1
    (folder / authoring.file_name(MINE)).write_text(blocks[0])
    return folder


@pytest.mark.parametrize("rule_id", HISTORY)
def test_every_example_of_every_history_rule(rule_id: str) -> None:
    results = authoring.run_examples([rule_id])
    assert not [r for r in results if r.problem], authoring.results_text(results)
    for kind in ("VALID", "INVALID"):
        assert sum(r.kind == kind for r in results) >= 3
    assert f"{len(results)}/{len(results)} examples of 1 rule pass" in authoring.results_text(results)


@pytest.mark.parametrize("rule_id", [i for i in HISTORY if i not in ("record-integrity", "plugins")])
def test_a_file_that_no_parser_takes_makes_the_answer_unknown(rule_id: str) -> None:
    """Never a "no": the thing asked for may be in that very file."""
    rules = {rule.id: rule for rule in load_rules()}
    before = [rules[i] for i in ("runner-in-force", "dflash-support") if i != rule_id]
    rule = rules[rule_id]
    unit = Unit(rule.id, "", rule.extract or (lambda path, source: []), rule.needles, rule.paths)
    for example in (*rule.valid, *rule.invalid):
        looked_at = any(unit.wants(path, text.encode()) for path, text in example.files.items() if text)
        if example.outcome in ("unknown", "n/a") or not looked_at:
            continue
        broken = {path: f"{text}\ndef (\n" for path, text in example.files.items() if text}
        verdict = authoring.judge_example(rule, Example(example.name, broken, "unknown"), before)
        assert verdict.outcome == "unknown", f"{example.name}: {verdict.summary}"


def test_list_has_every_rule_in_the_order_of_a_report() -> None:
    ids = [line.id for line in authoring.list_rules()]
    assert ids == [i for i in VERDICT_IDS if i in ids]
    assert set(HISTORY) <= set(ids)
    assert all(
        line.question.endswith("?") and line.examples >= 6 for line in authoring.list_rules() if line.id in HISTORY
    )


def test_show_tells_a_user_what_the_rule_is_about() -> None:
    text = authoring.show_text("own-lm-head")
    assert "acceptance length 1.00" in text and "Would change the answer" in text and "own_lm_head.py" in text
    assert text.count("INVALID  ") >= 3


def test_an_unknown_rule_is_met_with_the_nearest() -> None:
    with pytest.raises(KeyError, match="aux-layer-offset"):
        authoring.show_text("aux-layer-ofset")


def test_new_writes_a_rule_that_passes_its_own_examples(tmp_path: Path) -> None:
    (tmp_path / authoring.file_name("my-first-rule")).write_text(authoring.new_rule("my-first-rule"))
    results = authoring.run_examples(["my-first-rule"], [tmp_path])
    assert len(results) == 3 and not [r for r in results if r.problem], authoring.results_text(results)
    with pytest.raises(ValueError, match="not a rule id"):
        authoring.new_rule("My Rule")


def test_a_wrong_example_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    text = authoring.new_rule("my-wrong-rule").replace(
        '"def my_function(): ...\\n"}, "yes"', '"def my_function(): ...\\n"}, "no"'
    )
    (tmp_path / "my_wrong_rule.py").write_text(text)
    results = authoring.run_examples(["my-wrong-rule"], [tmp_path])
    bad = [r for r in results if r.problem]
    assert [r.example for r in bad] == ["it is there"] and "expected no, got yes" in bad[0].problem
    assert authoring.results_text(results).endswith("2/3 examples of 1 rule pass\n")


def test_a_rule_that_breaks_is_one_failed_example_each(tmp_path: Path) -> None:
    text = authoring.new_rule("my-broken-rule").replace("check = Recheck(ctx)", "check = Recheck(nothing)")
    (tmp_path / "my_broken_rule.py").write_text(text)
    results = authoring.run_examples(["my-broken-rule"], [tmp_path])
    assert [r.got for r in results] == ["error"] * 3 and all("NameError" in r.problem for r in results)


def test_the_worked_example_passes_its_examples(my_rules: Path) -> None:
    results = authoring.run_examples([MINE], [my_rules])
    assert len(results) == 8 and not [r for r in results if r.problem], authoring.results_text(results)
    assert f"({my_rules})" in authoring.list_text([my_rules])


@pytest.mark.wheel
@pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])
def test_the_worked_example_on_a_release(my_rules: Path, wheel_tree: Callable[[str], Path], version: str) -> None:
    folder = wheel_tree(version)
    rule = authoring.find(MINE, [my_rules])
    tree = tree_from_dir(folder)
    kept = tuple(f for f in tree.files if b"num_accepted_tokens" in tree.read(f.sha256))
    verdict = authoring.judge_tree(rule, dataclasses.replace(tree, files=kept))
    assert verdict.outcome == "yes"
    places = {(item["file"], item["how"]) for item in verdict.items}
    runner = "vllm/v1/worker/gpu_model_runner.py"
    assert any(file == runner for file, _ in places)
    assert any("gdn_attn.py" in file and "copy_" in how for file, how in places)
    for item in verdict.items:
        line = (folder / str(item["file"])).read_text().split("\n")[int(item["line"]) - 1]
        assert "num_accepted_tokens" in line or "store(" in line
    if verdict.recheck_expect:
        done = subprocess.run(["sh", "-c", verdict.recheck], cwd=folder, capture_output=True, text=True)
        assert done.stdout == verdict.recheck_expect


def test_a_scan_answers_a_question_of_the_users_own(my_rules: Path, tmp_path: Path) -> None:
    site = tmp_path / "site" / "vllm"
    site.mkdir(parents=True)
    (site / "state.py").write_text("class State:\n    def step(self, n):\n        self.num_accepted_tokens = n\n")
    found = {v.id: v for v in judge(tree_from_dir(site.parent), extra_rules=[my_rules]).verdicts}
    assert found[MINE].outcome == "yes" and found[MINE].question == "Who writes num_accepted_tokens?"
    assert list(found)[-1] == MINE


def test_judging_from_facts_imports_no_libcst(tmp_path: Path) -> None:
    """Warm scans must not pay for libcst: judges run on facts alone."""
    code = (
        "import sys\nfrom rules.loading import load_rules\nfrom rules.authoring import example_tree\n"
        "from rules.context import ScanContext\nfrom rules.cache import Cache\n"
        f"ids = {HISTORY!r}\n"
        "for rule in load_rules():\n"
        "    if rule.id in ids:\n"
        "        with example_tree(rule.valid[0]) as tree:\n"
        "            rule.judge(ScanContext(tree, {}, Cache(None), []))\n"
        "sys.exit('libcst' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_examples_may_bring_their_own_record() -> None:
    example = Example("x", {"vllm/a.py": "", "vllm-1.0.dist-info/RECORD": "vllm/a.py,sha256=wrong,0\n"}, "no")
    with authoring.example_tree(example) as tree:
        assert tree.record.status == "changed" and tree.record.changed == ("vllm/a.py",)


def test_rule_ids_are_file_names() -> None:
    for rule in load_rules():
        if rule.id in HISTORY:
            assert Path(str(rule.extra["path"])).name == authoring.file_name(rule.id)
