"""One scan: open the target, judge, recommend, keep."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from audit_cli import __version__
from audit_cli.console import Console, one_line
from audit_cli.errors import usage
from audit_cli.inventory import Inventory, tree_of
from audit_cli.opening import Opened, Options, open_target
from audit_cli.targets import Spec
from reports.model import Audit, Install, Made, Recommendation
from rules.engine import Judgement, Progress, judge


def scan_target(
    spec: Spec,
    options: Options,
    console: Console,
    extra_rules: Sequence[Path] = (),
    turn: AbstractContextManager[object] = nullcontext(),
) -> Audit:
    """The audit of one target. ``turn`` is held while it is judged. Raises DdauditError."""
    start = time.monotonic()
    at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    opened = open_target(spec, options, console)
    with turn:
        audit = _audit(opened, options, console, extra_rules, at, start)
    console.end_phase()
    return audit


def _audit(
    opened: Opened, options: Options, console: Console, extra_rules: Sequence[Path], at: str, start: float
) -> Audit:
    inventory = opened.inventory
    tree = tree_of(inventory, opened.read, opened.schemas, opened.unreadable)
    console.phase(f"Judging {len(tree.files):,} files")

    def install() -> Install:
        return Install(tree.vllm_version, inventory.record, manifest_sha256(inventory))

    def progress(step: Progress) -> None:
        if step.stage == "facts":
            console.progress(step.done, step.total)
        if step.provisional:
            from reports.summary import headline

            early = Audit(opened.target, install(), step.provisional, made=Made(at, provisional=True))
            seconds = time.monotonic() - start
            console.say(f"after {seconds:.1f} s: {headline(early)} ({step.done:,} of {step.total:,} files read)")

    try:
        judgement = judge(tree, cache=options.cache / "facts", extra_rules=extra_rules, progress=progress)
    except ValueError as error:
        raise usage(
            "a rule file can't be used", str(error), "`ddaudit rules show ID` shows what one looks like"
        ) from None
    made = Made(
        at, round(time.monotonic() - start, 3), judgement.facts, judgement.files_parsed_now, judgement.rules_sha256
    )
    return Audit(
        target=opened.target,
        install=install(),
        verdicts=judgement.verdicts,
        probes=opened.probes,
        recommendation=_recommend(judgement, opened.target.spec, tree.vllm_version),
        errors=(*_notices(inventory), *judgement.errors),
        trail=judgement.trail,
        assumptions=judgement.assumptions,
        made=made,
        ddaudit=__version__,
    )


def _recommend(judgement: Judgement, spec: str, version: str) -> Recommendation:
    from audit_cli.recommend import recommend

    return recommend(judgement.verdicts, spec=spec, vllm_version=version)


def manifest_sha256(inventory: Inventory) -> str:
    """One hash for all that was seen: origin, path and sha256 of every file, sorted."""
    rows = sorted((found.origin, found.path, found.sha256) for found in inventory.files)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _notices(inventory: Inventory) -> list[dict[str, Any]]:
    """What the reader has to know about the install, and what no rule says."""
    notices = []
    if len(inventory.copies) > 1:
        others = [copy for copy in inventory.copies if copy != inventory.vllm]
        hint = "the first on the path is in force; remove the others, or pass the --pythonpath that the service has"
        notices.append(
            {
                "code": "copies",
                "message": f"more than one vLLM on the path: {inventory.vllm} is used, not {', '.join(others)}",
                "hint": hint,
            }
        )
    for folder in inventory.lacking:
        notices.append(
            {
                "code": "no-folder",
                "message": f"--pythonpath {folder} is not a folder there",
                "hint": "check the spelling",
            }
        )
    return notices


def unheard(audit: Audit) -> list[str]:
    """What the user named and the target does not have: folders of --pythonpath, models."""
    said = [str(error["message"]) for error in audit.errors if error["code"] == "no-folder"]
    for probe in audit.probes:
        models = probe.facts.get("models") if probe.id == "models" else None
        for name, found in models.items() if isinstance(models, dict) else ():
            if isinstance(found, dict) and not found.get("folder"):
                why = next((str(why) for _, why in found.get("problems", ())), "it was not found")
                said.append(f"--model {name} was not read: {why}")
    return [one_line(text) for text in said]


def is_incomplete(audit: Audit) -> bool:
    """Whether a file, a rule or a part failed, so that some answer may be missing: exit code 4."""
    if any(error["code"] in ("file-failed", "rule-failed", "unread") for error in audit.errors):
        return True
    return any(verdict.outcome == "unknown" and verdict.scope.files_failed for verdict in audit.verdicts)
