"""Installs that a Python goes with: on this machine, or on a host."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audit_cli import candidates
from audit_cli.archive import Wheel
from audit_cli.console import Console
from audit_cli.errors import host, usage
from audit_cli.fetch import fetch
from audit_cli.inventory import Found, Inventory, parse
from audit_cli.opening import Index, Opened, Options, local_reader, local_schemas, schemas_of
from audit_cli.remote import ask, literal
from audit_cli.store import Store, write_atomic
from audit_cli.targets import Spec
from audit_cli.transport.base import Transport
from audit_cli.transport.pipe import Pipe
from audit_cli.wheels import cached
from reports.model import Probe, Target

_GIVE_VENV = "name the folder that holds bin/python: --venv PATH"


def connect(spec: Spec, options: Options, console: Console) -> Transport:
    """The way to the target, connected. Raises DdauditError (exit 3; exit 2 when an option names no file)."""
    if spec.kind == "ssh":
        for option, name in (("-i", options.identity), ("-F", options.ssh_config)):
            if name and name != "none" and not Path(name).expanduser().exists():
                raise usage(f"{option} {name} can't be used", "there is no such file", "check the spelling")
    if spec.kind == "local":
        transport: Transport = Pipe("local", lambda argv: inside(argv, options))
    elif options.ssh_backend == "openssh":
        if options.fingerprint:
            raise usage(
                "--host-key says nothing to --ssh-backend openssh", "ssh checks host keys by itself", "leave one out"
            )
        from audit_cli.transport.openssh import openssh

        transport = openssh(spec, options)
    else:
        from audit_cli.transport.ssh import Ssh

        transport = Ssh(spec, options, console)
    return transport


def inside(argv: Sequence[str], options: Options) -> list[str]:
    """``argv`` as it has to be run to act inside the container or as root."""
    words = list(argv)
    if options.container:
        engine, _, name = options.container.rpartition(":")
        words = [engine or "docker", "exec", "-i", name, *words]
    return ["sudo", "-n", *words] if options.sudo else words


def python_of(transport: Transport, options: Options, local: bool, console: Console) -> str:
    """The Python that runs vLLM there. Raises DdauditError (exit 3) when there is none, or a choice."""
    venv = options.venv
    if not venv and local and not options.container:
        venv = _local_default()
    if not venv:
        console.phase("Looking for vLLM")
        found = candidates.only_one(transport, _GIVE_VENV)
        console.say(f"using {found.prefix} (vLLM {found.version}), the only one found")
        venv = found.prefix
    if local and not options.container:
        venv = str(Path(venv).expanduser().absolute())
    elif venv.startswith("~"):
        raise usage(
            f"--venv {venv} can't be used",
            "your shell did not expand ~, and the host's is not asked to",
            "write the whole path",
        )
    if posixpath.basename(venv).startswith("python"):
        return venv
    return posixpath.join(venv, "Scripts/python.exe" if local and sys.platform == "win32" else "bin/python")


def _local_default() -> str:
    for place in (os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"), ".venv", "venv"):
        if place and any(
            any(Path(place).glob(f"lib/python3*/site-packages/{name}"))
            for name in ("vllm", "vllm-*.dist-info", "__editable__*vllm*")
        ):
            return place
    return ""


def open_host(spec: Spec, options: Options, console: Console) -> Opened:
    """Raises DdauditError (exit 3) when the host, its Python or vLLM can't be had."""
    local = spec.kind == "local"
    transport = connect(spec, options, console)
    try:
        return _open(spec, options, console, transport, local and not options.container)
    finally:
        transport.close()


def _open(spec: Spec, options: Options, console: Console, transport: Transport, local: bool) -> Opened:
    python = python_of(transport, options, local, console)
    console.phase(f"Taking the inventory of {transport.name}")
    console.detail(f"on {transport.name}: {shlex.quote(python)} -I -B -c ... < probes/inventory.py")
    if local and not Path(python).exists():
        raise host(
            "no-python",
            f"there is no Python at {python}",
            "the folder is not a virtual environment, or it is broken",
            _GIVE_VENV,
        )
    data = _inventory(spec, options, transport, python, local)
    inventory = parse(data)
    if not inventory.vllm:
        others = [c for c in candidates.find(transport) if posixpath.join(c.prefix, "bin/python") != python]
        why = f"Python {inventory.python.get('version', '')} at {python} finds no package vllm"
        hint = (
            f"vLLM was found in {', '.join(c.prefix for c in others[:5])}: try --venv {others[0].prefix}"
            if others
            else _GIVE_VENV
        )
        raise host("no-vllm", f"there is no vLLM in that environment on {transport.name}", why, hint)
    target = Target(spec.text, spec.kind, "" if local else transport.name, python, inventory.site_packages)
    if local:
        schemas = local_schemas(inventory, options.cache)
        probes = _probes(transport, python, options, console)
        folder = Path(inventory.site_packages)
        return Opened(target, inventory, local_reader(inventory), schemas, folder=folder, probes=probes)
    read, lost = _sources(inventory, options, console, transport, python)

    def ask_schemas(wanted: list[Found]) -> Any:
        places = literal([found.place for found in wanted])
        return ask(transport, python, ["op_schemas"], f"take({places})")[0]

    schemas = schemas_of(inventory.binaries, options.cache, ask_schemas)
    probes = _probes(transport, python, options, console)
    return Opened(target, inventory, read, schemas, lost, probes=probes, host_key=getattr(transport, "host_key", ""))


def _probes(transport: Transport, python: str, options: Options, console: Console) -> tuple[Probe, ...]:
    if not options.probe:
        return ()
    from audit_cli.probing import run_probes

    console.phase(f"Probing {transport.name}")
    arguments: dict[str, dict[str, Any]] = {"models": {"models": list(options.models)}}
    return run_probes(transport, python, arguments, progress=lambda id: console.detail(f"probe {id}"))


def _inventory(spec: Spec, options: Options, transport: Transport, python: str, local: bool) -> Any:
    asked: dict[str, Any] = {"pythonpath": list(options.pythonpath)}
    if local:
        index = Index(options.cache, f"{python}\0{options.pythonpath}")
        data, _ = ask(
            transport,
            python,
            ["metadata", "inventory"],
            f"take({literal({**asked, 'index': index.known, 'stats': True})})",
        )
        index.keep(data)
        return data
    # The host reads every file again, but need not send an answer that is here already.
    key = hashlib.sha256(json.dumps([spec.text, python, options.container, options.pythonpath]).encode()).hexdigest()
    kept = options.cache / "indexes" / f"{key}.host"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(kept.read_bytes())
    data, digest = ask(transport, python, ["metadata", "inventory"], f"take({literal(asked)})", known=known.keys())
    if data is None:
        return known[digest]
    write_atomic(kept, json.dumps({digest: data}, separators=(",", ":")).encode())
    return data


def _sources(inventory: Inventory, options: Options, console: Console, transport: Transport, python: str) -> Any:
    """(reader by sha256, what could not be had): from the store, from a wheel that is here, from the host, in this
    order."""
    store = Store(options.cache / "files")
    wheel: Wheel | None = None
    missing = list({found.sha256: found for found in inventory.sources if not store.has(found.sha256)}.values())
    if missing:
        version = inventory.versions.get("vllm", "")
        path = cached("vllm", version, options.cache / "wheels") if version else None
        if path is not None:
            known = Wheel(path, options.cache / "indexes")
            wheel = known
            missing = [found for found in missing if not known.has(found.sha256)]
    lost: dict[str, str] = {}
    if missing:
        size = sum(found.size for found in missing)
        free = shutil.disk_usage(_existing(options.cache)).free
        if free < size + (1 << 20):
            raise host(
                "disk-full",
                f"{size >> 20} MB of files to fetch",
                f"{free >> 20} MB are free for {options.cache}",
                "free some, or set DDAUDIT_CACHE_DIR",
            )
        console.phase(f"Fetching {len(missing):,} files ({size / 1e6:.1f} MB) from {transport.name}")
        lost = fetch(transport, python, missing, store, console.progress)
    console.detail(f"{len(missing):,} of {len({f.sha256 for f in inventory.sources}):,} different files were fetched")

    def read(sha256: str) -> bytes:
        if wheel is not None and wheel.has(sha256):
            return wheel.get(sha256)
        return store.get(sha256)

    return read, lost


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
