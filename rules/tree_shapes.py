"""Trees being proposed, masked and committed: the shapes that the rules ``tree-build``, ``tree-mask`` and
``tree-commit`` look for,
found in one file by ``ast``. Only syntax and the verbs of array libraries count, except where a docstring says
otherwise."""

from __future__ import annotations

import ast
import re
from typing import Any

from rules.facts.module import Function, Module, dotted, read_module

Fact = dict[str, Any]

#: What a function's text must hold to have one of the shapes: only then its nodes are looked at.
_BUILDS = re.compile(rb"heap|topk")
_SETS_ROWS = re.compile(rb"\]\s*\|?=(?!=)")
_MASKS = re.compile(rb"<<|\w\s*,\s*\w+\s*[,\]]|\.append")
_BIAS = re.compile(rb"_row_ptrs")
_PASSES = re.compile(rb"(?:bias|mask)\s*=(?!=)")
_GATHERS = re.compile(
    rb"\b(?:index_select|gather|take|take_along_dim)\b|\[[^\[\]]*,[^\[\]]*:|\[[^\[\]]*:[^\[\]]*,|,\s*:\s*[\],]"
    rb"|[\[,]\s*:\s*,|\]\s*,[^\[\]]*:[^\[\]]*\]|[\[,]\s*\.\.\."
)
_KERNEL = re.compile(rb"tl\.load")


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.AST) -> str:
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name:
                return name
            node = node.value
        elif isinstance(node, (ast.Subscript, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def _receiver(call: ast.Call) -> str:
    return _root(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _fact(kind: str, function: Function, line: int, **more: Any) -> Fact:
    end = function.node.end_lineno or function.node.lineno
    return {"k": kind, "f": function.qual, "l": function.node.lineno, "e": end, "v": line, **more}


def _body(module: Module, function: Function) -> list[Any]:
    return module.nodes(function)


# ---- build


def builds(source: bytes) -> list[Fact]:
    """Functions that propose a tree.

    levels: a loop over depths that takes several candidates for each node of a level, repeats the parents' inputs
    for them, and runs the
    model on the level before it goes on. heap: best-first expansion, a heap that is popped and pushed in one loop,
    beside a list that
    is given each node's parent."""
    module = read_module(source)
    found: list[Fact] = []
    for function in module.functions:
        if not function.loops or not _BUILDS.search(module.text(function)):
            continue
        nodes = _body(module, function)
        loops = [n for n in nodes if isinstance(n, (ast.For, ast.While))]
        for loop in loops:
            shape = _levels(module, loop) or (_best_first(module, loop) if _ranks(nodes) else "")
            if shape:
                found.append(_fact("build", function, loop.lineno, s=shape, c=_configured(module, function)))
                break
    return found


def _levels(module: Module, loop: ast.AST) -> str:
    calls = [n for n in module.walk(loop) if isinstance(n, ast.Call)]
    names = {_last(c.func) for c in calls}
    takes = any(_last(c.func) == "topk" and not _takes_one(c) for c in calls)
    repeats = bool(names & {"repeat_interleave", "repeat"}) or "expand" in names
    runs = any(isinstance(c.func, ast.Attribute) and dotted(c.func).startswith("self.model") for c in calls) or any(
        isinstance(c.func, ast.Name) and any(k.arg in ("input_ids", "hidden_states") for k in c.keywords) for c in calls
    )
    grows = bool(names & {"cat", "append", "concat", "concatenate"})
    spreads = (
        any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv) for n in module.walk(loop))
        or "repeat_interleave" in names
    )
    return "levels" if takes and repeats and runs and grows and spreads else ""


def _takes_one(call: ast.Call) -> bool:
    counts: list[Any] = [a for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
    return any(c.value == 1 for c in counts)


def _best_first(module: Module, loop: ast.AST) -> str:
    nodes = module.walk(loop)
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    pops = [c for c in calls if _last(c.func) in ("heappop", "heappushpop", "heapreplace", "get")]
    pushes = [c for c in calls if _last(c.func) in ("heappush", "heappushpop", "heapreplace", "put")]
    if not pops or not pushes or not any("heap" in _last(c.func) for c in (*pops, *pushes)):
        return ""
    popped: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value in pops:
            popped |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    appended = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "append" and c.args]
    keeps = {_receiver(c) for c in appended if {n.id for n in ast.walk(c.args[0]) if isinstance(n, ast.Name)} & popped}
    stores = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript)]
    keeps |= {
        _root(n.targets[0]) for n in stores if {m.id for m in ast.walk(n.value) if isinstance(m, ast.Name)} & popped
    }
    return "heap" if len(keeps) >= 2 else ""


def _ranks(nodes: list[ast.AST]) -> bool:
    """Candidates are taken by score: topk, or a heap of negated scores."""
    return any(
        (isinstance(n, ast.Call) and _last(n.func) in ("topk", "argsort", "sort", "argpartition"))
        or (isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub) and not isinstance(n.operand, ast.Constant))
        for n in nodes
    )


def _configured(module: Module, function: Function) -> str:
    """The configuration value that describes a fixed tree: the attribute whose text the class reads as a literal."""
    for node in module.all_nodes():
        if isinstance(node, ast.Call) and _last(node.func) == "literal_eval" and node.args:
            name = dotted(node.args[0])
            for other in module.all_nodes():
                if (
                    isinstance(other, ast.Assign)
                    and any(dotted(t) == name for t in other.targets)
                    and isinstance(other.value, ast.Attribute)
                ):
                    return other.value.attr
            return name.rpartition(".")[2]
    return ""


# ---- mask


def masks(source: bytes) -> list[Fact]:
    """Functions that make an ancestor mask, and attention kernels that take one.

    rows: a node's row is its parent's row and itself. ancestors: a matrix is set at [node, its ancestors], in a loop
    over nodes.
    climb: a loop that goes from a node to its parents and sets the matrix at each. bias: a Triton kernel that adds
    what it loads at
    (key position - context length) to the scores, from a pointer of its own: attention can take a mask between
    queries."""
    module = read_module(source)
    found: list[Fact] = []
    for function in module.functions:
        text = module.text(function)
        rows = function.loops and _SETS_ROWS.search(text) is not None and _MASKS.search(text) is not None
        if not rows and not _BIAS.search(text):
            continue
        nodes = _body(module, function)
        if rows:
            shape = _mask_rows(nodes) or _mask_ancestors(module, nodes)
            if shape:
                found.append(_fact("mask", function, shape[1], s=shape[0]))
        bias = _bias(nodes)
        if bias:
            found.append(_fact("bias", function, bias[1], p=bias[0]))
    if any(f["k"] == "bias" for f in found) or _PASSES.search(source):
        found += _passed(module)
    return found


def _mask_rows(nodes: list[ast.AST]) -> tuple[str, int] | None:
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target, value = node.targets[0], node.value
        elif (
            isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Subscript)
            and isinstance(node.op, ast.BitOr)
        ):
            target, value = node.target, node.value
        else:
            continue
        root = _root(target)
        for part in ast.walk(value):
            if isinstance(part, ast.Subscript) and _root(part) == root and _first_index(part) != _first_index(target):
                index = part.slice.elts[0] if isinstance(part.slice, ast.Tuple) and part.slice.elts else part.slice
                own = (
                    target.slice.elts[0] if isinstance(target.slice, ast.Tuple) and target.slice.elts else target.slice
                )
                rows = isinstance(part.slice, ast.Tuple) or (
                    isinstance(value, (ast.BinOp, ast.Subscript)) and not isinstance(value, ast.BoolOp)
                )
                if (
                    isinstance(index, ast.Subscript)
                    and isinstance(own, ast.Name)
                    and _root(index) != root
                    and rows
                    and _sets_itself(nodes, root, own.id)
                ):
                    return "rows", node.lineno
    return None


def _first_index(node: ast.Subscript) -> str:
    index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    return ast.dump(index)


def _sets_itself(nodes: list[ast.AST], root: str, name: str) -> bool:
    """m[i, i] = ..., or a bit of i's own: 1 << i."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and _root(node) == root and isinstance(node.slice, ast.Tuple):
            names = [e.id for e in node.slice.elts if isinstance(e, ast.Name)]
            if names.count(name) >= 2:
                return True
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.LShift)
            and name in {n.id for n in ast.walk(node.right) if isinstance(n, ast.Name)}
        ):
            return True
    return False


def _mask_ancestors(module: Module, nodes: list[ast.AST]) -> tuple[str, int] | None:
    for loop in nodes:
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        inside = module.walk(loop)
        lists = {
            _root(n.func.value)
            for n in inside
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "append"
        }
        chased = {
            n.targets[0].id
            for n in inside
            if isinstance(n, ast.Assign)
            and isinstance(n.targets[0], ast.Name)
            and isinstance(n.value, ast.Subscript)
            and n.targets[0].id in {m.id for m in ast.walk(n.value.slice) if isinstance(m, ast.Name)}
        }
        for node in inside:
            if not (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Subscript)
                and isinstance(node.targets[0].slice, ast.Tuple)
            ):
                continue
            if len(node.targets[0].slice.elts) != 2:
                continue
            names = {e.id for e in node.targets[0].slice.elts if isinstance(e, ast.Name)}
            if isinstance(loop, ast.While) and names & chased:
                return "climb", node.lineno
            if names & lists and isinstance(loop, ast.For) and _prefixes(inside):
                return "ancestors", node.lineno
    return None


def _prefixes(inside: list[ast.AST]) -> bool:
    """Ancestors looked up as prefixes of a path (``choices.index(path[:d])``), or by going from parent to parent."""
    return any(
        isinstance(n, ast.Call) and _last(n.func) == "index" and any(isinstance(m, ast.Slice) for m in ast.walk(n))
        for n in inside
    )


def _bias(nodes: list[ast.AST]) -> tuple[str, int] | None:
    """(parameter, line): tl.load(parameter + (a - b)[None, :]) with a mask that keeps 0 <= a - b < its stride."""
    relative = {
        n.targets[0].id
        for n in nodes
        if isinstance(n, ast.Assign)
        and isinstance(n.targets[0], ast.Name)
        and isinstance(n.value, ast.BinOp)
        and isinstance(n.value.op, ast.Sub)
    }
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and dotted(node.func) == "tl.load"
            and node.args
            and isinstance(node.args[0], ast.BinOp)
        ):
            pointer = node.args[0]
            names = {n.id for n in ast.walk(pointer.right) if isinstance(n, ast.Name)}
            if names & relative and isinstance(pointer.left, ast.Name) and pointer.left.id.endswith("_row_ptrs"):
                return pointer.left.id.removesuffix("_row_ptrs").removesuffix("_ptr"), node.lineno
    return None


def _passed(module: Module) -> list[Fact]:
    """Keyword arguments called ...bias or ...mask that are given something other than None or the caller's own
    argument of that name."""
    found: dict[tuple[str, str], Fact] = {}
    for node in module.all_nodes():
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                name = keyword.arg or ""
                if not name.endswith(("bias", "mask")) or isinstance(keyword.value, ast.Constant):
                    continue
                value = ast.unparse(keyword.value)[:80]
                if value != name:
                    found.setdefault(
                        (name, value), {"k": "pass", "p": name, "x": value, "v": node.lineno, "to": _last(node.func)}
                    )
    return list(found.values())


# ---- commit


def commits(source: bytes) -> list[Fact]:
    """Functions that keep the rows of a cache that a list of indices names: x[..dst..] = x[..src..], index_copy of
    an index_select, a
    gather assigned back to where it came from, or a Triton kernel that loads and stores through one pointer at
    places read from a table."""
    module = read_module(source)
    found: list[Fact] = []
    for function in module.functions:
        text = module.text(function)
        if not _GATHERS.search(text) and not _KERNEL.search(text):
            continue
        nodes = _body(module, function)
        line = _moves_rows(nodes) or _moves_in_kernel(nodes)
        if line:
            found.append(_fact("commit", function, line))
    return found


def _moves_rows(nodes: list[ast.AST]) -> int:
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if (
                isinstance(target, (ast.Subscript, ast.Attribute))
                and _gathers_from(node.value, _root(target) or _last(target))
                and (isinstance(target, ast.Attribute) or _by_table(target))
            ):
                return node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("index_copy_", "copy_", "scatter_", "index_put_")
        ) and any(_gathers_from(a, _root(node.func.value)) for a in node.args):
            return node.lineno
    return 0


def _by_table(target: ast.Subscript) -> bool:
    parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    return any(not isinstance(p, ast.Constant) for p in parts)


def _gathers_from(value: ast.AST, root: str) -> bool:
    """The value reads rows of ``root`` at indices (a name or a table), along one axis of several or with
    index_select and its like."""
    if not root:
        return False
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and _last(node.func) in ("index_select", "gather", "take_along_dim", "take"):
            owner = _root(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if root in (owner, *(_root(a) for a in node.args)):
                return True
        if isinstance(node, ast.Subscript) and _root(node) == root and isinstance(node.slice, ast.Tuple):
            kinds = [type(e) for e in node.slice.elts]
            if any(k in (ast.Name, ast.Attribute, ast.Subscript) for k in kinds) and any(
                isinstance(e, ast.Slice) or (isinstance(e, ast.Constant) and e.value is Ellipsis)
                for e in node.slice.elts
            ):
                return True
    return False


def _moves_in_kernel(nodes: list[ast.AST]) -> int:
    loads: dict[str, str] = {}
    tables: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Call) and dotted(part.func) == "tl.load" and part.args:
                    loads[node.targets[0].id] = _root(part.args[0])
                    names = {n.id for n in ast.walk(part.args[0]) if isinstance(n, ast.Name)}
                    if names & set(loads) - {_root(part.args[0])}:
                        tables.add(node.targets[0].id)
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "tl.store" and len(node.args) >= 2:
            value = node.args[1]
            for name in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & set(loads):
                if loads[name] == _root(node.args[0]) and name in tables:
                    return node.lineno
    return 0
