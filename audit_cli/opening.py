"""From a target to an install that the rules can read, whatever the way to it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audit_cli.archive import Wheel, read_tarball
from audit_cli.console import Console
from audit_cli.errors import host, usage
from audit_cli.inventory import Found, Inventory, parse
from audit_cli.store import Store, write_atomic
from audit_cli.targets import Spec
from audit_cli.wheels import wheel_for
from probes import inventory as probe
from probes import op_schemas
from reports.model import Probe, Target

Schemas = Mapping[str, tuple[str, ...] | None]


@dataclass(frozen=True)
class Options:
    """How to get at a target. ``cache`` is the folder of everything that can be made again."""

    cache: Path
    venv: str = ""
    pythonpath: tuple[str, ...] = ()
    identity: str = ""
    ssh_config: str = ""
    fingerprint: str = ""
    ssh_backend: str = "paramiko"
    container: str = ""
    sudo: bool = False
    probe: bool = False  # run the live probes while the host is connected
    models: tuple[str, ...] = ()  # for the probe that reads model configurations there


@dataclass(frozen=True)
class Opened:
    """``folder`` is where the install lies on this machine, None when it doesn't. ``unreadable``: sha256 -> why it
    could not be had."""

    target: Target
    inventory: Inventory
    read: Callable[[str], bytes]
    schemas: Schemas
    unreadable: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    probes: tuple[Probe, ...] = ()
    host_key: str = ""


def open_target(spec: Spec, options: Options, console: Console) -> Opened:
    """Raises DdauditError: exit 3 when the target can't be had or has no vLLM."""
    if spec.kind in ("pypi", "wheel"):
        opened = _open_wheel(spec, options, console)
    elif spec.kind == "dir":
        opened = _open_dir(spec, options, console)
    else:
        from audit_cli.hosts import open_host

        opened = open_host(spec, options, console)
    if not any(found.origin == "vllm" and found.path.endswith(".py") for found in opened.inventory.files):
        raise host(
            "no-vllm",
            f"there is no vLLM in {spec.text}",
            "the folder holds no Python file of it",
            "name another venv or folder",
        )
    return opened


def _open_wheel(spec: Spec, options: Options, console: Console) -> Opened:
    if options.venv or options.pythonpath:
        raise usage(
            "--venv and --pythonpath say nothing about a wheel",
            "no environment goes with it",
            "use them with a host or with local",
        )
    if spec.kind == "pypi":
        console.phase(f"Fetching {spec.what}")
        path = wheel_for(spec.what, options.cache / "wheels")
    else:
        path = Path(spec.what).expanduser()
    console.phase(f"Reading {path.name}")
    wheel = Wheel(path, options.cache / "indexes")
    inventory = parse(wheel.data)
    return Opened(Target(spec.text, spec.kind), inventory, wheel.get, _tuples(wheel.schemas))


def _open_dir(spec: Spec, options: Options, console: Console) -> Opened:
    path = Path(spec.what).expanduser()
    if options.venv or options.pythonpath:
        raise usage(
            "--venv and --pythonpath say nothing about a folder",
            "no environment goes with it",
            "use them with a host or with local",
        )
    if not path.exists():
        raise host(
            "no-folder",
            f"{path} does not exist",
            "there is no such file or folder on this machine",
            "give a site-packages folder, or a tarball of one",
        )
    console.phase(f"Reading {path.name}")
    if path.is_file():
        store = Store(options.cache / "files")
        data, found = read_tarball(path, store)
        return Opened(Target(spec.text, "dir"), parse(data), store.get, _tuples(found))
    for folder in (path, *path.glob("lib/python3*/site-packages"), path.parent):
        if (folder / "vllm" / "__init__.py").is_file():
            break
    else:
        raise host(
            "no-vllm",
            f"there is no vLLM in {path}",
            "no vllm/__init__.py there",
            "give the folder that holds vllm/, usually site-packages",
        )
    folder = folder.resolve()
    index = Index(options.cache, str(folder))
    data = probe.of_folder(str(folder), index.known)
    index.keep(data)
    inventory = parse(data)
    schemas = local_schemas(inventory, options.cache)
    return Opened(
        Target(spec.text, "dir", site_packages=str(folder)), inventory, local_reader(inventory), schemas, folder=folder
    )


def local_reader(inventory: Inventory) -> Callable[[str], bytes]:
    """Reads files of this machine by hash; OSError when a file is no longer what it was."""
    places = {found.sha256: found.place for found in inventory.sources}

    def read(sha256: str) -> bytes:
        data = Path(places[sha256]).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise OSError(f"{places[sha256]} changed while the scan ran")
        return data

    return read


def local_schemas(inventory: Inventory, cache: Path) -> Schemas:
    return schemas_of(inventory.binaries, cache, lambda wanted: op_schemas.take([found.place for found in wanted]))


def schemas_of(
    binaries: tuple[Found, ...], cache: Path, ask: Callable[[list[Found]], Mapping[str, list[str] | None]]
) -> dict[str, tuple[str, ...] | None]:
    """Op schemas by sha256, from the cache; ``ask`` gives those of the other binaries by their place."""
    wanted: dict[str, Found] = {}
    found: dict[str, tuple[str, ...] | None] = {}
    for binary in binaries:
        if not probe.is_binary(binary.path):
            continue
        try:
            kept = json.loads(_schema_file(cache, binary.sha256).read_bytes())
            found[binary.sha256] = tuple(str(text) for text in kept)
        except (OSError, ValueError, TypeError):
            wanted[binary.sha256] = binary
    if wanted:
        answer = ask(list(wanted.values()))
        for sha256, binary in wanted.items():
            schemas = answer.get(binary.place)
            found[sha256] = (
                None
                if schemas is None
                else tuple(str(text)[: op_schemas.MAX_SCHEMA * 2] for text in schemas[: op_schemas.MAX_SCHEMAS])
            )
            if schemas is not None:
                write_atomic(_schema_file(cache, sha256), json.dumps(found[sha256]).encode())
    return found


def _schema_file(cache: Path, sha256: str) -> Path:
    return cache / "schemas" / f"{sha256}.json"


def _tuples(schemas: Mapping[str, list[str] | None]) -> dict[str, tuple[str, ...] | None]:
    return {sha256: None if found is None else tuple(found) for sha256, found in schemas.items()}


class Index:
    """Hashes of this machine's files by size, times and inode, as git keeps them: an unchanged install is not read
    again."""

    def __init__(self, cache: Path, name: str) -> None:
        self._file = cache / "indexes" / f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.stat"
        self._before = time.time_ns() - 2_000_000_000  # a file written within the clock's grain could change unseen
        try:
            self.known: probe.Index = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            self.known = {}

    def keep(self, data: dict[str, Any]) -> None:
        """Take the stats out of the inventory and keep them."""
        stats: probe.Index = {}
        for tree in data["trees"]:
            stats.update(tree.pop("stats", {}))
        stats = {path: row for path, row in stats.items() if max(row[1], row[2]) < self._before}
        if stats != self.known:
            write_atomic(self._file, json.dumps(stats, separators=(",", ":")).encode())
