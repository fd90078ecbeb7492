"""Several targets at once: reached side by side, judged one after the other, one matrix; a host that fails fails
alone."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit_cli.console import Console, one_line
from audit_cli.errors import HOST, INCOMPLETE, DdauditError, usage
from audit_cli.opening import Options
from audit_cli.scan import is_incomplete, scan_target
from audit_cli.targets import Spec, parse
from reports.model import Audit, to_json

_AT_ONCE = 64
_KEYS = {"target", "venv", "pythonpath", "identity", "host_key", "container", "sudo", "ssh_backend"}


@dataclass(frozen=True)
class Outcome:
    """The audit of one target, or why there is none."""

    spec: Spec
    audit: Audit | None
    error: DdauditError | None


def read_inventory(path: Path, options: Options) -> list[tuple[Spec, Options]]:
    """The targets of a YAML file: a list (or ``hosts:`` with one) of targets, or of objects with ``target`` and its
    own options. Raises DdauditError (exit 2)."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise usage(f"{path} can't be read", str(error).splitlines()[0], "a YAML list of targets") from None
    rows = data.get("hosts") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise usage(f"{path} names no targets", "a list is wanted", "a list of targets, or `hosts:` with one")
    return [_entry(row, path, options) for row in rows]


def _entry(row: Any, path: Path, options: Options) -> tuple[Spec, Options]:
    if isinstance(row, str):
        return parse(row), options
    if not isinstance(row, dict) or not isinstance(row.get("target"), str):
        raise usage(
            f"{path}: {str(row)[:80]} is no target", "each entry names one", "a string, or an object with `target`"
        )
    unknown = sorted(set(map(str, row)) - _KEYS)
    if unknown:
        raise usage(
            f"{path}: {row['target']} has unknown keys: {', '.join(unknown)}", "", f"known: {', '.join(sorted(_KEYS))}"
        )
    own = {("fingerprint" if key == "host_key" else key): value for key, value in row.items() if key != "target"}
    if "pythonpath" in own:
        own["pythonpath"] = tuple([own["pythonpath"]] if isinstance(own["pythonpath"], str) else own["pythonpath"])
    return parse(row["target"]), dataclasses.replace(options, **own)


def scan_all(targets: Sequence[tuple[Spec, Options]], console: Console, rules: Sequence[Path]) -> Iterator[Outcome]:
    """The outcome of each target as it is there. Logging in and fetching go side by side; the judgements use every
    processor by themselves, so that they take turns."""
    turn = threading.Lock()

    def one(spec: Spec, options: Options) -> Outcome:
        try:
            return Outcome(spec, scan_target(spec, options, Console(quiet=True), rules, turn), None)
        except DdauditError as error:
            return Outcome(spec, None, error)
        except Exception as error:  # whatever it is, it is this target's
            why = f"{type(error).__name__}: {error}"[:300]
            return Outcome(spec, None, DdauditError("bug", "ddaudit failed", why, "scan it alone with -vv", INCOMPLETE))

    pool = ThreadPoolExecutor(min(_AT_ONCE, len(targets)))
    try:
        futures: list[Future[Outcome]] = [pool.submit(one, spec, options) for spec, options in targets]
        for number, future in enumerate(as_completed(futures), 1):
            outcome = future.result()
            said = (
                outcome.error.what
                if outcome.error
                else f"vLLM {outcome.audit.install.vllm_version}"
                if outcome.audit
                else ""
            )
            console.say(f"{number}/{len(futures)} {one_line(outcome.spec.text)}: {one_line(said)}")
            yield outcome
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def matrix(outcomes: Sequence[Outcome], redact: bool = False) -> str:
    """One table in Markdown, a row a target; what failed is named with its reason."""
    from reports.matrix import render
    from reports.redact import redact as without_names

    audits = [without_names(o.audit) if redact else o.audit for o in outcomes if o.audit is not None]
    failures = {
        f"target {n}" if redact else one_line(o.spec.text): o.error.code
        if redact
        else one_line(f"{o.error.what}: {o.error.why}").rstrip(": ")
        for n, o in enumerate(outcomes, 1)
        if o.error is not None
    }
    return render(audits, failures)


def as_json(outcomes: Sequence[Outcome], redact: bool = False) -> str:
    """{"schema_version", "audits": [...], "failed": [{"target", "error"}]}."""
    from reports.redact import redact as without_names

    audits = [without_names(o.audit) if redact else o.audit for o in outcomes if o.audit is not None]
    failed = [
        {
            "target": f"target {n}" if redact else o.spec.text,
            "error": {"code": o.error.code} if redact else o.error.to_json(),
        }
        for n, o in enumerate(outcomes, 1)
        if o.error is not None
    ]
    body = {"schema_version": 1, "audits": [to_json(audit) for audit in audits], "failed": failed}
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.error is not None for outcome in outcomes):
        return HOST
    return INCOMPLETE if any(outcome.audit is not None and is_incomplete(outcome.audit) for outcome in outcomes) else 0
