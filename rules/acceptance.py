"""Every accept loop of an install beside how (and whether) it is reached: what the rules about acceptance share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from reports.model import Dismissed, Evidence
from rules.base import Context, Fact
from rules.resolver import Reached, Slice
from rules.tree import SourceFile

if TYPE_CHECKING:
    from rules.context import ScanContext

State = Literal["in", "off", "out"]

#: How a walk's family is called in ``items`` (the contract's words) and in prose.
SHAPES = {"chase": "tree", "search": "tree", "parents": "tree", "paths": "paths", "ancestors": "mask", "chain": "chain"}
PROSE = {
    "chase": "the place of the next comparison is read at the place of this one",
    "search": "the next place is found by comparing a parent table with this one",
    "parents": "a node is accepted if its parent is, and the parent is read from a table",
    "paths": "whole paths are compared and the best one is taken",
    "ancestors": "a mismatch anywhere under an ancestor matrix rules a node out",
    "chain": "positions are compared one after another, up to the first mismatch",
}
_NEAR = {
    "written": "follows links that the same loop writes (a failure function, a union-find): no tree that was handed in",
    "one-stream": "follows links, but sets no second token stream against them at the place they lead to",
}


@dataclass(frozen=True)
class Accept:
    """One accept loop. ``state``: "in" the slice, "off" (in it behind a condition that is false as shipped), "out"
    of it."""

    file: SourceFile
    fact: Fact
    state: State
    reached: Reached | None

    @property
    def shape(self) -> str:
        return str(self.fact.get("s", "chain"))

    @property
    def symbol(self) -> str:
        return str(self.fact["f"])

    @property
    def weak(self) -> bool:
        """Not certain by itself. A search or a table of parents in a function of hundreds of lines is a main
        loop (of a parser, say) more often than an acceptance: it counts where a sampler leads to it."""
        return bool(self.fact.get("w")) or (
            self.shape in ("search", "parents") and int(self.fact["e"]) - int(self.fact["l"]) > 150
        )

    def where(self) -> str:
        return f"{self.file.path}:{self.fact['l']} {self.symbol}"


def slice_of(ctx: Context) -> Slice:
    return cast("ScanContext", ctx).slice


def accepts(ctx: Context, kind: Literal["walk", "chain"]) -> list[Accept]:
    """Accept loops of one kind, reached ones first. Chains count as reached only through the sampler itself; walks
    also through what a
    step of the runner calls around it."""
    found: list[Accept] = []
    reach = slice_of(ctx)
    seen: set[tuple[str, str]] = set()
    for file, facts in ctx.facts("shapes"):
        for fact in facts:
            key = (file.path, str(fact.get("f", "")))
            if (
                fact["k"] == "open"
                and kind == "walk"
                and key not in seen
                and (key in reach.step or not file.stock or file.origin != "vllm")
            ):
                fact = next(iter(_across_files(ctx, file, key[1])), fact)
            if fact["k"] != kind or key in seen:
                continue
            seen.add(key)
            how = (reach.step if kind == "walk" else reach.reached).get(key) or _outer(reach, key, kind)
            state: State = "out" if how is None else "off" if how.off else "in"
            found.append(Accept(file, fact, state, how))
    order = {"in": 0, "off": 1, "out": 2}
    return sorted(found, key=lambda a: (order[a.state], a.weak))


def _across_files(ctx: Context, file: SourceFile, qual: str) -> list[Fact]:
    from rules.deep import across_files

    reach = slice_of(ctx)
    if (file.path, qual) not in reach.across:
        reach.across[file.path, qual] = (
            across_files(cast("ScanContext", ctx), reach.resolver, file, qual) if reach.resolver else []
        )
    return reach.across[file.path, qual]


def _outer(reach: Slice, key: tuple[str, str], kind: str) -> Reached | None:
    """How the function around a nested one is reached."""
    path, qual = key
    table = reach.step if kind == "walk" else reach.reached
    while "." in qual:
        qual = qual.rpartition(".")[0]
        if (path, qual) in table:
            return table[path, qual]
    return None


def evidence(ctx: Context, accept: Accept) -> Evidence:
    """The accept function, from its first line (or, in a long one, from shortly before the loop's comparison)."""
    first, last, verdict = int(accept.fact["l"]), int(accept.fact["e"]), int(accept.fact["v"])
    if last - first > 80 and first <= verdict <= last:
        first, last = max(first, verdict - 25), min(last, verdict + 15)
    return ctx.evidence(accept.file, first, last, accept.symbol)


def dismiss(accept: Accept, looked_like: str, why: str) -> Dismissed:
    return Dismissed(accept.file.path, int(accept.fact["l"]), accept.symbol, looked_like, why)


def near_misses(ctx: Context) -> list[Dismissed]:
    """Loops that follow links and accept nothing, with what tells them from a walk."""
    return [
        Dismissed(file.path, int(fact["l"]), str(fact["f"]), "a walk along links", _NEAR[fact["y"]])
        for file, facts in ctx.facts("shapes")
        for fact in facts
        if fact["k"] == "near"
    ]


def unread_in_slice(ctx: Context) -> list[str]:
    """Files that acceptance could pass through and that nobody could read: the slice ran into them, or they could
    hold any of it."""
    reach = slice_of(ctx)
    failed = {f.file for f in ctx.scope().files_failed}
    hot = {path for path, _ in reach.step} | reach.unread
    near = {p.rpartition("/")[0] for p in hot}
    stock = {f.path for f in ctx.tree.files if f.origin == "vllm" and f.stock}
    return sorted(reach.unread | {p for p in failed if p in hot or p.rpartition("/")[0] in near or p not in stock})


def item(accept: Accept) -> dict[str, Any]:
    how = list(accept.fact.get("a") or ["other"])
    entry: dict[str, Any] = {
        "symbol": accept.symbol,
        "file": accept.file.path,
        "line": accept.fact["l"],
        "shape": SHAPES[accept.shape],
        "runner": accept.reached.runner if accept.reached else "none",
        "reachable": accept.state == "in",
        "accepts": how[0],
    }
    if len(how) > 1:
        entry["also_accepts"] = how[1:]
    if accept.reached is not None:
        entry["via"] = list(accept.reached.via)
        if accept.reached.off:
            entry["off"] = accept.reached.off
    if accept.file.origin != "vllm" or not accept.file.stock:
        entry["origin"] = accept.file.origin if accept.file.origin != "vllm" else "changed file"
    return entry


def runners_without_acceptance(ctx: Context) -> tuple[str, ...]:
    """Runners in force that no accept function belongs to: something is missing there, and a "no" would be a guess."""
    verdict = ctx.verdicts.get("runner-in-force")
    wanted = {str(entry.get("runner")) for entry in verdict.items} & {"V1", "V2"} if verdict else set()
    found = {str(item(a)["runner"]) for kind in ("chain", "walk") for a in accepts(ctx, kind) if a.state != "out"}
    return () if "plugin" in found else tuple(sorted(wanted - found))
