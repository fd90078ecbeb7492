"""``ddaudit lint``: do this install, this target, this drafter and these serve flags go together?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from audit_cli.console import Console
from audit_cli.errors import DONE, FOUND, usage
from audit_cli.parameters import Backend, HostKey, Identity, Json, SshConfig, Venv, Verbose, options

if TYPE_CHECKING:
    from reports.model import Audit


def lint(
    install: Annotated[
        str, typer.Option("--install", help="A target, or an audit of one: its id, file, or `last`.")
    ] = "",
    target: Annotated[
        str, typer.Option("--target", help="The target model: a folder or hub id there; local:DIR is here.")
    ] = "",
    drafter: Annotated[str, typer.Option("--drafter", help="The drafter, likewise.")] = "",
    serve_args: Annotated[str, typer.Option("--serve-args", help="The flags of `vllm serve`, as one string.")] = "",
    as_json: Json = False,
    fail_on: Annotated[str, typer.Option("--fail-on", metavar="error|warning", help="Exit 1 on such a finding.")] = "",
    venv: Venv = "",
    identity: Identity = "",
    ssh_config: SshConfig = "",
    host_key: HostKey = "",
    ssh_backend: Backend = "paramiko",
    verbose: Verbose = 0,
) -> int:
    """What does not fit between an install, a target model, a drafter and the flags: findings with what to do."""
    from audit_cli import linting

    if fail_on not in ("", "error", "warning"):
        raise usage(
            f"--fail-on {fail_on} says nothing here",
            "findings are errors, warnings or remarks",
            "--fail-on error, or warning",
        )
    if not (install or target or drafter or serve_args):
        raise usage(
            "there is nothing to lint",
            "no option names anything",
            "give --install, --target, --drafter or --serve-args",
        )
    flags = linting.serve_flags(serve_args) if serve_args else None
    there = tuple(name for name in (target, drafter) if name and not name.startswith("local:"))
    how = options(venv, [], identity, ssh_config, host_key, ssh_backend, probe=True, models=there)
    audit = _audit(install, how, Console(verbose, quiet=as_json)) if install else None
    probes = audit.probes if audit is not None else ()
    found = linting.findings(audit, _model(target, audit), _model(drafter, audit), flags, probes)
    print(json.dumps(linting.to_json(found), indent=2, ensure_ascii=False) if as_json else linting.to_text(found))
    bad = ("error",) if fail_on == "error" else ("error", "warning")
    return FOUND if fail_on and any(item.severity in bad for item in found) else DONE


def _audit(install: str, how: Any, console: Console) -> Audit:
    from audit_cli import kept, paths
    from audit_cli.errors import DdauditError
    from audit_cli.scan import scan_target
    from audit_cli.targets import parse

    try:
        return kept.load(kept.find(install, paths.state_dir() / "audits"))
    except DdauditError:
        if install == "last" or install.endswith(".json"):
            raise
    audit = scan_target(parse(install), how, console)
    console.end_phase()
    return audit


def _model(name: str, audit: Audit | None) -> Mapping[str, Any] | None:
    """What the probe of the host read of the model, or what is read here."""
    if not name:
        return None
    if audit is not None and not name.startswith("local:"):
        for probe in audit.probes:
            found = probe.facts.get("models", {}).get(name) if probe.id == "models" else None
            if isinstance(found, dict):
                return found
        if audit.target.kind == "ssh":
            raise usage(
                f"{name} was not read on {audit.target.host}",
                "the audit holds no such model",
                "scan it again with --model",
            )
    from probes import models

    place = name.removeprefix("local:")
    return models.read(str(Path(place).expanduser()) if Path(place).expanduser().exists() else place)
