"""Stage 1: what every file of an install is asked, names left out. One fact per function that accepts or walks, and the file's size.

    {"k": "size", "n": functions}
    {"k": "walk" | "chain", "s": shape, "f": qualified name, "l": line, "e": end, "v": line of the comparison, "t": tables, "w": weak,
     "a": how it accepts}
"""

from __future__ import annotations

import ast
from typing import Any

from rules.facts.flow import Flow
from rules.facts.module import Function, Module, read_module
from rules.facts.walks import judge

_COMPARE_CALLS = frozenset({"eq", "ne", "equal", "isin", "not_equal"})
_VECTOR = frozenset({"cumprod", "cummin", "nonzero", "argmax", "argmin", "accumulate", "topk", "max", "sort", "argwhere", "flatnonzero"})


def extract(path: str, source: bytes) -> list[dict[str, Any]]:
    module = read_module(source)
    if not module.functions:
        return []
    facts: list[dict[str, Any]] = [{"k": "size", "n": len(module.functions)}]
    worth = _worth(module)
    for function in module.functions:
        if function.qual not in worth:
            continue
        flow = Flow(module, function)
        for walk in judge(flow):
            fact: dict[str, Any] = {
                "k": "chain" if walk.shape == "chain" else "walk",
                "f": function.qual,
                "l": function.node.lineno,
                "e": function.node.end_lineno,
                "v": walk.verdict,
                "t": list(walk.tables)[:6],
                "a": list(walk.accepts),
            }
            if walk.shape != "chain":
                fact["s"] = walk.shape
            if walk.weak:
                fact["w"] = 1
            facts.append(fact)
    return facts


def _worth(module: Module) -> set[str]:
    """Functions that could accept anything: a comparison of two things and a loop, recursion or vector reduction, helpers included."""
    has: dict[str, tuple[bool, bool, bool, set[str]]] = {}
    for function in module.functions:
        compares = repeats = reads = False
        calls: set[str] = set()
        for node in module.tour[function.first : function.last]:
            kind = type(node)
            if kind is ast.Compare:
                compares |= not any(type(c) is ast.Constant for c in (node.left, *node.comparators))  # type: ignore[attr-defined]
            elif kind is ast.For or kind is ast.While or kind is ast.GeneratorExp or kind is ast.ListComp:
                repeats = True
            elif kind is ast.Subscript:
                reads |= type(node.slice) is not ast.Constant and type(node.slice) is not ast.Slice  # type: ignore[attr-defined]
            elif kind is ast.Call:
                func = node.func  # type: ignore[attr-defined]
                name = func.attr if type(func) is ast.Attribute else func.id if type(func) is ast.Name else ""
                calls.add(name)
                compares |= name in _COMPARE_CALLS
                repeats |= name in _VECTOR
                reads |= name in ("load", "get", "gather", "take", "index_select", "take_along_dim")
            elif kind is ast.Attribute:
                pass
        repeats |= function.name in calls
        has[function.qual] = (compares, repeats, reads, calls)
    by_name: dict[str, list[str]] = {}
    for function in module.functions:
        by_name.setdefault(function.name, []).append(function.qual)
    worth: set[str] = set()
    for function in module.functions:
        compares, repeats, reads, calls = has[function.qual]
        helpers = [has[q] for name in calls for q in by_name.get(name, ())]
        compares |= any(h[0] for h in helpers)
        reads |= any(h[2] for h in helpers) or _object_reads(module, function, compares and repeats)
        if compares and repeats and (reads or _zips(calls)):
            worth.add(function.qual)
    return worth


def _zips(calls: set[str]) -> bool:
    return bool(calls & {"zip", "cumprod", "eq", "nonzero"})


def _object_reads(module: Module, function: Function, asked: bool) -> bool:
    """Attributes of something that a loop or a parameter hands out: linked nodes."""
    if not asked:
        return False
    return any(type(n) is ast.Attribute for n in module.tour[function.first : function.last])
