"""From an install to its verdicts: cached judgement, or facts (known or made now) and then every rule in the
report's order."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reports.model import VERDICT_IDS, Assumption, TrailStep, Verdict, _build
from rules.cache import Cache
from rules.loading import rules_sha256
from rules.tree import InstallTree

_FIRST = ("verifiers", "tree-walk", "tree-commit")  # what a provisional answer is about


@dataclass(frozen=True)
class Progress:
    """How far a scan is. ``provisional`` is given once, when the hot folders are through: the verdicts that would
    hold if the rest
    of the install said nothing."""

    stage: Literal["facts", "rules", "done"]
    done: int
    total: int
    provisional: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """``facts``: "known" when no file had to be parsed. ``errors`` have code, message and hint; rule ids in them are
    incomplete."""

    verdicts: tuple[Verdict, ...]
    trail: tuple[TrailStep, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    errors: tuple[dict[str, Any], ...] = ()
    facts: Literal["known", "parsed"] = "known"
    files_parsed_now: int = 0
    rules_sha256: str = ""


def judge(
    tree: InstallTree,
    *,
    cache: Path | None = None,
    extra_rules: Sequence[Path] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Judgement:
    """Every rule's answer about this install. ``cache`` is the folder that facts and judgements are kept in (None:
    nowhere). Raises
    ValueError for a rule file that is not one; a rule that fails is an ``unknown`` verdict and an entry in
    ``errors``."""
    store = Cache(cache)
    rules_hash = rules_sha256(extra_rules)
    key = _key(tree, rules_hash)
    kept = store.judgement(key)
    if kept is not None:
        store.close()
        known: Judgement = _build(Judgement, kept)
        return known
    result = _judge(tree, store, extra_rules, rules_hash, progress or (lambda _: None))
    if store.problem:
        hint = "give another --cache folder, or free some space; the answer itself does not depend on it"
        problem = {"code": "cache", "message": f"the facts cache could not be used: {store.problem}", "hint": hint}
        result = dataclasses.replace(result, errors=(*result.errors, problem))
    elif not result.errors:
        again = dataclasses.replace(result, facts="known", files_parsed_now=0)
        store.put_judgement(key, dataclasses.asdict(again), time.time())
    store.close()
    return result


def _judge(
    tree: InstallTree, store: Cache, extra: Sequence[Path], rules_hash: str, progress: Callable[[Progress], None]
) -> Judgement:
    # Imported here: a scan whose judgement is kept needs none of it.
    from rules.base import Rule
    from rules.context import ScanContext
    from rules.extraction import extract_all, graph_unit, is_known, read_pack, units_of
    from rules.loading import load_rules

    rules = load_rules(extra)
    units = units_of(rules)
    rows = store.rows({file.sha256 for file in tree.files})
    if any(not is_known(rows.get(file.sha256), unit) for file in tree.files for unit in units):
        packed = read_pack([*units, graph_unit()])
        for file in tree.files:
            if file.sha256[:16] in packed:
                rows[file.sha256] = {**packed[file.sha256[:16]], **rows.get(file.sha256, {})}
    parsed = sum(any(not is_known(rows.get(s), u) for u in units) for s in {file.sha256 for file in tree.files})
    errors: list[dict[str, Any]] = []

    def run(ctx: ScanContext, which: Sequence[Rule]) -> list[Verdict]:
        verdicts: dict[str, Verdict] = {}
        ctx.verdicts = verdicts
        for rule in which:
            try:
                if rule.origin != "builtin" and (bug := ctx.bug(rule.id)):
                    raise RuntimeError(bug)  # facts are missing: its "no" would be a guess
                said_so = rule.judge(ctx)
                verdicts[rule.id] = dataclasses.replace(said_so, question=said_so.question or rule.question)
            except Exception as error:  # one broken rule must not cost the others
                said = f"{type(error).__name__}: {error}"
                errors.append(
                    {
                        "code": "rule-failed",
                        "message": f"rule {rule.id} failed: {said}",
                        "hint": f"report it, or leave out {rule.origin}",
                    }
                )
                verdicts[rule.id] = Verdict(
                    rule.id,
                    "unknown",
                    f"the rule itself failed: {said}",
                    "low",
                    changes_if=rule.changes_if,
                    question=rule.question,
                )
        return list(verdicts.values())

    ordered = sorted(rules, key=lambda r: VERDICT_IDS.index(r.id) if r.id in VERDICT_IDS else len(VERDICT_IDS))

    def report(done: int, total: int, hot: bool) -> None:
        first: list[Verdict] = []
        if hot:
            first = run(ScanContext(tree, dict(rows), Cache(None), []), [r for r in ordered if r.id in _FIRST])
            errors.clear()
            # Files that are still to come can only add walks: a yes stays, a no is one so far, anything between waits.
            first = [
                dataclasses.replace(v, summary=v.summary if v.outcome == "yes" else f"so far: {v.summary}")
                for v in first
                if v.outcome in ("yes", "no")
            ]
        progress(Progress("facts", done, total, tuple(first)))

    unreadable = extract_all(tree, tree.files, units, extra, rows, store, report)
    ctx = ScanContext(tree, rows, store, unreadable)
    progress(Progress("rules", 0, len(rules)))
    verdicts = run(ctx, ordered)
    trail = _part("trail", ctx, errors)
    assumptions = _part("assumptions", ctx, errors)
    ctx.close()
    errors += [
        {"code": "file-failed", "message": f"{f.file}: {f.why}", "hint": "an answer that depends on it is unknown"}
        for f in ctx.failed
    ]
    progress(Progress("done", len(rules), len(rules)))
    return Judgement(
        tuple(verdicts), trail, assumptions, tuple(errors), "parsed" if parsed else "known", parsed, rules_hash
    )


def _part(name: str, ctx: Any, errors: list[dict[str, Any]]) -> tuple[Any, ...]:
    """``rules.trail.trail(ctx)`` and its like."""
    try:
        module = importlib.import_module(f"rules.{name}")
        return tuple(getattr(module, name)(ctx))
    except ModuleNotFoundError as error:
        if error.name == f"rules.{name}":
            return ()
        raise
    except Exception as error:
        errors.append(
            {"code": "rule-failed", "message": f"{name} failed: {type(error).__name__}: {error}", "hint": "report it"}
        )
        return ()


def _key(tree: InstallTree, rules_hash: str) -> str:
    facts = {
        f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.name not in ("read", "files", "binaries")
    }
    body = [
        rules_hash,
        [(f.path, f.sha256, f.origin, f.stock) for f in tree.files],
        [(b.path, b.sha256, b.schemas) for b in tree.binaries],
        {
            name: dataclasses.asdict(v) if dataclasses.is_dataclass(v) and not isinstance(v, type) else v
            for name, v in facts.items()
        },
    ]
    return hashlib.sha256(json.dumps(body, default=_as_json).encode()).hexdigest()


def _as_json(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
