"""Dataflow of one function as a graph, names left out: what a value is made of, at which index it was read, which
comparison chose it.

Nodes are values; edges point to what a value depends on:
  D  data       the value is made of it
  I  index      it says where the value was read
  C  compared   it is a side of the comparison
  L  length     only its size counts
  P  predicate  it decides whether this value or another is taken; control is not data, and that separates a chain
  from a tree
Names are versioned as in SSA: a loop gives every name that its body assigns a ``phi`` node, so a cycle in the graph
is a value that one
round hands to the next. Helpers of the same file are entered (a few levels deep); recursion is a loop over the
parameters.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rules.facts.module import Function, Module

D, I, C, P, L = 0, 1, 2, 3, 4
Value = frozenset[int]
Env = dict[str, Value]
NONE: Value = frozenset()


class _TooLarge(Exception):  # noqa: N818
    """The graph grew beyond its budget; what was made so far is judged."""


@dataclass(slots=True)
class Node:
    kind: str  # root const param phi read window iter affine cmp sel bin call len fresh upd
    name: str  # table of a read, operator, called name
    line: int
    loop: int  # innermost loop, -1 outside
    edges: list[tuple[int, int]] = field(default_factory=list)  # (node, edge kind)
    left: Value = NONE  # sides of a comparison or an operation
    right: Value = NONE


@dataclass(slots=True)
class Loop:
    parent: int
    line: int
    end: int
    kind: str  # for while comp rec
    guarded: bool = False  # inside a try that catches a missing key or index
    var: Value = NONE
    phis: dict[str, int] = field(default_factory=dict)
    exits: list[Value] = field(default_factory=list)  # what decides a break, a return or the while test
    continues: list[Env] = field(default_factory=list)
    breaks: list[Env] = field(default_factory=list)


@dataclass(slots=True)
class Write:
    root: str
    how: str  # store append aug
    line: int
    loop: int
    index: Value
    value: Value
    under: Value  # predicates in force
    mask: Value


_LOAD = frozenset({"load", "ld", "load_scalar"})
_STORE = frozenset({"store", "st"})
_GATHER = frozenset(
    {"gather", "take", "take_along_dim", "take_along_axis", "index_select", "gather_nd", "vindex", "embedding"}
)
_POP = frozenset({"pop", "popleft", "popitem", "get_nowait", "heappop", "next", "get", "__next__"})
_ADD = frozenset(
    {"append", "extend", "add", "push", "put", "put_nowait", "insert", "appendleft", "extendleft", "heappush", "update"}
)
_COMPARE = {
    "eq": "Eq",
    "ne": "NotEq",
    "equal": "Eq",
    "not_equal": "NotEq",
    "isin": "In",
    "in1d": "In",
    "lt": "Lt",
    "gt": "Gt",
    "le": "LtE",
    "ge": "GtE",
    "less": "Lt",
    "greater": "Gt",
    "__contains__": "In",
}
_BINARY = {
    "logical_and": "&",
    "logical_or": "|",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "mul": "*",
    "multiply": "*",
    "matmul": "@",
    "mm": "@",
    "bmm": "@",
    "einsum": "@",
    "minimum": "&",
    "maximum": "|",
    "__and__": "&",
    "dot": "@",
}
_APPLIES = frozenset({"reduce", "accumulate", "max", "min", "sorted", "map", "filter"})
_META = frozenset(
    {"shape", "dtype", "device", "size", "ndim", "stride", "numel", "dim", "element_ty", "__name__", "__class__"}
)
_SAME = frozenset({"T", "data", "mT", "indices", "values", "real", "grad", "cpu", "item"})
_FRESH = frozenset(
    {
        "zeros",
        "ones",
        "empty",
        "full",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_full",
        "set",
        "dict",
        "list",
        "deque",
        "defaultdict",
        "isinstance",
        "hasattr",
        "type",
        "print",
        "super",
    }
)
_SELECT = frozenset({"where", "select", "masked_fill", "masked_select", "masked_fill_"})
_MODULES = frozenset(
    {
        "torch",
        "np",
        "numpy",
        "tl",
        "jnp",
        "F",
        "mx",
        "cp",
        "operator",
        "math",
        "heapq",
        "itertools",
        "triton",
        "nb",
        "random",
    }
)
_MISSING = ("KeyError", "IndexError", "LookupError", "StopIteration", "'Exception'")
_BUILTINS = frozenset(dir(builtins))
_OPS = {
    ast.LShift: "<",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.Mult: "*",
    ast.MatMult: "@",
    ast.Div: "/",
    ast.Add: "+",
    ast.Sub: "-",
    ast.BitXor: "^",
}


class Flow:
    """The graph of one function. ``resolve`` may supply functions of other files by their name here (cross-file
    helpers)."""

    def __init__(
        self,
        module: Module,
        function: Function,
        budget: int = 4000,
        resolve: Callable[[Module, str], tuple[Module, Function] | None] | None = None,
    ) -> None:
        self.module = module
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []
        self.writes: list[Write] = []
        self.foreign: dict[int, str] = {}  # calls, inside a loop, of functions that another file defines
        self.loop = -1
        self.under: list[Value] = []
        self._caught = 0
        self._budget = budget
        self._resolve = resolve
        self._roots: dict[str, int] = {}
        self._stack: list[Function] = []
        self._nested: list[dict[str, tuple[Function, Env]]] = []
        self._lambdas: dict[str, tuple[ast.Lambda, Env]] = {}
        self._returns: list[list[Value]] = []
        self._self_calls: list[tuple[Function, dict[str, set[int]]]] = []
        self.truncated = False
        self.returned: Value = NONE
        self.lines = (function.node.lineno, function.node.end_lineno or function.node.lineno)
        try:
            self._top(function)
        except (_TooLarge, RecursionError):
            self.truncated = True

    # ---- nodes

    def add(
        self, kind: str, name: str, line: int, *edges: tuple[Value, int], left: Value = NONE, right: Value = NONE
    ) -> int:
        if len(self.nodes) >= self._budget:
            raise _TooLarge
        flat = [(target, how) for value, how in edges for target in value]
        self.nodes.append(Node(kind, name, line, self.loop, flat, left, right))
        return len(self.nodes) - 1

    def root(self, name: str, kind: str = "root") -> int:
        """A value from outside: "root" for attributes and module tables, "const" for other module names (classes,
        enums, functions)."""
        if name not in self._roots:
            loop, self.loop = self.loop, -1
            self._roots[name] = self.add(kind, name, 0)
            self.loop = loop
        return self._roots[name]

    def table(self, value: Value, fallback: str = "") -> str:
        """The name of what a value was read from, followed to where it came in."""
        seen: set[int] = set()
        todo = sorted(value)
        found: list[str] = []
        while todo and len(seen) < 60:
            number = todo.pop(0)
            if number in seen:
                continue
            seen.add(number)
            node = self.nodes[number]
            if node.kind in ("root", "const", "param", "read", "window"):
                found.append(node.name)
                continue
            if node.kind == "bin" and node.left:
                todo = sorted(node.left) + todo
                continue
            todo += [t for t, how in node.edges if how == D]
        return found[0] if found else fallback

    # ---- functions

    def _top(self, function: Function) -> None:
        env: Env = {}
        recursive = self._calls_itself(function)
        if recursive:
            self.loops.append(Loop(-1, function.node.lineno, function.node.end_lineno or 0, "rec"))
            self.loop = 0
        params: dict[str, set[int]] = {}
        for name in function.params:
            start = self.add("param", name, function.node.lineno)
            if recursive and name not in ("self", "cls"):
                phi = self.add("phi", name, function.node.lineno, (frozenset({start}), D))
                self.loops[0].phis[name] = phi
                env[name] = frozenset({phi})
                params[name] = {phi}
            else:
                env[name] = frozenset({start})
        self._self_calls.append((function, params))
        self._stack.append(function)
        self._nested.append({})
        self._returns.append([])
        self.block(function.node.body, env)
        self.returned = frozenset().union(*self._returns[0])

    def _calls_itself(self, function: Function) -> bool:
        for node in self.module.tour[function.first : function.last]:
            if isinstance(node, ast.Call):
                f = node.func
                if isinstance(f, ast.Name) and f.id == function.name and not function.owner:
                    return True
                if (
                    isinstance(f, ast.Attribute)
                    and f.attr == function.name
                    and function.owner
                    and isinstance(f.value, ast.Name)
                ):
                    return True
        return False

    # ---- statements

    def block(self, body: list[ast.stmt], env: Env) -> bool:
        """Runs statements; True when control never gets past them."""
        for position, statement in enumerate(body):
            if isinstance(statement, ast.If):
                if self._if(statement, body[position + 1 :], env):
                    return True
                if _ends(statement.body) or _ends(statement.orelse):
                    return False  # the rest was run inside the branch that goes on
            elif self.statement(statement, env):
                return True
        return False

    def _if(self, node: ast.If, rest: list[ast.stmt], env: Env) -> bool:
        test = self.expr(node.test, env)
        then, other = dict(env), dict(env)
        body, orelse = list(node.body), list(node.orelse)
        if _ends(node.body):
            orelse += rest
        elif _ends(node.orelse):
            body += rest
        self.under.append(test)
        ended = self.block(body, then)
        ended_other = self.block(orelse, other)
        self.under.pop()
        if ended and ended_other:
            return True
        live = [e for e, gone in ((then, ended), (other, ended_other)) if not gone]
        names = {n for e in live for n, v in e.items() if env.get(n) != v}
        for name in names:
            values = frozenset().union(*(e.get(name, NONE) for e in live))
            env[name] = frozenset({self.add("sel", "if", node.lineno, (values, D), (test, P))}) if test else values
        return False

    def statement(self, node: ast.stmt, env: Env) -> bool:
        match node:
            case ast.Assign():
                if isinstance(node.value, ast.Lambda) and isinstance(node.targets[0], ast.Name):
                    self._lambdas[node.targets[0].id] = (node.value, env)
                for target in node.targets:
                    self.assign(target, node.value, env)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, node.value, env)
            case ast.AugAssign():
                old = self.expr(node.target, env)
                new = self.expr(node.value, env)
                op = _OPS.get(type(node.op), "?")
                value = (
                    frozenset({self.add("bin", op, node.lineno, (old, D), (new, D), left=old, right=new)})
                    if old or new
                    else NONE
                )
                self.bind(node.target, value, env, "aug")
            case ast.For() | ast.AsyncFor():
                self._for(node, env)
            case ast.While():
                self._while(node, env)
            case ast.Return():
                value = self.expr(node.value, env) if node.value is not None else NONE
                if self._returns:
                    self._returns[-1].append(self._chosen(value, node.lineno))
                self._exit()
                return True
            case ast.Raise():
                self._exit()
                return True
            case ast.Break() | ast.Continue():
                if self.loop >= 0:
                    loop = self.loops[self.loop]
                    (loop.breaks if isinstance(node, ast.Break) else loop.continues).append(
                        self._under_env(env, node.lineno)
                    )
                    if isinstance(node, ast.Break):
                        loop.exits.append(self._now())
                return True
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.expr(item.context_expr, env)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, value, env)
                return self.block(node.body, env)
            case ast.Try():
                missing = any(h.type is None or any(n in ast.dump(h.type) for n in _MISSING) for h in node.handlers)
                self._caught += missing
                ended = self.block(node.body, env)
                self._caught -= missing
                if missing and self.loop >= 0:
                    self.loops[self.loop].guarded = True
                for handler in node.handlers:
                    branch = dict(env)
                    if not self.block(handler.body, branch):
                        for name, value in branch.items():
                            env[name] = env.get(name, NONE) | value
                self.block(node.orelse, env)
                return self.block(node.finalbody, env) or (ended and not node.handlers)
            case ast.FunctionDef():
                found = next((f for f in self.module.functions if f.node is node), None)
                if found is not None and self._nested:
                    self._nested[-1][node.name] = (found, env)
            case ast.Expr():
                self.expr(node.value, env)
            case ast.Assert():
                self.expr(node.test, env)
            case ast.Match():
                subject = self.expr(node.subject, env)
                for case in node.cases:
                    branch = dict(env)
                    for sub in ast.walk(case.pattern):
                        bound = getattr(sub, "name", None)
                        if isinstance(bound, str):
                            branch[bound] = subject
                    self.under.append(subject)
                    self.block(case.body, branch)
                    self.under.pop()
                    for name, value in branch.items():
                        env[name] = env.get(name, NONE) | value
        return False

    def _now(self) -> Value:
        return frozenset().union(*self.under[-6:]) if self.under else NONE

    def _chosen(self, value: Value, line: int) -> Value:
        under = self._now()
        return frozenset({self.add("sel", "return", line, (value, D), (under, P))}) if value and under else value

    def _under_env(self, env: Env, line: int) -> Env:
        """The environment where a loop is left or restarted: what was assigned on the way was chosen by the tests in
        force."""
        under = self._now()
        if not under:
            return dict(env)
        phis = self.loops[self.loop].phis
        return {
            name: frozenset({self.add("sel", "jump", line, (value, D), (under, P))})
            if name in phis and value != frozenset({phis[name]})
            else value
            for name, value in env.items()
        }

    def _exit(self) -> None:
        number = self.loop
        while number >= 0:
            self.loops[number].exits.append(self._now())
            number = self.loops[number].parent

    # ---- loops

    def _for(self, node: ast.For | ast.AsyncFor, env: Env) -> None:
        source = self.expr(node.iter, env)
        self._enter(node, "for", env)
        self._bind_iteration(node.target, node.iter, source, env)
        ended = self.block(node.body, env)
        self._leave(env, ended)
        self.block(node.orelse, env)

    def _while(self, node: ast.While, env: Env) -> None:
        self._enter(node, "while", env)
        test = self.expr(node.test, env)
        loop = self.loops[self.loop]
        if test:
            loop.exits.append(test)
            for phi in loop.phis.values():
                self.nodes[phi].edges += [(t, P) for t in test]
        self.under.append(test)
        ended = self.block(node.body, env)
        self.under.pop()
        self._leave(env, ended)
        self.block(node.orelse, env)

    def _enter(self, node: ast.AST, kind: str, env: Env) -> None:
        line = getattr(node, "lineno", 0)
        self.loops.append(Loop(self.loop, line, getattr(node, "end_lineno", line) or line, kind, self._caught > 0))
        self.loop = len(self.loops) - 1
        for name in self._assigned(node):
            start = env.get(name)
            if start is None:
                start = frozenset({self.root(name)}) if "." in name else NONE
            phi = self.add("phi", name, line, (start, D))
            self.loops[self.loop].phis[name] = phi
            env[name] = frozenset({phi})

    def _leave(self, env: Env, ended: bool) -> None:
        loop = self.loops[self.loop]
        ends = [*loop.continues] if ended else [env, *loop.continues]
        for name, phi in loop.phis.items():
            back = frozenset().union(*(e.get(name, NONE) for e in ends)) if ends else NONE
            self.nodes[phi].edges += [(t, D) for t in back if t != phi]
        outs = [env, *loop.breaks, *loop.continues]
        for name, phi in loop.phis.items():
            env[name] = frozenset({phi}).union(*(e.get(name, NONE) for e in outs))
        for left in loop.breaks:
            for name, value in left.items():
                if name not in loop.phis:
                    env[name] = env.get(name, NONE) | value
        self.loop = loop.parent

    def _assigned(self, loop: ast.AST) -> list[str]:
        names: dict[str, None] = {}
        called: list[str] = []
        inside: list[Any] = self.module.walk(loop) if id(loop) in self.module.span else list(ast.walk(loop))
        for node in inside:
            kind = type(node)
            if kind is ast.Name and isinstance(node.ctx, ast.Store):
                names[node.id] = None
            elif kind is ast.Attribute and isinstance(node.ctx, ast.Store):
                names[_dotted(node)] = None
            elif kind is ast.Subscript and isinstance(node.ctx, ast.Store):
                names[_item(node) or _root_name(node)] = None
            elif kind is ast.Call:
                func = node.func
                if isinstance(func, ast.Attribute):
                    attr = func.attr
                    if isinstance(func.value, ast.Name) and func.value.id == "self":
                        names.update(dict.fromkeys(self._set_by(attr)))
                    if attr in _ADD or attr in _POP or (attr.endswith("_") and not attr.endswith("__")):
                        names[_root_name(func.value)] = None
                    if (attr in _STORE or attr.startswith("atomic_") or attr in ("heappush", "heappop")) and node.args:
                        names[_root_name(node.args[0])] = None
                elif isinstance(func, ast.Name):
                    called.append(func.id)
                    if func.id in ("heappush", "heappop", "setattr") and node.args:
                        names[_root_name(node.args[0])] = None
        for scope in self._nested:
            for name in called:
                if name in scope:
                    inner = scope[name][0]
                    for node in self.module.tour[inner.first : inner.last]:
                        if isinstance(node, ast.Nonlocal):
                            names.update(dict.fromkeys(node.names))
        names.pop("", None)
        return list(names)

    def _set_by(self, method: str, hops: int = 2) -> list[str]:
        """Attributes of self that a method of the same class sets."""
        owner = next((f.owner for f in reversed(self._stack) if f.owner), "")
        function = self.module.method(owner, method)
        if function is None or function in self._stack:
            return []
        names: list[str] = []
        for node in self.module.tour[function.first : function.last]:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                if isinstance(node.ctx, ast.Store):
                    names.append(f"self.{node.attr}")
            elif (
                isinstance(node, ast.Call)
                and hops
                and isinstance(node.func, ast.Attribute)
                and _dotted(node.func).startswith("self.")
            ):
                names += self._set_by(node.func.attr, hops - 1)
        return names

    def _bind_iteration(self, target: ast.expr, iterable: ast.expr, source: Value, env: Env) -> None:
        line = target.lineno
        loop = self.loops[self.loop]
        if isinstance(iterable, ast.Call):
            called = _last(iterable.func)
            if called in ("range", "static_range", "arange", "prange", "count", "trange"):
                start = self.expr(iterable.args[0], env) if len(iterable.args) > 1 else NONE
                value = frozenset({self.add("affine", called, line, (start, D))})
                loop.var |= value
                self.bind(target, value, env)
                return
            if called == "enumerate" and iterable.args and isinstance(target, ast.Tuple) and len(target.elts) == 2:
                number = frozenset({self.add("affine", called, line)})
                loop.var |= number
                self.bind(target.elts[0], number, env)
                self._bind_iteration(target.elts[1], iterable.args[0], self.expr(iterable.args[0], env), env)
                return
            if (
                called in ("zip", "zip_longest")
                and isinstance(target, ast.Tuple)
                and len(target.elts) == len(iterable.args)
            ):
                for part, argument in zip(target.elts, iterable.args, strict=True):
                    self._bind_iteration(part, argument, self.expr(argument, env), env)
                return
            if called == "items" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
                key = frozenset({self.add("affine", "key", line)})
                item = frozenset({self.add("iter", self.table(source, _root_name(iterable.func)), line, (source, D))})
                loop.var |= key | item
                self.bind(target.elts[0], key, env)
                self.bind(target.elts[1], item, env)
                return
            if called in ("reversed", "list", "tuple", "sorted", "iter", "tqdm", "set", "items") and (
                iterable.args or called == "items"
            ):
                inner = iterable.args[0] if iterable.args else iterable.func
                if not isinstance(inner, ast.Call) or _last(inner.func) not in ("range", "arange"):
                    value = frozenset({self.add("iter", self.table(source, _root_name(inner)), line, (source, D))})
                    loop.var |= value
                    self.bind(target, value, env)
                    return
                self._bind_iteration(target, inner, source, env)
                return
        if source:
            value = frozenset({self.add("iter", self.table(source, _root_name(iterable)), line, (source, D))})
        else:
            value = frozenset({self.add("affine", "iter", line)})
        loop.var |= value
        self.bind(target, value, env)

    # ---- binding

    def assign(self, target: ast.expr, value: ast.expr, env: Env) -> None:
        if (
            isinstance(target, (ast.Tuple, ast.List))
            and isinstance(value, (ast.Tuple, ast.List))
            and len(target.elts) == len(value.elts)
        ):
            values = [self.expr(v, env) for v in value.elts]
            for part, got in zip(target.elts, values, strict=True):
                self.bind(part, got, env)
            return
        self.bind(target, self.expr(value, env), env)

    def bind(self, target: ast.expr, value: Value, env: Env, how: str = "store") -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self.bind(part, value, env, how)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value, env, how)
        elif isinstance(target, ast.Attribute):
            name = _dotted(target)
            if name:
                env[name] = value
                self.writes.append(
                    Write(
                        name,
                        "aug" if how == "aug" else "attr",
                        target.lineno,
                        self.loop,
                        NONE,
                        value,
                        self._now(),
                        NONE,
                    )
                )
        elif isinstance(target, ast.Subscript) and _item(target):
            name = _item(target)
            env[name] = value
            self.writes.append(Write(name, "attr", target.lineno, self.loop, NONE, value, self._now(), NONE))
        elif isinstance(target, ast.Subscript):
            self._update(_root_name(target), how, self._index(target.slice, env), value, NONE, target.lineno, env)

    def _update(self, root: str, how: str, index: Value, value: Value, mask: Value, line: int, env: Env) -> int:
        """A container gets an element: it is now made of what it was and of that."""
        self.writes.append(Write(root, how, line, self.loop, index, value, self._now(), mask))
        old = env.get(root)
        if old is None:
            old = frozenset({self.root(root)}) if root else NONE
        under = self._now() | mask
        number = self.add("upd", root, line, (old, D), (value, D), (under, P), left=index)
        if root:
            env[root] = frozenset({number})
        return number

    # ---- expressions

    def expr(self, node: Any, env: Env) -> Value:
        kind = type(node)
        if node is None or kind is ast.Constant:
            return NONE
        if kind is ast.Name:
            name = node.id
            found = env.get(name)
            if found is not None:
                return found
            if name in self.module.top or name in ("True", "False", "None") or name in _MODULES:
                return NONE
            return frozenset({self.root(name, "const" if self._is_constant(name) else "root")})
        if kind is ast.Attribute:
            return self._attribute(node, env)
        if kind is ast.Call:
            return self._call(node, env)
        match node:
            case ast.Subscript():
                if (held := env.get(_item(node))) is not None:
                    return held
                base = self.expr(node.value, env)
                if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                    return self._field(base, _dotted(node.value), node.slice.value, node.lineno)
                index = self._index(node.slice, env)
                if not index:
                    return base
                table = self.table(base, _root_name(node.value))
                window = isinstance(
                    node.slice, ast.Slice
                )  # several places at once: something to compare, nowhere to go
                return frozenset({self.add("window" if window else "read", table, node.lineno, (base, D), (index, I))})
            case ast.BinOp():
                left, right = self.expr(node.left, env), self.expr(node.right, env)
                op = _OPS.get(type(node.op), "?")
                if (not left or not right) and op not in "&|@*/<":
                    return left | right
                if not left and not right:
                    return NONE
                return frozenset({self.add("bin", op, node.lineno, (left, D), (right, D), left=left, right=right)})
            case ast.UnaryOp():
                return self.expr(node.operand, env)
            case ast.BoolOp():
                values = frozenset().union(*(self.expr(v, env) for v in node.values))
                op = "&" if isinstance(node.op, ast.And) else "|"
                return frozenset({self.add("bin", op, node.lineno, (values, D), left=values)}) if values else NONE
            case ast.Compare():
                left = self.expr(node.left, env)
                right = frozenset().union(*(self.expr(v, env) for v in node.comparators))
                return self._cmp(type(node.ops[0]).__name__, left, right, node.lineno)
            case ast.IfExp():
                test = self.expr(node.test, env)
                values = self.expr(node.body, env) | self.expr(node.orelse, env)
                return (
                    frozenset({self.add("sel", "ifexp", node.lineno, (values, D), (test, P))})
                    if values or test
                    else NONE
                )
            case ast.Tuple() | ast.List() | ast.Set():
                return frozenset().union(*(self.expr(v, env) for v in node.elts)) if node.elts else NONE
            case ast.Dict():
                parts = [self.expr(v, env) for v in [*node.keys, *node.values] if v is not None]
                return frozenset().union(*parts) if parts else NONE
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, env)
            case ast.NamedExpr():
                value = self.expr(node.value, env)
                env[node.target.id] = value
                return value
            case ast.JoinedStr():
                parts = [self.expr(v.value, env) for v in node.values if isinstance(v, ast.FormattedValue)]
                return frozenset().union(*parts) if parts else NONE
            case ast.Starred() | ast.Await() | ast.YieldFrom():
                return self.expr(node.value, env)
            case ast.Yield():
                value = self.expr(node.value, env)
                if self._returns:
                    self._returns[-1].append(value)
                return value
        return NONE

    def _is_constant(self, name: str) -> bool:
        """A class, function, module or plain constant of this file, as against a table of the file or a name of an
        outer function."""
        module = self.module
        if name in module.tables:
            return False
        return (
            name in module.imports
            or name in module.bases
            or name in module.top
            or name in module.constants
            or name in _BUILTINS
        )

    def _cmp(self, op: str, left: Value, right: Value, line: int) -> Value:
        if not left and not right:
            return NONE
        return frozenset({self.add("cmp", op, line, (left, C), (right, C), left=left, right=right)})

    def _index(self, node: ast.expr, env: Env) -> Value:
        """What an index depends on; constants, and slices from the start, say nothing about where."""
        if isinstance(node, ast.Slice):
            if node.upper is not None:
                self.expr(node.upper, env)
            return self.expr(node.lower, env) if node.lower is not None else NONE
        if isinstance(node, ast.Tuple):
            parts = [part for part in node.elts if not isinstance(part, ast.Slice)]
            return frozenset().union(*(self._index(part, env) for part in parts)) if parts else NONE
        return self.expr(node, env)

    def _attribute(self, node: ast.Attribute, env: Env) -> Value:
        name = _dotted(node)
        if name and name in env:
            return env[name]
        if node.attr in _META:
            made = self.expr(node.value, env)
            return (
                frozenset({self.add("len", "size", node.lineno, (made, L))}) if node.attr == "size" and made else NONE
            )
        base = self.expr(node.value, env)
        if node.attr in _SAME:
            return base
        return self._field(base, _dotted(node.value), node.attr, node.lineno)

    def _field(self, base: Value, owner: str, name: str, line: int) -> Value:
        """An attribute (or the item under a string): of something from outside, a table; of something found here, a
        read."""
        if owner and all(self.nodes[b].kind in ("root", "param", "const") for b in base):
            constant = not base or any(self.nodes[b].kind == "const" for b in base)
            return frozenset({self.root(f"{owner}.{name}", "const" if constant else "root")})
        return frozenset({self.add("read", f".{name}", line, (base, I))})

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, env: Env) -> Value:
        inner = dict(env)
        depth = self.loop
        tests: set[int] = set()
        for generator in node.generators:
            source = self.expr(generator.iter, inner)
            self.loops.append(Loop(self.loop, node.lineno, node.end_lineno or node.lineno, "comp"))
            self.loop = len(self.loops) - 1
            self._bind_iteration(generator.target, generator.iter, source, inner)
            for test in generator.ifs:
                tests |= self.expr(test, inner)
        self.under.append(frozenset(tests))
        if isinstance(node, ast.DictComp):
            value = self.expr(node.key, inner) | self.expr(node.value, inner)
        else:
            value = self.expr(node.elt, inner)
        self.under.pop()
        for sub in ast.walk(node):
            if isinstance(sub, ast.NamedExpr):
                env[sub.target.id] = inner.get(sub.target.id, NONE)
        result = (
            frozenset({self.add("sel", "comp", node.lineno, (value, D), (frozenset(tests), P))})
            if value or tests
            else NONE
        )
        self.loop = depth
        return result

    # ---- calls

    def _call(self, node: ast.Call, env: Env) -> Value:
        func = node.func
        name = _last(func)
        line = node.lineno
        if isinstance(func, ast.Attribute):
            module_like = (
                isinstance(func.value, ast.Name)
                and func.value.id not in env
                and (func.value.id in _MODULES or func.value.id in self.module.imports)
            )
            if isinstance(func.value, ast.Attribute) and not module_like:
                module_like = _dotted(func.value).split(".")[0] in _MODULES
        else:
            module_like = True
        recv = self.expr(func.value, env) if isinstance(func, ast.Attribute) and not module_like else NONE
        inlined = self._inline(node, func, name, recv, env)
        if inlined is not None:
            return inlined
        if name in _APPLIES:
            applied = self._applied(node, name, env)
            if applied is not None:
                return applied
        args = [self.expr(a, env) for a in node.args]
        keyword = {k.arg or "": self.expr(k.value, env) for k in node.keywords}
        everything = frozenset().union(
            recv, *args, *(v for k, v in keyword.items() if k not in ("dtype", "device", "dim", "axis"))
        )
        if name in _LOAD and args:
            return self._load(node.args[0], args[0], keyword.get("mask", NONE) | keyword.get("other", NONE), line, env)
        if (name in _STORE or name.startswith("atomic_")) and len(args) >= 2:
            pointer = _root_name(node.args[0])
            value = frozenset().union(*args[1:2])
            mask = keyword.get("mask", NONE) | (args[2] if len(args) > 2 else NONE)
            self._update(pointer, "store", args[0], value, mask, line, env)
            return NONE
        if name in _GATHER and (args or keyword):
            base_node = (
                node.args[0] if module_like and node.args else func.value if isinstance(func, ast.Attribute) else func
            )
            base = args[0] if module_like and args else recv
            rest = args[1:] if module_like else args
            index = frozenset().union(*rest, keyword.get("index", NONE), keyword.get("indices", NONE))
            return frozenset({self.add("read", self.table(base, _root_name(base_node)), line, (base, D), (index, I))})
        if name in ("get", "__getitem__", "getitem", "pop", "setdefault", "index", "getattr") and any(args):
            base, keys = (args[0], args[1:2]) if module_like else (recv, args[:1])
            index = frozenset().union(*keys) if keys else NONE
            if index:
                default = frozenset().union(*args[2 if module_like else 1 :])
                table = self.table(base, _root_name(func))
                return frozenset({self.add("read", table, line, (base, D), (index, I), (default, D))})
        if name in _POP:
            if not module_like:
                return recv
            if args:
                return args[0]
        if name in _ADD or (name.endswith("_") and not name.endswith("__") and not module_like):
            if module_like and name != "heappush":
                return frozenset({self.add("call", name, line, (everything, D))}) if everything else NONE
            target = (
                node.args[0] if module_like and node.args else func.value if isinstance(func, ast.Attribute) else func
            )
            values = frozenset().union(*(args[1:] if module_like else args), *keyword.values())
            how = "append" if name in _ADD else "store"
            number = self._update(
                _root_name(target), how, args[0] if how == "store" and args else NONE, values, NONE, line, env
            )
            return frozenset({number})
        if name in _SELECT and (len(args) >= 3 or (not module_like and len(args) >= 2)):
            chooser = args[0]
            values = recv.union(*args[1:])
            return frozenset({self.add("sel", name, line, (values, D), (chooser, P), left=chooser)})
        if name in _COMPARE:
            left, right = (args[0], args[1]) if module_like and len(args) >= 2 else (recv, args[0] if args else NONE)
            return self._cmp(_COMPARE[name], left, right, line)
        if name in _BINARY:
            left, right = (args[0], args[1]) if module_like and len(args) >= 2 else (recv, args[0] if args else NONE)
            if name == "einsum" and len(args) >= 3:
                left, right = args[1], args[2]
            return (
                frozenset({self.add("bin", _BINARY[name], line, (left, D), (right, D), left=left, right=right)})
                if left or right
                else NONE
            )
        if name in ("numel", "size") and recv and not args:
            return frozenset({self.add("len", name, line, (recv, L))})
        if name == "len" and args:
            return frozenset({self.add("len", "len", line, (args[0], L))}) if args[0] else NONE
        if name in ("range", "size", "numel", "stride", "dim", "isinstance", "hasattr", "device", "dtype"):
            return NONE
        if name == "arange":
            return frozenset({self.add("affine", "arange", line)})
        if name in _FRESH:
            return (
                frozenset({self.add("fresh", name, line)})
                if not args or name not in ("list", "set", "dict", "deque")
                else everything
            )
        if isinstance(func, ast.Name) and name in self.module.bases:
            name = "construct"  # an object of this file's own is made of its arguments
        number = self.add("call", name, line, (everything, D), left=args[0] if args else recv)
        if self.loop >= 0 and module_like:
            full = _dotted(func)
            first = full.split(".")[0]
            if first in self.module.imports and first not in _MODULES:
                self.foreign[number] = full
        return frozenset({number})

    def _applied(self, node: ast.Call, name: str, env: Env) -> Value | None:
        """reduce(f, xs, x0): a loop over f; max(xs, key=f), map(f, xs), filter(f, xs): f on each element."""
        line = node.lineno
        key = next((k.value for k in node.keywords if k.arg == "key"), None)
        if name in ("reduce", "accumulate"):
            functions = [a for a in node.args if isinstance(a, (ast.Lambda, ast.Name)) and self._is_function(a)]
            start = (
                node.args[2]
                if len(node.args) > 2
                else next((k.value for k in node.keywords if k.arg == "initial"), None)
            )
            if not functions or start is None:
                return None
            depth = self.loop
            self.loops.append(Loop(self.loop, line, node.end_lineno or line, "rec"))
            self.loop = len(self.loops) - 1
            phi = self.add("phi", " carried", line, (self.expr(start, env), D))
            self.loops[self.loop].phis[" carried"] = phi
            result = self._apply(functions[0], frozenset({phi}), env, line)
            self.nodes[phi].edges += [(t, D) for t in result if t != phi]
            self.loop = depth
            return frozenset({phi}) | result
        if key is not None and node.args and self._is_function(key):
            function, items = key, node.args[0]
        elif name in ("map", "filter") and len(node.args) == 2 and self._is_function(node.args[0]):
            function, items = node.args
        else:
            return None
        source = self.expr(items, env)
        depth = self.loop
        self.loops.append(Loop(self.loop, line, node.end_lineno or line, "comp"))
        self.loop = len(self.loops) - 1
        inner = dict(env)
        self._bind_iteration(ast.Name(" item", ast.Store(), lineno=line, col_offset=0), items, source, inner)
        item = inner[" item"]
        result = self._apply(function, item, env, line)
        self.loop = depth
        if name == "map":
            return result
        chosen = frozenset({self.add("sel", "comp", line, (item, D), (result, P))})
        return chosen if name == "filter" else frozenset({self.add("call", name, line, (chosen, D))})

    def _is_function(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Lambda):
            return True
        return isinstance(node, ast.Name) and (
            node.id in self.module.top or node.id in self._lambdas or any(node.id in scope for scope in self._nested)
        )

    def _apply(self, function: ast.expr, argument: Value, env: Env, line: int) -> Value:
        inner = {**env, " argument": argument}
        name = ast.Name(" argument", ast.Load(), lineno=line, col_offset=0)
        if isinstance(function, ast.Lambda):
            return self._inline_lambda(ast.Call(function, [name], [], lineno=line, col_offset=0), function, env, inner)
        call = ast.Call(function, [name, ast.Constant(0, lineno=line, col_offset=0)], [], lineno=line, col_offset=0)
        return self.expr(call, inner)

    def _load(self, pointer: ast.expr, value: Value, mask: Value, line: int, env: Env) -> Value:
        """A read through a pointer: the leftmost name is the table, the rest of the sum is the index."""
        base_nodes: set[int] = set()
        seen: set[int] = set()
        todo = list(value)
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            node = self.nodes[number]
            if node.kind == "bin" and node.name in "+-":
                todo += node.left or node.right
            elif node.kind in ("root", "const", "param", "phi", "sel", "read", "upd", "call"):
                base_nodes.add(number)
        index: set[int] = set()
        for number in value:
            index |= self._offsets(number, base_nodes)
        table = self.table(frozenset(base_nodes), _root_name(pointer))
        base = frozenset(base_nodes)
        chased = frozenset(b for b in base_nodes if self.nodes[b].kind in ("read", "call"))
        return frozenset({self.add("read", table, line, (base, D), (frozenset(index) | chased, I), (mask, P))})

    def _offsets(self, number: int, base: set[int]) -> set[int]:
        node = self.nodes[number]
        if node.kind == "bin" and node.name in "+-":
            found: set[int] = set()
            for side in node.left:
                found |= self._offsets(side, base)
            return found | set(node.right)
        return set() if number in base else {number}

    def _inline(self, node: ast.Call, func: ast.expr, name: str, recv: Value, env: Env) -> Value | None:
        """The value of a call of a function that this file (or ``resolve``) defines, or None when it isn't known."""
        function: Function | None = None
        outer: Env = {}
        module = self.module
        bound = False
        if isinstance(func, ast.Name):
            for scope in reversed(self._nested):
                if name in scope:
                    function, outer = scope[name]
                    break
            else:
                if name in self._lambdas:
                    return self._inline_lambda(node, *self._lambdas[name], env)
                function = next((f for f in self._stack if f.name == name and not f.owner), None) or module.top.get(
                    name
                )
        elif isinstance(func, ast.Attribute):
            owner = next((f.owner for f in reversed(self._stack) if f.owner), "")
            if isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
                function, bound = module.method(owner, name), True
            elif isinstance(func.value, ast.Call) and _last(func.value.func) == "super":
                function, bound = (
                    next(filter(None, (module.method(b, name) for b in module.bases.get(owner, ()))), None),
                    True,
                )
            elif name in module.by_method and len(module.by_method[name]) == 1 and recv:
                function, bound = module.by_method[name][0], True
        elif isinstance(func, ast.Subscript):  # a kernel launch: kernel[grid](...)
            function = module.top.get(_last(func.value)) if self.loop >= 0 else None
        if function is None and self._resolve is not None:
            full = _dotted(func.value if isinstance(func, ast.Subscript) else func)
            found = self._resolve(module, full) if full.split(".")[0] in module.imports else None
            if found is not None:
                module, function = found
                bound = False
        if function is None:
            return None
        for recursive, params in self._self_calls:
            if recursive.node is function.node:
                return self._recurse(node, function, params, bound, env)
        if len(self._stack) > 3 or function in self._stack or function.last - function.first > 300:
            return None
        args = [self.expr(a, env) for a in node.args]
        inner: Env = dict(outer)
        inner.update({k: v for k, v in env.items() if k.startswith("self.")})
        names = list(function.params)
        if names and (bound or function.owner) and names[0] in ("self", "cls"):
            inner[names[0]] = recv
            names = names[1:]
        for parameter in function.params:
            inner.setdefault(parameter, NONE)
        for parameter, value in zip(names, args, strict=False):
            inner[parameter] = value
        for keyword in node.keywords:
            if keyword.arg:
                inner[keyword.arg] = self.expr(keyword.value, env)
        saved, self.module = self.module, module
        self._stack.append(function)
        self._nested.append({})
        self._returns.append([])
        under, self.under = self.under, self.under[-2:]
        depth = self.loop
        try:
            self.block(function.node.body, inner)
        finally:
            self.loop, self.under, self.module = depth, under, saved
            self._stack.pop()
            self._nested.pop()
            returned = self._returns.pop()
        for attribute, held in inner.items():
            if attribute.startswith("self."):
                env[attribute] = held
        for statement in function.node.body:
            if isinstance(statement, ast.Nonlocal):
                env.update({n: inner.get(n, NONE) for n in statement.names})
        value = frozenset().union(*returned) if returned else NONE
        return value if value else frozenset({self.add("call", name, node.lineno, *((a, D) for a in args))})

    def _inline_lambda(self, node: ast.Call, function: ast.Lambda, outer: Env, env: Env) -> Value:
        inner = {**outer, **env}
        for parameter, argument in zip(function.args.args, node.args, strict=False):
            inner[parameter.arg] = self.expr(argument, env)
        return self.expr(function.body, inner)

    def _recurse(self, node: ast.Call, function: Function, params: dict[str, set[int]], bound: bool, env: Env) -> Value:
        names = [p for p in function.params if not (bound and p in ("self", "cls"))]
        if not bound and function.owner and names and names[0] in ("self", "cls"):
            names = names[1:]
        everything: set[int] = set()
        under = self._now()
        for parameter, argument in [
            *zip(names, node.args, strict=False),
            *((k.arg or "", k.value) for k in node.keywords),
        ]:
            value = self.expr(argument, env)
            everything |= value
            for phi in params.get(parameter, ()):
                self.nodes[phi].edges += [(t, D) for t in value if t != phi]
                self.nodes[phi].edges += [(t, P) for t in under]
        return frozenset({self.add("call", "recursion", node.lineno, (frozenset(everything), D))})


def _ends(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Break, ast.Continue))


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return ""


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def _item(node: ast.Subscript) -> str:
    """ "d.key" for d["key"], "" for other subscripts."""
    if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        owner = _dotted(node.value)
        return f"{owner}.{node.slice.value}" if owner else ""
    return ""


def _root_name(node: ast.AST) -> str:
    """The (dotted) name that a chain of subscripts, sums and calls starts from."""
    while True:
        if isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name:
                return name
            node = node.value
        elif isinstance(node, ast.Name):
            return node.id
        elif isinstance(node, (ast.Subscript, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""


def reaches(nodes: list[Node], start: Iterable[int], kinds: frozenset[int], limit: int = 4000) -> set[int]:
    """All nodes that ``start`` depends on through edges of these kinds, ``start`` included."""
    seen = set(start)
    todo = list(seen)
    while todo and len(seen) < limit:
        for target, how in nodes[todo.pop()].edges:
            if how in kinds and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen
