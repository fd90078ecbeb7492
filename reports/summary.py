"""The answer in three lines: what verifies here, what it rests on, what to do."""

from __future__ import annotations

import re
from typing import Any

from reports.model import Audit, Verdict
from reports.text import count, listed, one_line
from reports.words import STAGES

#: tree-commit's outcome beside a walk that is there.
_KEPT = {
    "no": "the path that it accepted is not kept by index",
    "partial": "the path that it accepted is kept by index only in part",
    "unknown": "whether the path that it accepted is kept by index could not be told",
}


def lines(audit: Audit) -> list[str]:
    """The answer as three lines of plain text, safe on a terminal."""
    return [one_line(line).replace("`", "") for line in (headline(audit), basis(audit), advice(audit))]


def headline(audit: Audit) -> str:
    """Does a verifier of this install walk a tree? One sentence of prose (see ``reports.text.prose``)."""
    version = audit.install.vllm_version
    where = f"vLLM {version}" if version else "this install"
    text = _answer(audit, where)
    return (
        f"Provisional: {text[0].lower() if text.startswith('No ') else text[0]}{text[1:]}"
        if audit.made.provisional
        else text
    )


def _answer(audit: Audit, where: str) -> str:
    walk, commit = audit.verdict("tree-walk"), audit.verdict("tree-commit")
    if walk is None:
        return f"Not answered: the scan of {where} did not get to the verifiers."
    if walk.outcome == "yes":
        if commit is not None and commit.outcome == "yes":
            return f"Yes: {where} verifies a tree, and keeps the path that it accepted."
        kept = _KEPT.get(
            commit.outcome if commit is not None else "", "nobody judged whether that path is kept by index"
        )
        return f"Half: a verifier of {where} walks a tree, but {kept}."
    if walk.outcome == "partial":
        return f"Not as it stands: {where} holds a tree walk that is switched off or that no sampler reaches."
    if walk.outcome == "unknown":
        return f"Cannot tell whether {where} verifies a tree: {_clause(walk.summary)}"
    if walk.outcome == "n/a":
        return f"No verifier to judge in {where}: {_clause(walk.summary)}"
    return f"No verifier in {where} walks a tree{_chains(audit)}."


def basis(audit: Audit) -> str:
    """The four stages, and the install's integrity."""
    verdicts = [(name, audit.verdict(id)) for id, name, _ in STAGES]
    stages = ", ".join(f"{name} {v.outcome}" for name, v in verdicts if v is not None)
    return f"Stages: {stages or 'not judged'}. Install: {integrity(audit)}."


def advice(audit: Audit) -> str:
    """The recommended path with its first reason."""
    recommendation = audit.recommendation
    reason = _clause(recommendation.reasons[0]) if recommendation.reasons else "no reason was given."
    reason = f"{reason[0].upper()}{reason[1:]}" if re.match(r"[a-z]+[ ,:]", reason) else reason  # a path stays
    return f"Recommended: {recommendation.path}. {reason}"


def integrity(audit: Audit) -> str:
    """The install against its own RECORD, in half a sentence; what differs is named first."""
    record = audit.install.record
    if record.status == "clean":
        return f"{count(record.files, 'file')}, all as released"
    if record.status == "unknown":
        return "could not be compared with its RECORD, so patched files would not show"
    parts = [
        f"{len(files):,} {what} ({', '.join(files[:2])}{', …' if len(files) > 2 else ''})"
        for files, what in (
            (record.changed, "changed"),
            (record.orphans, "not in the release"),
            (record.missing, "missing"),
        )
        if files
    ]
    return f"NOT as released: {listed(parts)}"


def accept_functions(audit: Audit, reachable: bool = True) -> list[dict[str, Any]]:
    """The items of ``verifiers`` that the runners' samplers reach (or that they do not)."""
    verdict = audit.verdict("verifiers")
    return [item for item in verdict.items if bool(item.get("reachable")) is reachable] if verdict else []


def failed_files(verdict: Verdict | None) -> int:
    return len(verdict.scope.files_failed) if verdict else 0


def _chains(audit: Audit) -> str:
    found = accept_functions(audit)
    if not found:
        return ""
    others = [item for item in found if item.get("shape") != "chain"]
    if others:
        return f": {count(len(found), 'accept function')} reached, {len(others)} not plain chains but no walk either"
    return (
        f": its {len(found)} accept functions are all chains"
        if len(found) > 1
        else ": its one accept function is a chain"
    )


def _clause(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
