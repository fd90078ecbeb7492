"""An install as the rules see it: files with their hashes, binaries with their op schemas, plugins, RECORD. Made by
``audit_cli``, read-only here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reports.model import Record


@dataclass(frozen=True)
class SourceFile:
    """One ``.py`` file. ``path`` is posix, relative to the root it is imported from ("vllm/v1/sample/sampler.py").
    ``origin`` is "vllm", "plugin:<distribution>" (a distribution that declares a vLLM entry point, a .pth, an
    editable install) or "pythonpath:<n>" (n-th --pythonpath folder). ``stock`` says whether the bytes are what RECORD
    lists."""

    path: str
    sha256: str
    size: int
    origin: str = "vllm"
    stock: bool = True


@dataclass(frozen=True)
class Binary:
    """One compiled file. ``schemas`` are the op schema strings found in it ("ns::name(Tensor a, ...) -> ..." or
    without ns); None means that it was not read (too large, unreadable): then it is opaque."""

    path: str
    sha256: str
    size: int
    schemas: tuple[str, ...] | None = None


@dataclass(frozen=True)
class EntryPoint:
    """One entry point of a ``vllm.*`` group, as its distribution's metadata declares it."""

    group: str
    name: str
    value: str  # "package.module:attr"
    distribution: str
    version: str


@dataclass(frozen=True)
class InstallTree:
    """``read(sha256)`` returns the bytes of a file; it raises OSError when they can't be had."""

    vllm_version: str
    files: tuple[SourceFile, ...]
    read: Callable[[str], bytes]
    binaries: tuple[Binary, ...] = ()
    entry_points: tuple[EntryPoint, ...] = ()
    record: Record = field(default_factory=Record)
    injected: tuple[str, ...] = ()  # .pth lines that import, sitecustomize, editable installs, VLLM_PLUGINS: as text
    unreadable: tuple[tuple[str, str], ...] = ()  # (path, why): in the tree, but its bytes could not be had
    environment: dict[str, str] = field(default_factory=dict)  # allow-listed VLLM_* variables of the host
