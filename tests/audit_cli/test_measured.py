"""A bench's JSON becomes a measurement, and only one that says how it was made decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from audit_cli.errors import DdauditError
from audit_cli.measured import from_bench
from audit_cli.output import with_runs
from audit_cli.recommend import recommend
from reports.model import Verdict
from tests.reports import samples


def run(mode: str, seconds: float, tau: float) -> dict[str, Any]:
    return {"mode": mode, "tokens": 1000, "seconds": seconds, "tau": tau}


GOOD = {
    "results": [run("ar", 10.0, 1.0), run("chain", 4.0, 4.0), run("tree-8", 5.0, 4.5), run("tree-64", 3.2, 5.0)],
    "batch": 4,
    "graphs": True,
    "prompts": "human-eval",
}


def test_speeds_come_out_as_they_were_measured() -> None:
    found = from_bench(GOOD)
    assert found is not None and found.usable and found.batch == 4
    assert found.tree_over_chain == pytest.approx(4.0 / 3.2) and found.chain_over_plain == pytest.approx(2.5)
    assert found.t_plain == pytest.approx(4 * 10.0 / 1000) and found.tau_tree == 5.0


@pytest.mark.parametrize("missing", ["graphs", "prompts"])
def test_a_run_that_does_not_say_how_it_was_made_decides_nothing(missing: str) -> None:
    found = from_bench({key: value for key, value in GOOD.items() if key != missing})
    assert found is not None and not found.usable
    assert recommend([Verdict("tree-walk", "no", "")], measured=found).path == "standalone"


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"results": None},
        {"results": ["x", 3, None]},
        {"results": [run("ar", 1.0, 1.0)]},
        {"results": [run("ar", 0.0, 1.0), run("chain", 1.0, 2.0)]},
        {"results": [run("ar", 1.0, 1.0), run("chain", float("nan"), 2.0)]},
        {"results": [run("ar", 1.0, 1.0), {"mode": "chain", "tokens": True, "seconds": 1, "tau": 1}]},
    ],
)
def test_what_is_no_measurement_is_none(bad: dict[str, Any]) -> None:
    assert from_bench(bad) is None


def test_a_file_of_something_else_is_no_bench_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"verdicts": []}')
    with pytest.raises(DdauditError, match="is no bench result"):
        with_runs(samples.audit(), [tmp_path / "x.json"])


def test_without_a_tree_it_is_the_chain_that_was_measured() -> None:
    found = from_bench({**GOOD, "results": GOOD["results"][:2]})  # type: ignore[index]
    assert found is not None and found.tree_over_chain is None and found.chain_over_plain == pytest.approx(2.5)
