"""The data of an audit and its JSON contract (schema version 1).

Everything here is a frozen dataclass of plain values. ``to_json`` and ``audit_from_json`` are inverse to each other,
so that a report can be rendered again from its JSON, byte for byte. This module imports nothing of ours: it is what the
other packages share.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Outcome = Literal["yes", "no", "partial", "unknown", "n/a"]
Confidence = Literal["high", "medium", "low"]

#: Every verdict id, in the order of a report.
VERDICT_IDS = (
    "record-integrity",
    "plugins",
    "opaque-code",
    "runner-in-force",
    "spec-methods",
    "verifiers",
    "tree-build",
    "tree-mask",
    "tree-walk",
    "tree-commit",
    "hybrid-tree-state",
    "dflash-support",
    "aux-layer-offset",
    "drafter-sliding-window",
    "own-lm-head",
    "eagle-block-drop",
    "gdn-gate-gather",
    "uniform-decode-guard",
    "mamba-drop-flag",
    "lossless-only",
    "native-adapter",
)
#: The ids whose answer is in ``items``: "yes" means that the list is complete.
LIST_IDS = frozenset({"plugins", "opaque-code", "runner-in-force", "spec-methods", "verifiers"})


@dataclass(frozen=True)
class Evidence:
    """A place in a file. ``file`` is relative to its root (site-packages, or a plugin's); lines from 1, inclusive."""

    file: str
    line: int
    end_line: int
    symbol: str
    sha256: str
    snippet: str
    origin: str = "vllm"  # the file's SourceFile.origin: "vllm", "plugin:<distribution>" or "pythonpath:<n>"


@dataclass(frozen=True)
class Failed:
    """A file that was in scope and could not be read or parsed."""

    file: str
    why: str


@dataclass(frozen=True)
class Scope:
    """What an answer rests on. A "no" is worth what this says and no more."""

    files_seen: int = 0
    files_parsed: int = 0
    files_failed: tuple[Failed, ...] = ()
    functions_examined: int = 0
    roots: tuple[str, ...] = ()  # "file:line symbol" of the roots of the slice
    plugins: tuple[str, ...] = ()
    binary_ops: tuple[str, ...] = ()  # compiled ops that Python calls in the slice
    not_examined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dismissed:
    """A candidate that looked like the thing asked for and is not it."""

    file: str
    line: int
    symbol: str
    looked_like: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """The answer to one question. ``recheck`` is a POSIX shell command to run in the folder that holds ``vllm/``
    (site-packages), with nothing of this tool; ``recheck_expect`` is what it prints there."""

    id: str
    outcome: Outcome
    summary: str
    confidence: Confidence = "high"
    evidence: tuple[Evidence, ...] = ()
    scope: Scope = field(default_factory=Scope)
    dismissed: tuple[Dismissed, ...] = ()
    recheck: str = ""
    recheck_expect: str = ""
    changes_if: str = ""
    question: str = ""  # the rule's QUESTION
    items: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class TrailStep:
    """The question at one scope, as a person would ask it: the command, its hits, what they prove, what came next."""

    scope: str
    question: str
    command: str
    hits: int
    files: int
    sample: tuple[str, ...]
    proves: str
    adds: str


@dataclass(frozen=True)
class Assumption:
    """Something people take for granted, put to the test."""

    assumption: str
    test: str
    result: str
    holds: Literal["yes", "no", "unknown"]
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Record:
    """The install against its own RECORD. ``files`` counts the .py files of vLLM that were compared."""

    status: Literal["clean", "changed", "unknown"] = "unknown"
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    files: int = 0


@dataclass(frozen=True)
class Install:
    vllm_version: str = ""
    record: Record = field(default_factory=Record)
    manifest_sha256: str = ""


@dataclass(frozen=True)
class Target:
    spec: str
    kind: Literal["ssh", "local", "pypi", "wheel", "dir"]
    host: str = ""
    python: str = ""
    site_packages: str = ""


@dataclass(frozen=True)
class Probe:
    id: str
    status: Literal["ok", "failed", "skipped", "refused"]
    why: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recommendation:
    path: Literal["native", "standalone", "retrain", "chain", "none"]
    reasons: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    next: str = ""


@dataclass(frozen=True)
class Made:
    """When and how the audit was made; the only part of a report that differs between two scans of the same install."""

    at: str = ""  # ISO 8601, UTC
    seconds: float = 0.0
    facts: str = ""  # "known": every file's facts were cached; "parsed": some had to be made
    files_parsed_now: int = 0
    rules_sha256: str = ""
    provisional: bool = False  # only the files that usually decide were looked at so far
    examples: str = ""  # "312/312 rule examples pass" when the self-test of this rule set has been run


@dataclass(frozen=True)
class Audit:
    target: Target
    install: Install = field(default_factory=Install)
    verdicts: tuple[Verdict, ...] = ()
    probes: tuple[Probe, ...] = ()
    recommendation: Recommendation = field(default_factory=lambda: Recommendation("none"))
    errors: tuple[dict[str, Any], ...] = ()  # {"code", "message", "hint"}
    trail: tuple[TrailStep, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    # Of the lint, as `ddaudit lint --json` gives them.
    findings: tuple[dict[str, Any], ...] = ()
    made: Made = field(default_factory=Made)
    ddaudit: str = ""
    schema_version: int = SCHEMA_VERSION

    def verdict(self, id: str) -> Verdict | None:
        """The verdict of that id, or None when the scan did not get to it."""
        return next((v for v in self.verdicts if v.id == id), None)


def to_json(audit: Audit) -> dict[str, Any]:
    """The audit as plain JSON values, keys in the order of the contract (schema_version and ddaudit first)."""
    body = dataclasses.asdict(audit)
    first = {key: body.pop(key) for key in ("schema_version", "ddaudit")}
    plain: dict[str, Any] = _plain({**first, **body})
    return plain


def audit_from_json(data: dict[str, Any]) -> Audit:
    """The audit that ``to_json`` wrote; other keys are ignored. ValueError: another schema version, missing fields."""
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {data.get('schema_version')!r}, this ddaudit reads {SCHEMA_VERSION}")
    audit: Audit = _build(Audit, data)
    return audit


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


#: Evaluating the annotations of a class takes longer than building it.
_hints = functools.cache(typing.get_type_hints)


def _build(kind: Any, value: Any) -> Any:
    """``value`` (plain JSON) as ``kind``: a dataclass, a tuple[X, ...], or anything that JSON holds as it is."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{kind.__name__} should be an object, is {type(value).__name__}")
        hints = _hints(kind)
        known = {f.name for f in dataclasses.fields(kind)}
        try:
            return kind(**{key: _build(hints[key], item) for key, item in value.items() if key in known})
        except TypeError as error:
            raise ValueError(f"{kind.__name__}: {error}") from None
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if typing.get_origin(kind) in (typing.Union, types.UnionType) and value is None:
        return None
    return value
