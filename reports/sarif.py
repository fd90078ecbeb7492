"""An audit as SARIF 2.1.0, for code-scanning dashboards. Needs the extra ``ddaudit[sarif]`` (the library
sarif-pydantic).

Every rule is listed, also one that has nothing to say, so that "looked and found nothing" is told apart from "did not
look". A verdict is one result: ``yes`` is ``pass``, ``no`` is ``fail``, ``partial`` is ``review``, ``unknown`` is
``open``; a list is ``informational``. Paths are relative to site-packages, never absolute on the host.
"""

from __future__ import annotations

import hashlib
import importlib
from datetime import datetime
from typing import Any
from urllib.parse import quote

from reports.model import LIST_IDS, VERDICT_IDS, Audit, Evidence, Verdict
from reports.text import one_line, visible
from reports.words import MEANING, STAGES

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SITE_PACKAGES"
_KIND = {"yes": "pass", "no": "fail", "partial": "review", "unknown": "open", "n/a": "notApplicable"}
#: A "no" about tree verification is an answer; a "no" about these is a defect of the install.
_DEFECTS = {
    "record-integrity": "warning",
    "aux-layer-offset": "warning",
    "drafter-sliding-window": "warning",
    "own-lm-head": "warning",
    "eagle-block-drop": "warning",
    "gdn-gate-gather": "error",
    "uniform-decode-guard": "error",
    "mamba-drop-flag": "warning",
}


def render(audit: Audit) -> str:
    """The SARIF log as JSON text. Raises ModuleNotFoundError without sarif-pydantic."""
    library: Any = importlib.import_module("sarif_pydantic")

    ids = [*VERDICT_IDS, *sorted({v.id for v in audit.verdicts} - set(VERDICT_IDS))]
    questions = {v.id: v.question for v in audit.verdicts}
    files = sorted({(e.file, e.sha256) for v in audit.verdicts for e in v.evidence})
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "ddaudit",
                "version": visible(audit.ddaudit) or "0",
                "rules": [_rule(id, questions.get(id, "")) for id in ids],
            }
        },
        "originalUriBaseIds": {_ROOT: {"description": {"text": "The folder that holds vllm/ on the audited host."}}},
        "artifacts": [{"location": _location(file), "hashes": {"sha-256": sha}} for file, sha in files],
        "invocations": [_invocation(audit)],
        "results": [_result(verdict, ids.index(verdict.id)) for verdict in audit.verdicts],
        "properties": {
            "target": visible(audit.target.spec),
            "vllmVersion": visible(audit.install.vllm_version),
            "manifestSha256": visible(audit.install.manifest_sha256),
            "recommendation": audit.recommendation.path,
        },
    }
    log = library.Sarif.model_validate({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})
    text: str = log.model_dump_json(by_alias=True, exclude_none=True, indent=2)
    return text + "\n"


def _rule(id: str, question: str) -> dict[str, Any]:
    asked = question or next((q for stage, _, q in STAGES if stage == id), "")
    means = MEANING.get(id, "")
    text = one_line(asked or means or id)
    rule: dict[str, Any] = {"id": one_line(id), "shortDescription": {"text": text}}
    if means:
        rule["fullDescription"] = {"text": f"“yes” means: {means.replace('`', '')}"}
    return rule


def _result(verdict: Verdict, index: int) -> dict[str, Any]:
    kind = "informational" if verdict.id in LIST_IDS and verdict.outcome == "yes" else _KIND[verdict.outcome]
    result: dict[str, Any] = {
        "ruleId": one_line(verdict.id),
        "ruleIndex": index,
        "kind": kind,
        "level": _DEFECTS.get(verdict.id, "note") if kind == "fail" else "none",
        "message": {"text": _message(verdict)},
        "partialFingerprints": {"ddaudit/v1": _fingerprint(verdict)},
        "properties": {"confidence": verdict.confidence, "outcome": verdict.outcome},
    }
    if verdict.evidence:
        result["locations"] = [_place(verdict.evidence[0])]
        result["relatedLocations"] = [{"id": n, **_place(e)} for n, e in enumerate(verdict.evidence[1:50], 1)]
        if not result["relatedLocations"]:
            del result["relatedLocations"]
    return result


def _message(verdict: Verdict) -> str:
    text = f"{verdict.outcome}: {one_line(verdict.summary)}".replace("`", "")
    # In SARIF a bracket opens a link and a brace a placeholder.
    for char in "\\[]":
        text = text.replace(char, "\\" + char)
    return text.replace("{", "{{").replace("}", "}}")


def _fingerprint(verdict: Verdict) -> str:
    """Stays the same while the verdict and its evidence do, wherever the lines move."""
    said = [verdict.id, verdict.outcome, *(f"{e.file}\0{e.symbol}\0{e.snippet}" for e in verdict.evidence)]
    return hashlib.sha256("\0".join(said).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _place(evidence: Evidence) -> dict[str, Any]:
    start = max(1, evidence.line)
    region: dict[str, Any] = {"startLine": start, "endLine": max(start, evidence.end_line)}
    if evidence.snippet:
        region["snippet"] = {"text": visible(evidence.snippet)}
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": _location(evidence.file), "region": region}}
    if evidence.symbol:
        place["logicalLocations"] = [{"fullyQualifiedName": one_line(evidence.symbol)}]
    return place


def _location(file: str) -> dict[str, Any]:
    return {"uri": quote(visible(file).lstrip("/"), safe="/"), "uriBaseId": _ROOT}


def _invocation(audit: Audit) -> dict[str, Any]:
    failed = sorted({(f.file, f.why) for v in audit.verdicts for f in v.scope.files_failed})
    notes: list[dict[str, Any]] = [
        {
            "level": "warning",
            "message": {"text": one_line(f"not read: {why}")},
            "locations": [{"physicalLocation": {"artifactLocation": _location(file)}}],
        }
        for file, why in failed
    ]
    notes += [
        {"level": "error", "message": {"text": one_line(str(e.get("message", "")) or str(e.get("code", "")))}}
        for e in audit.errors
    ]
    invocation: dict[str, Any] = {"executionSuccessful": not audit.errors, "toolExecutionNotifications": notes}
    at = audit.made.at.replace("+00:00", "Z")
    if _is_time(at):
        invocation["endTimeUtc"] = at
    return invocation


def _is_time(text: str) -> bool:
    try:
        return text.endswith("Z") and bool(datetime.fromisoformat(text.replace("Z", "+00:00")))
    except ValueError:
        return False
