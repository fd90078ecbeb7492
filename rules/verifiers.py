"""Every function that decides how many draft tokens are kept, with its shape: the table that the other answers rest on.

An item is an accept loop that a runner's sampler can reach, or a tree walk wherever it is. Shapes: ``chain`` (one
position after the
other), ``tree`` (along children, siblings or parents), ``paths`` (the best of several paths), ``mask`` (an ancestor
matrix), ``opaque``
(compiled, or made at run time). ``accepts``: by equality (``greedy``), by a probability ratio (``ratio``), by a
given rate
(``synthetic``). The list is complete (``yes``) unless something in the way could not be read.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from reports.model import Verdict
from rules.acceptance import PROSE, accepts, dismiss, evidence, item, runners_without_acceptance, unread_in_slice
from rules.base import Context, Example
from rules.examples import ENTRY, REGISTERS, elsewhere, install, plugged_in, subclassed
from rules.examples_walks import CHAINS, LOOKALIKES, WALKS
from rules.opaque import hidden_acceptance

ID = "verifiers"
QUESTION = "Which functions accept draft tokens, and in which shape?"
CHANGES_IF = "a plugin, a changed file or another version brings another accept function"


def judge(ctx: Context) -> Verdict:
    walks = [w for w in accepts(ctx, "walk") if w.state == "in" or not w.weak]
    chains = accepts(ctx, "chain")
    walked = {(w.file.path, w.symbol) for w in walks}
    found = walks + [c for c in chains if c.state != "out" and (c.file.path, c.symbol) not in walked]
    aside = [c for c in chains if c.state == "out" and _beside_acceptance(c.file.path)]
    hidden = hidden_acceptance(ctx)
    unread = unread_in_slice(ctx)
    items: list[dict[str, Any]] = [item(a) for a in found]
    items += [
        {
            "symbol": text.split(",")[0].split(" ")[0],
            "file": "",
            "line": 0,
            "shape": "opaque",
            "runner": "none",
            "reachable": True,
            "accepts": "other",
            "why": text,
        }
        for text in hidden
    ]
    counted = Counter(i["shape"] for i in items)
    said = ", ".join(f"{n} {shape}" for shape, n in sorted(counted.items())) or "none"
    summary = f"{len(items)} accept functions: {said}"
    roots = ctx.scope().roots
    lost = runners_without_acceptance(ctx)
    complete = bool(roots) and not unread and not hidden and not lost
    if not roots:
        summary = "no runner that constructs a sampler was found"
    elif unread:
        summary += f"; could not be read: {', '.join(unread[:3])}"
    elif lost:
        summary += f"; the {lost[0]} runner is in force, and no accept function of it was found"
    names = sorted({a.symbol.rpartition(".")[2] for a in found})
    files = sorted({a.file.path for a in found})
    recheck = f"grep -nE '^ *def ({'|'.join(names)})\\(' {' '.join(files)}" if names else ""
    return Verdict(
        ID,
        "yes" if complete else "unknown",
        summary,
        "high" if complete else "low",
        evidence=tuple(evidence(ctx, a) for a in found),
        scope=ctx.scope(),
        dismissed=tuple(
            dismiss(c, "acceptance", "no sampler of a runner leads to it; " + PROSE["chain"]) for c in aside[:30]
        ),
        recheck=recheck,
        changes_if=CHANGES_IF,
        items=tuple(items),
    )


def _beside_acceptance(path: str) -> bool:
    return path.startswith(
        ("vllm/v1/sample/", "vllm/v1/worker/", "vllm/v1/spec_decode/", "vllm/v1/watermarking/")
    ) or not path.startswith("vllm/")


VALID = (
    Example("one chain", install(), "yes", items=1),
    *(Example(f"chain: {name}", install(CHAINS[name]), "yes", items=1) for name in CHAINS),
    *(
        Example(f"no acceptance: {name}", install(LOOKALIKES[name]), "yes", items=0)
        for name in ("child-map", "union-find", "suffix-tree", "beam-search", "tree-mask-argument", "row-gather")
    ),
    Example("a walk that nothing leads to is listed too", elsewhere(WALKS["dict-of-children"]), "yes", items=2),
    Example("in a subclass", subclassed(WALKS["paths-and-cumprod"]), "yes", items=2),
    Example(
        "a plugin's walk",
        plugged_in(WALKS["objects"], REGISTERS["sets a method of the sampler"]),
        "yes",
        entry_points=ENTRY,
        items=2,
    ),
)
INVALID = (
    Example("no runner", {"vllm/v1/sample/accepting.py": CHAINS["cumprod"]}, "unknown"),
    Example("a sampler that can't be parsed", install("def accept(:\n"), "unknown"),
)
