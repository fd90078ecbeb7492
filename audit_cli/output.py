"""An audit to the user: the report or the JSON on stdout or in a file, the answer on stderr."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from audit_cli.console import Console
from audit_cli.disk import STDOUT, in_words, naming_stdout
from audit_cli.errors import DONE, FOUND, usage
from audit_cli.store import write_atomic
from reports.model import VERDICT_IDS, Audit, to_json

if TYPE_CHECKING:
    from audit_cli.opening import Options
    from audit_cli.targets import Spec

Form = Literal["markdown", "json", "sarif"]
_OUTCOMES = ("yes", "no", "partial", "unknown", "n/a")
_PATHS = ("native", "standalone", "retrain", "chain", "none")


def output_form(as_json: bool, sarif: bool) -> Form:
    """Raises DdauditError (exit 2) when both are wanted, or a library is missing:
    before the scan, not after it."""
    if as_json and sarif:
        raise usage("--json and --sarif do not go together", "each is a form of the whole report", "choose one")
    if sarif:
        try:
            importlib.import_module("sarif_pydantic")
        except ModuleNotFoundError as error:
            raise usage("SARIF needs a library that is not here", str(error), "pip install '.[sarif]'") from None
    return "json" if as_json else "sarif" if sarif else "markdown"


def show(
    audit: Audit, console: Console, *, form: Form, out: Path | None, redact: bool, saved: Path | None = None
) -> None:
    """Print, or write to ``out``. The answer goes to stderr too, unless a machine is listening."""
    if redact:
        from reports.redact import redact as without_names

        audit = without_names(audit)
    if form == "json":
        text = json.dumps(to_json(audit), indent=2, ensure_ascii=False) + "\n"
    elif form == "sarif":
        from reports import sarif

        text = sarif.render(audit)
    else:
        from reports.markdown import render

        text = render(audit)
    try:
        put(text, out)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or (error.filename == STDOUT and saved is None):
            raise
        said = in_words(error)
        if saved is None:  # the file can't be written, and no copy is kept: the answer must not be lost
            put(text, None)
        else:
            said.hint += f"; the audit is kept: `ddaudit report {saved.stem}` shows it"
        raise said from None
    if not console.quiet:
        _summary(audit, console, out, saved)


def put(text: str, out: Path | None) -> None:
    """To the file, or to standard output. Raises OSError that names it."""
    data = text.encode("utf-8", "backslashreplace")
    if out is not None:
        write_atomic(out, data, mode=0o644)
    else:
        with naming_stdout():
            sys.stdout.buffer.write(data)
            sys.stdout.flush()


def _summary(audit: Audit, console: Console, out: Path | None, saved: Path | None) -> None:
    console.end_phase()
    if console.tty:
        from rich.console import Console as Rich

        from reports.terminal import render

        Rich(stderr=True, color_system="auto" if console.colour else None).print(render(audit))
    else:
        from reports.summary import lines

        for line in lines(audit):
            console.say(line)
    if out:
        console.say(f"report: {out}")
    elif saved:
        console.say(f"audit kept as {saved.stem}: `ddaudit report {saved.stem}` shows it again")


def with_runs(audit: Audit, runs: Sequence[Path]) -> Audit:
    """The audit with a recommendation that weighs a measured run, the last one. Raises DdauditError (exit 2)."""
    from audit_cli.measured import from_bench
    from audit_cli.recommend import recommend

    measured = None
    for path in runs:
        try:
            data = json.loads(path.read_bytes())
            if not isinstance(data.get("results"), list):
                raise ValueError("it has no list `results`")
            found = from_bench(data)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise usage(
                f"{path} is no bench result", str(error)[:200], "give a file that a bench run wrote as JSON"
            ) from None
        if found is None:
            raise usage(
                f"{path} is no full measurement", "it lacks plain decoding or the chain", "run the bench with both"
            )
        measured = found
    if measured is None:
        return audit
    advice = recommend(
        audit.verdicts, spec=audit.target.spec, vllm_version=audit.install.vllm_version, measured=measured
    )
    return dataclasses.replace(audit, recommendation=advice)


def show_fleet(
    wanted: Sequence[tuple[Spec, Options]],
    console: Console,
    rules: Sequence[Path],
    conditions: Sequence[Callable[[Audit], bool]],
    *,
    form: Form,
    out: Path | None,
    redact: bool,
) -> int:
    """Scan several targets, keep each audit, print one matrix (or one JSON object of all). Returns the exit code."""
    from audit_cli import fleet, kept, paths

    if form == "sarif":
        raise usage(
            "--sarif is for one target", "a log holds one audit", "`ddaudit report ID --sarif` makes one of each audit"
        )
    outcomes = []
    for outcome in fleet.scan_all(wanted, console, rules):
        if outcome.audit is not None:
            kept.keep_or_warn(outcome.audit, paths.state_dir() / "audits", console)
        outcomes.append(outcome)
    order = {id(spec): number for number, (spec, _) in enumerate(wanted)}
    outcomes.sort(key=lambda o: order[id(o.spec)])
    put(fleet.as_json(outcomes, redact) if form == "json" else fleet.matrix(outcomes, redact), out)
    if out is not None:
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
            "it is no answer and no path",
            f"write ID=OUTCOME with one of {', '.join(_OUTCOMES)}, or path={'|'.join(_PATHS)}",
        )
    if id not in VERDICT_IDS:
        raise usage(f"--fail-on: there is no answer {id[:60]}", "no rule gives it", f"one of {', '.join(VERDICT_IDS)}")

    def condition(audit: Audit) -> bool:
        verdict = audit.verdict(id)
        return verdict is not None and verdict.outcome == wanted

    return condition
