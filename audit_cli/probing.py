"""Live probes: each a script of ``probes`` run by the host's own Python, with its own time limit and its declared
need of a GPU.

A probe that crashes, hangs, prints noise or lies is a ``failed`` probe with the reason; it never ends the audit or
moves a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from audit_cli.errors import DdauditError
from audit_cli.remote import ask, literal
from audit_cli.transport.base import Limits, Transport
from reports.model import Probe

Need = Literal["none", "shared", "exclusive"]


@dataclass(frozen=True)
class Spec:
    """``keys`` are the facts that an answer must hold to be believed; ``seconds`` its time limit."""

    id: str
    module: str
    gpu: Need
    seconds: float
    keys: tuple[str, ...]


PROBES = (
    Spec("serving-now", "serving", "none", 30, ("servers",)),
    Spec("host", "host", "none", 40, ("system", "gpus", "missing")),
    Spec("environment", "venv", "none", 30, ("python", "distributions", "torch")),
    Spec("models", "models", "none", 60, ("models",)),
)


def run_probes(
    transport: Transport,
    python: str,
    arguments: Mapping[str, Mapping[str, Any]],
    wanted: Sequence[Spec] = PROBES,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Probe, ...]:
    """Run the probes one after the other. ``arguments``: probe id -> what its ``take`` gets; "models" runs only when
    it has some."""
    done = []
    for spec in wanted:
        given = dict(arguments.get(spec.id, {}))
        if spec.id == "models" and not given.get("models"):
            continue
        progress(spec.id)
        done.append(_run(transport, python, spec, given))
    return tuple(done)


def _run(transport: Transport, python: str, spec: Spec, arguments: Mapping[str, Any]) -> Probe:
    start = time.monotonic()
    limits = Limits(idle=spec.seconds, total=spec.seconds, max_bytes=16 << 20)
    try:
        value, _ = ask(transport, python, (spec.module,), f"take({literal(arguments)})", limits=limits)
    except DdauditError as error:
        return Probe(spec.id, "failed", f"{error.what}: {error.why}", _since(start))
    if not isinstance(value, dict) or any(key not in value for key in spec.keys):
        return Probe(spec.id, "failed", "its answer lacks what it must hold: it is not used", _since(start))
    return Probe(spec.id, "ok", "", _since(start), value)


def _since(start: float) -> float:
    return round(time.monotonic() - start, 2)
