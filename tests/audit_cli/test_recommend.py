"""The recommendation: its table has no unreachable row, static facts never claim that a tree pays, and a measurement
decides as the rule says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit_cli.measured import Measured
from audit_cli.recommend import MISFITS, TABLE, Known, recommend
from reports.model import Verdict

STAGES = ("tree-build", "tree-mask", "tree-walk", "tree-commit")


def verdicts(**outcomes: Any) -> list[Verdict]:
    named = dict.fromkeys(STAGES, "no") | {key.replace("_", "-"): value for key, value in outcomes.items()}
    return [Verdict(id, outcome, "why") for id, outcome in named.items()]


def measured(tree: float = 1.0, chain: float = 2.0, mtp: float | None = None, **more: Any) -> Measured:
    """Speeds relative to what stands under them: chain against plain, tree and MTP against the chain."""
    return Measured(
        t_plain=0.01,
        t_chain=0.02,
        tau_chain=2 * chain,
        t_tree=0.03,
        tau_tree=3 * chain * tree,
        t_mtp=0.02 if mtp else None,
        tau_mtp=2 * chain * mtp if mtp else None,
        **more,
    )


@pytest.mark.parametrize(
    ("outcomes", "options", "path"),
    [
        ({}, {}, "standalone"),
        ({"native_adapter": "yes"}, {}, "standalone"),
        ({id.replace("-", "_"): "yes" for id in STAGES}, {}, "native"),
        ({id.replace("-", "_"): "unknown" for id in STAGES}, {}, "none"),
        ({"native_adapter": "yes"}, {"measured": measured(1.2)}, "native"),
        ({"native_adapter": "no"}, {"measured": measured(1.2)}, "standalone"),
        ({"native_adapter": "yes"}, {"measured": measured(1.0)}, "chain"),
        ({"native_adapter": "yes"}, {"measured": measured(0.7)}, "chain"),
        ({}, {"measured": measured(1.2, chain=0.9)}, "retrain"),
        ({"aux_layer_offset": "no"}, {"measured": measured(1.2, chain=0.9)}, "none"),
        ({"native_adapter": "yes"}, {"measured": measured(1.2, mtp=1.1)}, "native"),
        ({"native_adapter": "yes"}, {"measured": measured(1.2, mtp=1.3)}, "chain"),
        ({"native_adapter": "yes"}, {"measured": measured(5.0, graphs=False)}, "standalone"),
        ({"native_adapter": "yes"}, {"measured": measured(5.0, real_prompts=False)}, "standalone"),
        ({}, {"findings": [{"id": "verifier-differs", "severity": "error", "summary": "made for another"}]}, "retrain"),
        ({}, {"findings": [{"id": "block-size-missing", "severity": "error", "summary": "no size"}]}, "standalone"),
    ],
)
def test_paths(outcomes: dict[str, Any], options: dict[str, Any], path: str) -> None:
    found = recommend(verdicts(**outcomes), **options)
    assert found.path == path
    assert found.reasons and "{" not in "".join(found.reasons) and "?" not in found.reasons[0]
    assert exists(found.next)


def test_every_row_can_decide() -> None:
    """Each row is the first that applies for some combination; no row is dead."""
    speeds = [None, *(measured(t, c, m) for t, c, m in itertools.product((0.8, 1.2), (0.8, 2.0), (None, 0.9, 1.5)))]
    stages = [dict.fromkeys(STAGES, outcome) for outcome in ("yes", "no", "unknown")]
    extras = [
        dict(zip(("native-adapter", "aux-layer-offset"), pair, strict=True))
        for pair in itertools.product(("yes", "no", "unknown"), repeat=2)
    ]
    deciding = set()
    for stage, extra, speed, misfit in itertools.product(stages, extras, speeds, ((), ("another layout",))):
        known = Known({**stage, **extra}, measured=speed, drafter_misfit=misfit)
        deciding.add(next(number for number, row in enumerate(TABLE) if row.when(known)))
    assert deciding == set(range(len(TABLE)))


OUTCOMES = st.sampled_from(["yes", "no", "partial", "unknown", "n/a"])
IDS = [
    *STAGES,
    "native-adapter",
    "dflash-support",
    "aux-layer-offset",
    "hybrid-tree-state",
    "record-integrity",
    "opaque-code",
]


@given(st.dictionaries(st.sampled_from(IDS), OUTCOMES))
def test_static_facts_alone_never_say_that_a_tree_pays(outcomes: dict[str, Any]) -> None:
    found = recommend([Verdict(id, outcome, "") for id, outcome in outcomes.items()])
    assert found.path in ("native", "standalone", "none")
    assert not any("measured at batch" in reason for reason in found.reasons)
    assert found.needs
    if found.path != "none":
        assert any("tau_tree / tau_chain > t_tree / t_chain" in need for need in found.needs)
        assert any("0.68x to 1.00x" in point for point in found.against)


def test_the_break_even_is_stated() -> None:
    found = recommend(verdicts(native_adapter="yes"), measured=measured(0.9, batch=8))
    assert found.path == "chain"
    assert "at batch 8" in found.reasons[0] and "0.90x" in found.reasons[0] and "above 1.50" in found.reasons[0]
    assert not found.needs


def test_what_is_wrong_with_the_install_is_said_whatever_the_path() -> None:
    found = recommend(verdicts(aux_layer_offset="no", record_integrity="no", gdn_gate_gather="yes"))
    text = " ".join(found.against)
    assert "aux-layer-offset" in text and "not what was released" in text and "gdn-gate-gather" not in text
    found = recommend(verdicts(), findings=[{"id": "k", "severity": "error", "summary": "K is 16, the block 8"}])
    assert "lint: K is 16, the block 8" in found.against


def exists(command: str) -> bool:
    """Whether the command is one of ours: a module that runs, or a subcommand of ddaudit."""
    words = command.split()
    if words[:2] == ["python", "-m"]:
        folder = Path(__file__).parents[2] / words[2].replace(".", "/")
        return (folder / "__main__.py").is_file() and f'"{words[3]}"' in (folder / "__main__.py").read_text()
    return words[:2] == ["ddaudit", "scan"]


def test_an_audit_that_judged_nothing_is_to_be_made_again_on_the_same_host() -> None:
    assert recommend((), spec="root@gpu1").next == "ddaudit scan root@gpu1"
    assert recommend((), spec="pypi:vllm==0.33.0").next == "ddaudit scan user@host"


def test_the_bench_comes_first_and_serving_only_after_it_has_said_that_the_tree_pays() -> None:
    assert "standalone bench" in recommend(verdicts()).next
    assert "vllm serve" in recommend(verdicts(native_adapter="yes"), measured=measured(1.2)).next


def test_the_misfits_are_findings_that_the_lint_has() -> None:
    import rules.lint

    text = "".join(path.read_text() for path in Path(rules.lint.__file__).parent.glob("*.py"))
    assert not [id for id in MISFITS if f'"{id}"' not in text]
