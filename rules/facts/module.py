"""One parsed file in a form that is cheap to ask: an Euler tour, its functions, classes, imports and module
constants."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Function:
    """``qual`` is "Class.method" or "outer.inner"; ``owner`` the class that it is a method of ("" for plain
    functions)."""

    node: FunctionNode
    name: str
    qual: str
    owner: str
    first: int = -1  # positions in the tour once it was toured: its nodes are tour[first:last]
    last: int = -1
    params: tuple[str, ...] = ()
    nested: dict[str, Function] = field(default_factory=dict)
    loops: bool = False  # a for or while statement is in it (or in a function inside it)


@dataclass
class Module:
    tree: ast.Module
    source: bytes
    functions: list[Function]
    top: dict[str, Function]
    methods: dict[str, dict[str, Function]]  # class -> name -> method
    by_method: dict[str, list[Function]]
    bases: dict[str, tuple[str, ...]]
    imports: dict[str, str]  # local name -> dotted origin
    tables: frozenset[str] = frozenset()  # module names bound to a container or to the result of a call
    constants: frozenset[str] = frozenset()  # the other names that the module itself binds
    properties: set[str] = field(default_factory=set)  # methods that are read like attributes
    sets: bool = False  # a statement sets an attribute of something that the file imports or defines
    path: str = ""  # where it is in the install, for whoever resolves imports
    whole: bool = False  # the tour covers the file, in order
    tour: list[Any] = field(default_factory=list)
    span: dict[int, tuple[int, int]] = field(default_factory=dict)  # id(loop or other statement) -> its slice
    by_node: dict[int, Function] = field(default_factory=dict)
    _lines: list[int] = field(default_factory=list)

    def nodes(self, function: Function) -> list[Any]:
        """All nodes of a function in pre-order. Functions are toured when somebody asks: most are never asked for."""
        if function.first < 0:
            _tour(self, function.node)
        return self.tour[function.first : function.last]

    def all_nodes(self) -> list[Any]:
        """All nodes of the file in pre-order."""
        if not self.whole:
            self.tour.clear()
            self.span.clear()
            _tour(self, self.tree)
            self.whole = True
        return self.tour

    def walk(self, node: ast.AST) -> list[Any]:
        """All nodes below and including a statement of a toured function, in pre-order: a slice, not a search."""
        first, last = self.span[id(node)]
        return self.tour[first:last]

    def text(self, function: Function) -> bytes:
        """A function's source, decorators included, its docstring left out."""
        if not self._lines:
            source = self.source
            if b"\r" in source:
                source = self.source = source.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            self._lines = [0, *(m.end() for m in _NEWLINE.finditer(source)), len(source)]
        node, lines = function.node, self._lines
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        end = node.end_lineno or node.lineno
        first = node.body[0]
        last = len(lines) - 1
        if type(first) is ast.Expr and type(first.value) is ast.Constant and len(node.body) > 1:
            head = self.source[lines[min(start - 1, last)] : lines[min(first.lineno - 1, last)]]
            after = max(node.body[1].lineno, 1)
            if isinstance(node.body[1], (FunctionNode, ast.ClassDef)):
                after = min([after, *(d.lineno for d in node.body[1].decorator_list)])
            return head + self.source[lines[min(after - 1, last)] : lines[min(end, last)]]
        return self.source[lines[min(start - 1, last)] : lines[min(end, last)]]

    def method(self, owner: str, name: str, hops: int = 5) -> Function | None:
        """The method that ``owner`` has or inherits inside this file."""
        found = self.methods.get(owner, {}).get(name)
        if found is not None or hops == 0:
            return found
        for base in self.bases.get(owner, ()):
            found = self.method(base.rsplit(".", 1)[-1], name, hops - 1)
            if found is not None:
                return found
        return None


def dotted(node: ast.AST) -> str:
    """ "a.b.c" for a chain of attributes on a name, else ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def imported_module(node: ast.expr) -> str:
    """The module that ``importlib.import_module("a.b")`` or ``sys.modules["a.b"]`` gives, "" for anything else."""
    if (
        isinstance(node, ast.Call)
        and dotted(node.func).endswith("import_module")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ):
        return str(node.args[0].value)
    if isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules" and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return ""


def parse(source: bytes) -> ast.Module:
    """``ast.parse``, and where this Python refuses (newer syntax), libcst's view of the file rewritten in older
    syntax."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        from rules.facts.newer import rewritten

        older = rewritten(source)
        if older is None:
            raise error
        return ast.parse(older)


_CONTAINERS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Call, ast.ListComp, ast.DictComp)


@lru_cache(maxsize=1)
def read_module(source: bytes) -> Module:
    """The file as a Module; the last one is remembered, since several extractors ask for the same file one after the
    other."""
    tree = parse(source)
    module = Module(tree, source, [], {}, {}, {}, {}, {})
    sets: set[str] = set()
    _define(module, tree.body, "", "", None, sets)
    module.sets = any(root in module.imports or root in module.bases for root in sets)
    bound: dict[str, bool] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                if isinstance(target, ast.Name):
                    bound[target.id] = isinstance(statement.value, _CONTAINERS)
    module.tables = frozenset(name for name, table in bound.items() if table)
    module.constants = frozenset(name for name, table in bound.items() if not table)
    return module


def _define(
    module: Module, body: list[ast.stmt], qual: str, owner: str, outer: Function | None, sets: set[str]
) -> bool:
    """What statements define: functions, classes, imports. No expression is looked into. True when a loop is among
    them."""
    loops = False
    for node in body:
        kind = type(node)
        if kind is ast.Expr or kind is ast.Return:
            continue
        if kind is ast.Assign:
            assert isinstance(node, ast.Assign)
            for target in node.targets:
                if type(target) is ast.Attribute:
                    sets.add(dotted(target.value).partition(".")[0])
            if type(node.value) is ast.Call or type(node.value) is ast.Subscript:
                loaded = imported_module(node.value)
                if loaded and isinstance(node.targets[0], ast.Name):
                    module.imports[node.targets[0].id] = f"{loaded}:"
        elif kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
            assert isinstance(node, FunctionNode)
            name = f"{qual}.{node.name}" if qual else node.name
            a = node.args
            params = tuple(p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs])
            function = Function(node, node.name, name, owner, params=params)
            module.functions.append(function)
            module.by_node[id(node)] = function
            if owner and any(dotted(d).endswith("property") for d in node.decorator_list):
                module.properties.add(node.name)
            if owner:
                module.methods.setdefault(owner, {}).setdefault(node.name, function)
                module.by_method.setdefault(node.name, []).append(function)
            elif outer is not None:
                outer.nested[node.name] = function
            else:
                module.top.setdefault(node.name, function)
            function.loops = _define(module, node.body, name, "", function, sets)
            loops |= function.loops
        elif kind is ast.ClassDef:
            assert isinstance(node, ast.ClassDef)
            module.bases[node.name] = tuple(filter(None, (dotted(b) for b in node.bases)))
            # methods are "Class.method" wherever the class stands
            loops |= _define(module, node.body, node.name, node.name, outer, sets)
        elif kind is ast.Import:
            assert isinstance(node, ast.Import)
            for alias in node.names:
                module.imports[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                ) + ":"
        elif kind is ast.ImportFrom:
            assert isinstance(node, ast.ImportFrom)
            for alias in node.names:
                module.imports[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}:{alias.name}"
        else:
            loops |= kind is ast.For or kind is ast.While
            for part in _BODIES.get(kind, ()):
                inside = getattr(node, part)
                if part == "handlers" or part == "cases":
                    for one in inside:
                        loops |= _define(module, one.body, qual, owner, outer, sets)
                elif inside:
                    loops |= _define(module, inside, qual, owner, outer, sets)
    return loops


_NEWLINE = re.compile(rb"\n")
_BODIES: dict[type, tuple[str, ...]] = {
    ast.If: ("body", "orelse"),
    ast.For: ("body", "orelse"),
    ast.AsyncFor: ("body", "orelse"),
    ast.While: ("body", "orelse"),
    ast.With: ("body",),
    ast.AsyncWith: ("body",),
    ast.Try: ("body", "handlers", "orelse", "finalbody"),
    ast.Match: ("cases",),
}
if sys.version_info >= (3, 11):
    _BODIES[ast.TryStar] = _BODIES[ast.Try]


_LEAVES = frozenset({ast.Name, ast.Constant, ast.Pass, ast.Break, ast.Continue})
#: Fields that hold no expression or statement, or only say how a name is used.
_NO_NODES = frozenset(
    {
        "ctx",
        "op",
        "ops",
        "kind",
        "type_comment",
        "id",
        "attr",
        "name",
        "asname",
        "level",
        "module",
        "arg",
        "lineno",
        "conversion",
        "simple",
        "is_async",
        "type_params",
        "returns",
        "annotation",
        "type_ignores",
        "rest",
        "tag",
        "str",
    }
)
_fields: dict[type, tuple[str, ...]] = {}


def _fields_of(kind: type[ast.AST]) -> tuple[str, ...]:
    if kind not in _fields:
        _fields[kind] = tuple(name for name in kind._fields if name not in _NO_NODES)
    return _fields[kind]


def _tour(module: Module, node: ast.AST) -> None:
    """Adds a statement's nodes to the tour in pre-order. Spans are kept for functions and for loops."""
    tour = module.tour
    first = len(tour)
    tour.append(node)
    kind = type(node)
    for name in _fields.get(kind) or _fields_of(kind):
        value = getattr(node, name, None)
        if value is None:
            continue
        of = type(value)
        if of is list:
            for item in value:
                of = type(item)
                if of in _LEAVES:
                    tour.append(item)
                elif of is ast.Attribute and type(item.value) is ast.Name:
                    tour.append(item)
                    tour.append(item.value)
                elif isinstance(item, ast.AST):
                    _tour(module, item)
        elif of in _LEAVES:
            tour.append(value)
        elif of is ast.Attribute and type(value.value) is ast.Name:
            tour.append(value)
            tour.append(value.value)
        elif isinstance(value, ast.AST):
            _tour(module, value)
    if kind in _SPANNED:
        module.span[id(node)] = (first, len(tour))
        function = module.by_node.get(id(node))
        if function is not None:
            function.first, function.last = first, len(tour)


_SPANNED = frozenset({ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef})
