"""The parameters that several commands share, and what they mean together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from audit_cli.errors import usage

if TYPE_CHECKING:
    from audit_cli.opening import Options

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET",
        help="user@host[:port] | ssh alias | local | pypi:vllm==0.33.0 | wheel:FILE | dir:FOLDER",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the report.")]
Sarif = Annotated[bool, typer.Option("--sarif", help="SARIF 2.1.0 on stdout instead of the report.")]


def _in_a_folder(out: Path | None) -> Path | None:
    """Refused before the scan: a folder that is not there is a typing error more often than a wish."""
    if out is not None and not out.parent.is_dir():
        raise usage(
            f"--out {out} can't be written", f"there is no folder {out.parent}", "make it, or name another file"
        )
    return out


Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the report to this file.", dir_okay=False, callback=_in_a_folder),
]
Redact = Annotated[bool, typer.Option("--redact", help="Leave hosts, users and paths out of the report.")]
Rules = Annotated[
    list[Path] | None, typer.Option("--rules", help="A folder of rules of your own (repeatable).", exists=True)
]
Venv = Annotated[str, typer.Option("--venv", help="The environment that runs vLLM: the folder that holds bin/python.")]
PythonPath = Annotated[
    list[str] | None,
    typer.Option("--pythonpath", help="A folder that PYTHONPATH adds where vLLM runs (repeatable)."),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model there, as a folder or hub id, to read the configuration of (repeatable)."),
]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Say what is run where; twice: tracebacks too.")
]
Identity = Annotated[str, typer.Option("--identity", "-i", help="SSH: a private key file.")]
SshConfig = Annotated[str, typer.Option("--ssh-config", "-F", help="SSH: another configuration file.")]
HostKey = Annotated[
    str,
    typer.Option(
        "--host-key", metavar="SHA256:...", help="SSH: accept the host key with this fingerprint for this run."
    ),
]
Backend = Annotated[str, typer.Option("--ssh-backend", help="SSH: paramiko, or openssh (the system's ssh).")]
Container = Annotated[
    str, typer.Option("--container", metavar="[podman:]NAME", help="Look inside this container of the target.")
]
Sudo = Annotated[bool, typer.Option("--sudo", help="Run the inventory as root on the target (sudo -n).")]


def options(
    venv: str,
    pythonpath: list[str] | None,
    identity: str,
    ssh_config: str,
    host_key: str,
    ssh_backend: str,
    container: str = "",
    sudo: bool = False,
    probe: bool = False,
    models: tuple[str, ...] = (),
) -> Options:
    """The options of a target from its parameters. Raises DdauditError (exit 2)."""
    from audit_cli import opening, paths

    if ssh_backend not in ("paramiko", "openssh"):
        raise usage(f"--ssh-backend {ssh_backend} is not known", "there are two", "paramiko, or openssh")
    where = (paths.cache_dir(), venv, tuple(pythonpath or ()))
    return opening.Options(*where, identity, ssh_config, host_key, ssh_backend, container, sudo, probe, models)
