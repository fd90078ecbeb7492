"""What the history rules say of published vLLM wheels: the truth table, and rechecks that print what the verdict
promises."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rules.history import HISTORY, answers, in_environment, release

pytestmark = pytest.mark.wheel

RELEASES = ("0.20.2", "0.21.0", "0.22.0", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.28.0", "0.30.0", "0.33.0")
# id -> outcome for each of RELEASES. Read in the wheels one by one; a release says nothing by its number.
TABLE = {
    "record-integrity": "yes yes yes yes yes yes yes yes yes yes",
    "plugins": "yes yes yes yes yes yes yes yes yes yes",
    "runner-in-force": "yes yes yes yes yes yes yes yes yes yes",
    "spec-methods": "yes yes yes yes yes yes yes yes yes yes",
    "dflash-support": "yes yes yes yes yes yes yes yes yes yes",
    "aux-layer-offset": "no no yes yes yes yes yes yes yes yes",
    "drafter-sliding-window": "no no no no no yes yes yes yes yes",
    "own-lm-head": "n/a n/a n/a n/a yes yes yes yes yes yes",
    "eagle-block-drop": "no no no no no no no no no yes",
    "gdn-gate-gather": "no no no no no no no yes yes yes",
    "uniform-decode-guard": "no no no no no no no partial yes yes",
    "mamba-drop-flag": "no no no no no no no no no no",
    "lossless-only": "no no no no no no no no no no",
}
RUNNERS = {  # dense (Qwen3ForCausalLM), hybrid (Qwen3_5)
    **dict.fromkeys(("0.20.2", "0.21.0", "0.22.0", "0.23.0"), ("V1", "V1")),
    **dict.fromkeys(("0.24.0", "0.25.1", "0.26.0", "0.28.0"), ("V2", "V1")),
    **dict.fromkeys(("0.30.0", "0.33.0"), ("V2", "V2")),
}
DFLASH_IN = {version: {"V1"} if version < "0.24" else {"V1", "V2"} for version in RELEASES}
FILES = {"0.20.2": 1723, "0.23.0": 1914, "0.33.0": 3231}
Wheels = Callable[[str], Path]


@pytest.mark.parametrize("version", RELEASES)
def test_truth_table(wheel_tree: Wheels, version: str) -> None:
    got = answers(release(wheel_tree, version))
    expected = {rule: outcomes.split()[RELEASES.index(version)] for rule, outcomes in TABLE.items()}
    assert {rule: got[rule].outcome for rule in TABLE} == expected
    assert tuple(item["runner"] for item in got["runner-in-force"].items) == RUNNERS[version]
    assert not any(item["refused"] for item in got["runner-in-force"].items)
    assert {item["runner"] for item in got["dflash-support"].items} == DFLASH_IN[version]


@pytest.mark.parametrize("version", RELEASES)
def test_every_verdict_can_be_checked_by_hand(wheel_tree: Wheels, version: str) -> None:
    """The command, run by plain sh in site-packages, prints exactly what the verdict says it prints."""
    folder = wheel_tree(version)
    for rule, verdict in answers(release(wheel_tree, version)).items():
        assert verdict.question and verdict.changes_if and verdict.summary, rule
        if verdict.outcome == "n/a":
            continue
        assert verdict.recheck, rule
        if rule not in ("record-integrity", "plugins"):
            assert verdict.evidence or verdict.items, rule
        done = subprocess.run(["sh", "-c", verdict.recheck], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.stderr == "", rule
        assert verdict.recheck_expect != "", rule
        assert done.stdout == verdict.recheck_expect, rule


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
def test_evidence_is_where_it_says(wheel_tree: Wheels, version: str) -> None:
    folder = wheel_tree(version)
    for verdict in answers(release(wheel_tree, version)).values():
        for evidence in verdict.evidence:
            lines = (folder / evidence.file).read_text().splitlines()
            assert evidence.snippet == "\n".join(lines[evidence.line - 1 : min(evidence.end_line, evidence.line + 39)])


@pytest.mark.parametrize("version", sorted(FILES))
def test_record_counts_every_file(wheel_tree: Wheels, version: str) -> None:
    assert (
        f"{FILES[version]:,} files"
        in answers(release(wheel_tree, version), ["record-integrity"])["record-integrity"].summary
    )


@pytest.mark.parametrize(
    ("version", "lossy"), [("0.20.2", ["synthetic"]), ("0.23.0", ["synthetic"]), ("0.33.0", ["synthetic", "fly"])]
)
def test_lossy_methods_are_named(wheel_tree: Wheels, version: str, lossy: list[str]) -> None:
    verdict = answers(release(wheel_tree, version), ["lossless-only"])["lossless-only"]
    assert [item["method"] for item in verdict.items if item["distribution"] == "lossy"] == lossy
    assert all(item["acts_at"] for item in verdict.items if item["distribution"] == "lossy")


def test_methods_as_declared(wheel_tree: Wheels) -> None:
    def methods(version: str) -> set[str]:
        verdict = answers(release(wheel_tree, version), ["spec-methods"])["spec-methods"]
        return {str(item["method"]) for item in verdict.items}

    old, new = methods("0.20.2"), methods("0.33.0")
    assert {"ngram", "medusa", "eagle3", "dflash", "mtp", "qwen3_5_mtp"} <= old
    assert {"dspark", "custom_class", "dflash"} <= new and "medusa" not in new
    assert not {"ddtree", "tree"} & (old | new)


@pytest.mark.parametrize(
    ("version", "mixed"), [("0.25.1", "refused"), ("0.26.0", "on V2 only"), ("0.33.0", "on V2 only")]
)
def test_mixed_drafters(wheel_tree: Wheels, version: str, mixed: str) -> None:
    verdict = answers(release(wheel_tree, version), ["drafter-sliding-window"])["drafter-sliding-window"]
    assert {item["layers"]: item["answer"] for item in verdict.items} == {"all sliding": "honoured", "mixed": mixed}


def test_manual_switch_is_named_but_not_enough(wheel_tree: Wheels) -> None:
    verdict = answers(release(wheel_tree, "0.30.0"), ["eagle-block-drop"])["eagle-block-drop"]
    assert verdict.outcome == "no" and "disable_eagle_block_drop=true" in verdict.summary


def test_only_the_adapters_own_release_fits(wheel_tree: Wheels) -> None:
    fits = {v: answers(release(wheel_tree, v), ["native-adapter"])["native-adapter"] for v in ("0.20.2", "0.23.0")}
    assert fits["0.23.0"].outcome == "yes"
    for verdict in fits.values():
        assert [bool(item["missing"]) for item in verdict.items] == [not item["fits"] for item in verdict.items]


@pytest.mark.parametrize(
    ("version", "value", "runners", "refused"),
    [
        ("0.20.2", "1", {"V2"}, True),  # taken, and refused at start-up: V2 knows no dflash there
        ("0.23.0", "1", {"V2"}, True),
        ("0.23.0", "0", {"V1"}, False),
        ("0.28.0", "1", {"V2"}, False),
        ("0.33.0", "0", {"V1"}, False),
        ("0.33.0", "1", {"V2"}, False),
    ],
)
def test_environment_decides(wheel_tree: Wheels, version: str, value: str, runners: set[str], refused: bool) -> None:
    tree = in_environment(release(wheel_tree, version), VLLM_USE_V2_MODEL_RUNNER=value)
    got = answers(tree, ["runner-in-force", "uniform-decode-guard"])
    assert {item["runner"] for item in got["runner-in-force"].items} == runners
    assert {bool(item["refused"]) for item in got["runner-in-force"].items} == {refused}
    assert all("VLLM_USE_V2_MODEL_RUNNER" in item["why"] for item in got["runner-in-force"].items)
    guarded = runners == {"V2"} and version >= "0.28"
    assert got["uniform-decode-guard"].outcome == ("yes" if guarded else "no")


def test_the_list_covers_every_rule_here() -> None:
    assert set(TABLE) | {"native-adapter"} == set(HISTORY)
