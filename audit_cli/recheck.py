"""Does an audit still hold? Its evidence hashed again, and the commands that it gives to people run where the
install is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from audit_cli.opening import Opened
from audit_cli.scan import manifest_sha256
from reports.model import Audit, Record, Verdict
from reports.text import count

State = Literal["holds", "changed", "gone", "not run"]
_SECONDS = 120


@dataclass(frozen=True)
class Check:
    """One thing that was checked: the place, or the command, of a verdict."""

    verdict: str
    what: str
    state: State
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    """``same``: not one file of the install differs from the audit's. ``differing``: the files that RECORD lets us
    name of those that do, and those of the evidence; of the others an audit keeps one hash for all."""

    same: bool
    version_then: str
    version_now: str
    checks: tuple[Check, ...]
    differing: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"schema_version": 1, "holds": self.holds, **asdict(self)}, indent=2, ensure_ascii=False)

    @property
    def holds(self) -> bool:
        return all(check.state in ("holds", "not run") for check in self.checks)


def recheck(audit: Audit, opened: Opened, run_commands: bool) -> Outcome:
    """Every piece of evidence, then (with ``run_commands``, and where the install is on this machine) every recheck
    command."""
    now = {(found.origin, found.path): found.sha256 for found in opened.inventory.files}
    checks = [check for verdict in audit.verdicts for check in _evidence(verdict, now)]
    moved = {check.what for check in checks if check.state != "holds"}
    for verdict in audit.verdicts:
        if verdict.recheck:
            if opened.folder is None:
                checks.append(
                    Check(verdict.id, verdict.recheck, "not run", "the install is not unpacked on this machine")
                )
            elif not run_commands:
                checks.append(
                    Check(
                        verdict.id,
                        verdict.recheck,
                        "not run",
                        "the audit is not one that was kept here; --run runs its commands",
                    )
                )
            else:
                checks.append(command(verdict, opened.folder))
    same = manifest_sha256(opened.inventory) == audit.install.manifest_sha256
    differing = () if same else tuple(sorted(moved | _against_record(audit.install.record, opened.inventory.record)))
    version = opened.inventory.versions.get("vllm", "")
    return Outcome(same, audit.install.vllm_version, version, tuple(checks), differing)


def _against_record(then: Record, now: Record) -> set[str]:
    """The files that differ from the release now and did not then, or the other way round."""
    before, after = ({*record.changed, *record.missing, *record.orphans} for record in (then, now))
    return before ^ after


def _evidence(verdict: Verdict, now: dict[tuple[str, str], str]) -> Iterator[Check]:
    for piece in dict.fromkeys((e.origin, e.file, e.sha256) for e in verdict.evidence):
        origin, file, digest = piece
        found = now.get((origin, file))
        if found is None:
            yield Check(verdict.id, file, "gone", "there is no such file now")
        elif found != digest:
            yield Check(verdict.id, file, "changed", f"its sha256 was {digest[:12]}…, is {found[:12]}…")
        else:
            yield Check(verdict.id, file, "holds")


def command(verdict: Verdict, folder: Path) -> Check:
    """Run a verdict's recheck command in ``folder`` and compare what it prints."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", verdict.recheck],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(verdict.id, verdict.recheck, "changed", f"it did not run: {error}"[:300])
    printed = done.stdout.decode("utf-8", "backslashreplace")
    if not verdict.recheck_expect:
        return Check(verdict.id, verdict.recheck, "not run", "what it prints is for a person to read")
    if printed.strip() == verdict.recheck_expect.strip():
        return Check(verdict.id, verdict.recheck, "holds")
    said = (done.stderr.decode("utf-8", "backslashreplace").strip().splitlines() or [""])[-1]
    return Check(verdict.id, verdict.recheck, "changed", said[:200] or _difference(verdict.recheck_expect, printed))


def _difference(expected: str, printed: str) -> str:
    before, after = expected.strip().splitlines(), printed.strip().splitlines()
    for number, (one, other) in enumerate(zip(before, after, strict=False), 1):
        if one != other:
            return f"line {number} was {one.strip()[:80]!r}, is {other.strip()[:80]!r}"
    return f"{len(before)} lines were expected, {len(after)} printed"


def lines(outcome: Outcome) -> Iterator[str]:
    """The result for a person: what no longer holds first."""
    if outcome.same:
        yield f"The install is the one audited, file for file (vLLM {outcome.version_now})."
    elif outcome.version_then != outcome.version_now:
        yield f"The install was vLLM {outcome.version_then} and is {outcome.version_now} now: scan it again."
    else:
        named = outcome.differing
        if named:
            more = f" and {len(named) - 10} more" if len(named) > 10 else ""
            yield f"The install is not the one audited: {', '.join(named[:10])}{more} differ."
        else:
            yield (
                "The install is not the one audited, file for file, but every file that an answer rests on is the same."
                " Which others differ can't be said: the audit keeps one hash of all of them."
            )
    for check in outcome.checks:
        if check.state in ("changed", "gone"):
            first = check.what.splitlines()[0][:120]
            yield f"  {check.state:8} {check.verdict}: {first} ({check.why})"
    held = [check for check in outcome.checks if check.state == "holds"]
    skipped = [check for check in outcome.checks if check.state == "not run"]
    answers = {check.verdict for check in outcome.checks if check.state in ("changed", "gone")}
    yield f"{len(held)} of {len(held) + len(outcome.checks) - len(held) - len(skipped)} checks hold" + (
        f"; answers that need a new look: {', '.join(sorted(answers))}." if answers else "."
    )
    for why in dict.fromkeys(check.why for check in skipped):
        number = sum(check.why == why for check in skipped)
        yield f"Not compared: {count(number, 'command')} ({why})."
