"""Stage 1: what every file of an install is asked, names left out. One fact per function that accepts or walks, and
the file's size.

{"k": "size", "n": functions}
{"k": "walk" | "chain", "s": shape, "f": qualified name, "l": line, "e": end, "v": line of the comparison, "t":
tables, "w": weak,
 "a": how it accepts}
{"k": "near", "f", "l", "y": why it is no walk though it follows links}
{"k": "state", "f", "l", "e", "v": line}  a Triton kernel that hands state on along a table
{"k": "open", "f", "l"}                   a loop whose carried value goes through another file's function (rules.deep
looks there)
{"k": "set", "o": object, "a": attribute, "v": names in the value, "f": function it happens in, "l": line, "u":
conditions}
{"k": "hook", "c": class, "m": method}     a method by which a model supplies a sampler of its own
"""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass, field
from typing import Any

from rules.facts.flow import Flow
from rules.facts.judging import Walk
from rules.facts.module import Function, Module, dotted, read_module
from rules.facts.walks import carries_state, judge, leads_elsewhere, near

_COMPARE_CALLS = frozenset({"eq", "ne", "equal", "isin", "not_equal"})
_READ_CALLS = frozenset(
    {"load", "get", "gather", "take", "index_select", "take_along_dim", "take_along_axis", "getitem"}
)
_HOOKS = frozenset({"custom_sampler"})
_LIBRARIES = frozenset(
    {"torch", "np", "numpy", "tl", "triton", "re", "os", "json", "math", "F", "jnp", "cutlass", "cute", "itertools"}
)
_PAIRS = frozenset({"zip", "cumprod", "eq", "nonzero"})
_VECTOR = frozenset(
    {"cumprod", "cummin", "nonzero", "argmax", "argmin", "accumulate", "topk", "max", "sort", "argwhere", "flatnonzero"}
)
_SILENT = frozenset({ast.Name, ast.Attribute, ast.Constant, ast.Expr, ast.keyword, ast.arguments, ast.arg, ast.Return})
#: What a function's text must hold to repeat anything (beside loops, which the tree shows), to read, to compare.
_AGAIN = re.compile(rb"\bfor\b|\b(?:" + b"|".join(v.encode() for v in sorted(_VECTOR)) + rb")\s*\(")
_READS = re.compile(rb"\b(?:" + b"|".join(v.encode() for v in sorted(_READ_CALLS)) + rb")\s*\(")
_COMPARES = re.compile(rb"[<>]|[=!]=|\b(?:in|is|" + b"|".join(v.encode() for v in sorted(_COMPARE_CALLS)) + rb")\b")
_CALLED = re.compile(rb"([A-Za-z_]\w*)\s*\(")


def extract(path: str, source: bytes) -> list[dict[str, Any]]:
    module = read_module(source)
    facts: list[dict[str, Any]] = [{"k": "size", "n": len(module.functions)}] if module.functions else []
    facts += _replacements(module)
    facts += [{"k": "hook", "c": f.owner, "m": f.name} for f in module.functions if f.name in _HOOKS and f.owner]
    worth = _worth(module)
    for function in module.functions:
        if function.qual not in worth:
            continue
        flow = Flow(module, function)
        walks = judge(flow)
        reason = "" if walks else near(flow)
        if reason:
            facts.append({"k": "near", "f": function.qual, "l": function.node.lineno, "y": reason})
        if flow.foreign and not any(not w.weak and w.shape != "chain" for w in walks) and leads_elsewhere(flow):
            facts.append({"k": "open", "f": function.qual, "l": function.node.lineno})
        state = carries_state(flow) if b"tl.load" in source else None
        if state is not None:
            facts.append(
                {
                    "k": "state",
                    "f": function.qual,
                    "l": function.node.lineno,
                    "e": function.node.end_lineno,
                    "v": state[0],
                }
            )
        facts += [as_fact(function, walk) for walk in walks]
    return facts


def as_fact(function: Function, walk: Walk) -> dict[str, Any]:
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
    return fact


def _replacements(module: Module) -> list[dict[str, Any]]:
    """Attributes of imported (or this file's own) classes and modules that are set to something with a name:
    setattr, a.b = c."""
    found: list[dict[str, Any]] = []
    if not module.sets and b"setattr" not in module.source:
        return found
    for position, node in enumerate(module.all_nodes()):
        if type(node) is ast.Assign:
            targets = [(dotted(t.value), t.attr) for t in node.targets if isinstance(t, ast.Attribute)]
            value: ast.expr = node.value
        elif (
            type(node) is ast.Call and type(node.func) is ast.Name and node.func.id == "setattr" and len(node.args) == 3
        ):
            name = node.args[1]
            targets = [(dotted(node.args[0]), str(name.value))] if isinstance(name, ast.Constant) else []
            value = node.args[2]
        else:
            continue
        for owner, attribute in targets:
            root = owner.split(".")[0]
            if not owner or root in ("self", "cls") or (root not in module.imports and root not in module.bases):
                continue
            names = sorted(
                {dotted(n) for n in ast.walk(value) if isinstance(n, (ast.Name, ast.Attribute)) and dotted(n)}
            )
            names = [n for n in names if n not in dir(builtins)]
            if names:
                function, conditions = _place(module, position)
                found.append(
                    {
                        "k": "set",
                        "o": owner,
                        "a": attribute,
                        "v": names[:6],
                        "f": function,
                        "l": node.lineno,
                        "u": conditions,
                    }
                )
    return found


def _place(module: Module, position: int) -> tuple[str, list[str]]:
    """The innermost function around a node, and the conditions of that function that it stands under."""
    inside = [f for f in module.functions if f.first < position < f.last]
    function = max(inside, key=lambda f: f.first) if inside else None
    start = function.first if function else 0
    conditions: list[str] = []
    place = module.tour[position]
    at = (place.lineno, place.col_offset)
    for node in module.tour[start:position]:
        if type(node) is ast.If:
            for body, sign in ((node.body, ""), (node.orelse, "!")):
                if body and (body[0].lineno, body[0].col_offset) <= at < (body[-1].end_lineno, body[-1].end_col_offset):
                    conditions.append(sign + ast.unparse(node.test))
    return (function.qual if function else ""), conditions


@dataclass
class _Has:
    compares: int = 0  # of two things that aren't constants
    repeats: bool = False
    loops: bool = False
    reads: int = 0
    steps: bool = False  # x = f(x, ...), and f is another file's
    calls: set[str] = field(default_factory=set)


def _has(module: Module, function: Function) -> _Has:
    found = _Has(loops=function.loops)
    compares = reads = 0
    calls = found.calls
    for node in module.nodes(function):
        kind = type(node)
        if kind in _SILENT:
            continue
        if kind is ast.Call:
            func = node.func
            name = func.attr if type(func) is ast.Attribute else func.id if type(func) is ast.Name else ""
            calls.add(name)
            compares += name in _COMPARE_CALLS
            reads += name in _READ_CALLS
        elif kind is ast.Subscript:
            reads += type(node.slice) is not ast.Constant and type(node.slice) is not ast.Slice
        elif kind is ast.Compare:
            compares += not any(type(c) is ast.Constant for c in (node.left, *node.comparators))
        elif kind is ast.GeneratorExp or kind is ast.ListComp:
            found.repeats = True
        elif (kind is ast.Assign or kind is ast.NamedExpr) and type(node.value) is ast.Call and not found.steps:
            found.steps = _steps_elsewhere(module, node)
    found.compares, found.reads = compares, reads
    found.loops |= function.name in calls
    found.repeats |= not _VECTOR.isdisjoint(calls)
    return found


def _worth(module: Module) -> set[str]:
    """Functions that could accept anything, helpers included: places read and compared (or read one under the
    other), again and again. A function is toured only if its text leaves the question open."""
    by_name: dict[str, list[Function]] = {}
    for function in module.functions:
        by_name.setdefault(function.name, []).append(function)
    known: dict[int, _Has] = {}

    def has(function: Function) -> _Has:
        if id(function) not in known:
            known[id(function)] = _has(module, function)
        return known[id(function)]

    worth: set[str] = set()
    many = module.source.count(b"[") + len(_READS.findall(module.source)) >= 4
    for function in module.functions:
        if not function.loops:
            text = module.text(function)
            again = _AGAIN.search(text) or text.count(function.name.encode()) > 1
            if not again and not (many and _reads_or_asks(text, function, by_name)):
                continue
        own = has(function)
        near = [has(f) for name in own.calls for f in by_name.get(name, ())]
        near += [has(f) for one in near for name in one.calls for f in by_name.get(name, ())]
        compares = own.compares + sum(h.compares for h in near)
        reads = own.reads + sum(h.reads for h in near)
        if (
            (own.loops and (reads >= 2 or own.steps))
            or (compares and (own.loops or own.repeats) and (reads or own.calls & _PAIRS or _objects(module, function)))
            or (compares >= 2 and reads >= 4)
        ):
            worth.add(function.qual)
    return worth


def _reads_or_asks(text: bytes, function: Function, by_name: dict[str, list[Function]]) -> bool:
    """Places read and compared here, or another function of the file is called, which may do either."""
    if _COMPARES.search(text) and (b"[" in text or _READS.search(text)):
        return True
    return any(name.decode() in by_name for name in _CALLED.findall(text) if name.decode() != function.name)


def _steps_elsewhere(module: Module, node: ast.Assign | ast.NamedExpr) -> bool:
    call = node.value
    assert isinstance(call, ast.Call)
    first = dotted(call.func).split(".")[0]
    if first not in module.imports or first in _LIBRARIES:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    bound = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return any(
        isinstance(n, ast.Name) and n.id in bound
        for a in [*call.args, *(k.value for k in call.keywords)]
        for n in ast.walk(a)
    )


def _objects(module: Module, function: Function) -> bool:
    """Attributes of something: linked nodes, perhaps."""
    return any(type(n) is ast.Attribute for n in module.nodes(function))
