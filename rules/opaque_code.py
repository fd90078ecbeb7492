"""Code in the way of acceptance whose source can't be read here: compiled ops, and strings that are executed.

Each op that the acceptance slice calls is an item: ``read`` (its schema is in a binary of this install, and none of
its arguments links
nodes), ``link tables`` (its schema has two or more such arguments: a compiled tree walk, perhaps), ``absent`` (stock
vLLM calls it, this
build does not define it: its CPU, ROCm or XPU code, which can't run here), ``undefined`` (other code calls it and no
file that was read
defines it). The list is complete (``yes``) when the runners' samplers were found and read; ``unknown`` otherwise.
"""

from __future__ import annotations

from typing import Any

from reports.model import Verdict
from rules.acceptance import slice_of, unread_in_slice
from rules.base import Context, Example
from rules.examples import install
from rules.opaque import link_tables, schemas

ID = "opaque-code"
QUESTION = "What does acceptance go through that has no source here?"
CHANGES_IF = "another build, a plugin with compiled ops, or code generated at run time"


def judge(ctx: Context) -> Verdict:
    reach = slice_of(ctx)
    known = schemas(ctx)
    items: list[dict[str, Any]] = []
    evidence = []
    for op, (caller, stock) in sorted(reach.ops.items()):
        if caller not in reach.reached:
            continue
        schema = known.get(op) or known.get(op.rpartition(".")[2])
        links = link_tables(schema) if schema else []
        state = ("link tables" if len(links) >= 2 else "read") if schema else "absent" if stock else "undefined"
        items.append(
            {"op": op, "state": state, "caller": caller[1], "file": caller[0], "schema": schema or "", "links": links}
        )
        file = ctx.file(caller[0])
        if file is not None and state in ("link tables", "undefined"):
            evidence.append(ctx.evidence(file, 1, 1, caller[1]))
    for (path, symbol), lines in sorted(reach.executed.items()):
        if (path, symbol) in reach.reached:
            items.append({"op": "exec", "state": "executed string", "caller": symbol, "file": path, "line": lines[0]})
            file = ctx.file(path)
            if file is not None:
                evidence.append(ctx.evidence(file, lines[0], lines[0] + 2, symbol))
    unread_binaries = [b.path for b in ctx.tree.binaries if b.schemas is None]
    unread = unread_in_slice(ctx)
    counted = {s: sum(i["state"] == s for i in items) for s in sorted({i["state"] for i in items})}
    said = (
        ", ".join(f"{n} {state}" for state, n in counted.items())
        or "none: acceptance is Python and Triton from end to end"
    )
    summary = f"compiled ops and executed strings in the way of acceptance: {said}"
    if unread:
        summary += f"; could not be read: {', '.join(unread[:3])}"
    ok = bool(reach.roots) and not unread
    scope = ctx.scope()
    return Verdict(
        ID,
        "yes" if ok else "unknown",
        summary,
        "high" if ok else "low",
        evidence=tuple(evidence[:8]),
        scope=ctx.scope(not_examined=(*scope.not_examined, *(f"{p} (binary, not read)" for p in unread_binaries))),
        changes_if=CHANGES_IF,
        items=tuple(items),
    )


_OP = """
    import torch


    def accept(a, b):
        out = torch.empty_like(a)
        torch.ops.{op}(out, a, b)
        return out
"""
VALID = (
    Example("no op", install(), "yes", items=0),
    Example("a stock op that this build lacks", install(_OP.replace("{op}", "_C.accept_cpu")), "yes", items=1),
    Example(
        "a made string",
        install("def accept(a, b):\n    scope = {}\n    exec('r = ' + a.code, scope)\n    return scope['r']\n"),
        "yes",
        items=1,
    ),
)
INVALID = (
    Example("no runner", {"vllm/v1/x.py": "def f():\n    return 1\n"}, "unknown"),
    Example("a sampler that can't be parsed", install("def accept(:\n"), "unknown"),
)
