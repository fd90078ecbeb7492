"""An audit to the user: the report or the JSON on stdout or in a file, the answer on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from audit_cli.console import Console
from audit_cli.errors import DONE, FOUND, usage
from audit_cli.store import write_atomic
from reports.model import VERDICT_IDS, Audit, to_json

if TYPE_CHECKING:
    from audit_cli.opening import Options
    from audit_cli.targets import Spec

_OUTCOMES = ("yes", "no", "partial", "unknown", "n/a")
_PATHS = ("native", "standalone", "retrain", "chain", "none")


def show(
    audit: Audit, console: Console, *, as_json: bool, out: Path | None, redact: bool, saved: Path | None = None
) -> None:
    """Print, or write to ``out``. The three lines of the answer go to stderr, unless the report that begins with
    them goes to a terminal."""
    if redact:
        from reports.redact import redact as without_names

        audit = without_names(audit)
    if as_json:
        text = json.dumps(to_json(audit), indent=2, ensure_ascii=False) + "\n"
    else:
        from reports.markdown import render

        text = render(audit)
    data = text.encode("utf-8", "backslashreplace")
    if out is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        write_atomic(out, data, mode=0o644)
    if saved is not None and not (console.quiet and as_json):
        _summary(audit, console, out, saved)


def _summary(audit: Audit, console: Console, out: Path | None, saved: Path) -> None:
    console.end_phase()
    if console.tty:
        from rich.console import Console as Rich

        from reports.terminal import render

        Rich(stderr=True).print(render(audit))
    else:
        from reports.summary import lines

        for line in lines(audit):
            console.say(line)
    console.say(
        f"report: {out}" if out else f"audit kept as {saved.stem}: `ddaudit report {saved.stem}` shows it again"
    )


def show_fleet(
    wanted: Sequence[tuple[Spec, Options]],
    console: Console,
    rules: Sequence[Path],
    conditions: Sequence[Callable[[Audit], bool]],
    *,
    as_json: bool,
    out: Path | None,
    redact: bool,
) -> int:
    """Scan several targets, keep each audit, print one matrix (or one JSON object of all). Returns the exit code."""
    from audit_cli import fleet, kept, paths

    outcomes = []
    for outcome in fleet.scan_all(wanted, console, rules):
        if outcome.audit is not None:
            kept.keep(outcome.audit, paths.state_dir() / "audits")
        outcomes.append(outcome)
    order = {id(spec): number for number, (spec, _) in enumerate(wanted)}
    outcomes.sort(key=lambda o: order[id(o.spec)])
    text = fleet.as_json(outcomes, redact) if as_json else fleet.matrix(outcomes, redact)
    if out is None:
        sys.stdout.write(text)
    else:
        write_atomic(out, text.encode("utf-8", "backslashreplace"), mode=0o644)
        console.say(f"matrix: {out}")
    code = fleet.exit_code(outcomes)
    if code == DONE and any(condition(o.audit) for o in outcomes if o.audit is not None for condition in conditions):
        return FOUND
    return code


def fails(text: str) -> Callable[[Audit], bool]:
    """The condition that ``--fail-on`` names: ID=OUTCOME, path=PATH. Raises DdauditError (exit 2) when it names
    none."""
    id, equals, wanted = text.partition("=")
    if id == "path" and wanted in _PATHS:
        return lambda audit: audit.recommendation.path == wanted
    if not equals or wanted not in _OUTCOMES:
        raise usage(
            f"--fail-on {text[:100]} says nothing",
            "",
            f"write ID=OUTCOME with one of {', '.join(_OUTCOMES)}, or path={'|'.join(_PATHS)}",
        )
    if id not in VERDICT_IDS:
        raise usage(f"--fail-on: there is no answer {id[:60]}", "", f"one of {', '.join(VERDICT_IDS)}")

    def condition(audit: Audit) -> bool:
        verdict = audit.verdict(id)
        return verdict is not None and verdict.outcome == wanted

    return condition
