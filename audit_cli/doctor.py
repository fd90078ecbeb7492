"""``ddaudit doctor``: what a scan needs, here and on a host, one line each with what to do about it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from audit_cli.console import Console
from audit_cli.errors import DdauditError
from audit_cli.opening import Options
from audit_cli.paths import cache_dir, state_dir
from audit_cli.targets import Spec
from audit_cli.transport.base import Limits

_MARKS = {"ok": "✓", "warn": "!", "bad": "✗"}


@dataclass(frozen=True)
class Check:
    name: str
    state: Literal["ok", "warn", "bad"]
    said: str
    fix: str = ""

    def line(self) -> str:
        return f"{_MARKS[self.state]} {self.name}: {self.said}" + (f"\n    {self.fix}" if self.fix else "")


def here() -> Iterator[Check]:
    """This machine."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check(
        "python",
        "ok" if sys.version_info >= (3, 10) else "bad",
        version,
        "" if sys.version_info >= (3, 10) else "3.10 or newer is needed",
    )
    for name in ("libcst", "paramiko"):
        found = importlib.util.find_spec(name) is not None
        yield Check(
            name,
            "ok" if found else "bad",
            "installed" if found else "missing",
            "" if found else "install ddaudit again",
        )
    ssh = shutil.which("ssh")
    fix = "without it, ssh_config is read without Include and Match, and --ssh-backend openssh is not there"
    yield Check("ssh", "ok" if ssh else "warn", ssh or "missing", "" if ssh else fix)
    pip = importlib.util.find_spec("pip") is not None or shutil.which("pip") or shutil.which("uv")
    yield Check("pip", "ok" if pip else "warn", "there" if pip else "missing", "" if pip else "pypi: targets need it")
    for name, folder in (("cache", cache_dir()), ("audits", state_dir())):
        yield _folder(name, folder)


def _folder(name: str, folder: Path) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free >> 20
    except OSError as error:
        return Check(
            name, "bad", f"{folder}: {error.strerror}", f"set DDAUDIT_{'CACHE' if name == 'cache' else 'STATE'}_DIR"
        )
    if not os.access(folder, os.W_OK):
        return Check(name, "bad", f"{folder} can't be written", "check its owner")
    return Check(
        name,
        "ok" if free > 1024 else "warn",
        f"{folder}, {free:,} MB free",
        "" if free > 1024 else "a wheel takes about 350 MB",
    )


def there(spec: Spec, options: Options, console: Console) -> Iterator[Check]:
    """A host: the link, its tools, the environment."""
    from audit_cli import candidates
    from audit_cli.hosts import connect, python_of

    try:
        transport = connect(spec, options, console)
    except DdauditError as error:
        yield Check("connection", "bad", f"{error.what}: {error.why}", error.hint)
        return
    try:
        console.end_phase()
        key = getattr(transport, "host_key", "")
        yield Check("connection", "ok", f"{transport.name}{f', host key {key}' if key else ''}")
        script = b'uname -sm; for t in python3 nvidia-smi; do command -v $t || echo "$t is missing"; done; exit 0\n'
        done = transport.run(["sh", "-s"], script, Limits(idle=15, total=20, max_bytes=1 << 16))
        said = done.out.decode("utf-8", "replace").splitlines()
        yield Check("system", "ok" if said else "bad", said[0] if said else "no POSIX shell answered")
        gpu = next((line for line in said if "nvidia-smi" in line), "nvidia-smi is missing")
        yield Check(
            "gpu", "warn" if "missing" in gpu else "ok", gpu, "scans need none; runs do" if "missing" in gpu else ""
        )
        found = candidates.find(transport)
        names = ", ".join(f"{c.prefix} (vLLM {c.version})" for c in found)
        yield Check(
            "environments",
            "ok" if found else "warn",
            names or "none found in the usual places",
            "" if found else "name one with --venv",
        )
        if options.venv or len(found) == 1:
            yield from _environment(transport, python_of(transport, options, spec.kind == "local", console))
    except DdauditError as error:
        yield Check("host", "bad", f"{error.what}: {error.why}", error.hint)
    finally:
        transport.close()


def _environment(transport: object, python: str) -> Iterator[Check]:
    from typing import Any, cast

    from audit_cli.inventory import shown
    from audit_cli.remote import ask

    value, _ = ask(
        cast(Any, transport),
        python,
        ["metadata", "inventory"],
        "[platform.python_version(), where('vllm')]",
        limits=Limits(idle=30, total=60),
    )
    yield Check("python there", "ok", f"{python}, {shown(str(value[0]))}")
    place = value[1]
    fix = "" if place else "name another environment with --venv"
    yield Check("vllm", "ok" if place else "bad", shown("/".join(place)) if place else "not importable", fix)
