"""One parsed file in a form that is cheap to ask: an Euler tour, its functions, classes, imports and module
constants."""

from __future__ import annotations

import ast
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
    first: int  # positions in the tour: nodes of the function are tour[first:last]
    last: int
    params: tuple[str, ...] = ()
    nested: dict[str, Function] = field(default_factory=dict)


@dataclass
class Module:
    tree: ast.Module
    tour: list[Any]
    functions: list[Function]
    top: dict[str, Function]
    methods: dict[str, dict[str, Function]]  # class -> name -> method
    by_method: dict[str, list[Function]]
    bases: dict[str, tuple[str, ...]]
    imports: dict[str, str]  # local name -> dotted origin
    span: dict[int, tuple[int, int]]  # id(statement) -> its slice of the tour
    tables: frozenset[str] = frozenset()  # module names bound to a container or to the result of a call
    constants: frozenset[str] = frozenset()  # the other names that the module itself binds
    path: str = ""  # where it is in the install, for whoever resolves imports

    def walk(self, node: ast.AST) -> list[Any]:
        """All nodes below and including ``node``, in pre-order: a slice, not a search."""
        first, last = self.span[id(node)]
        return self.tour[first:last]

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
    module = Module(tree, [], [], {}, {}, {}, {}, {}, {})
    _tour(module, tree, "", "", None)
    bound: dict[str, bool] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                if isinstance(target, ast.Name):
                    bound[target.id] = isinstance(statement.value, _CONTAINERS)
    module.tables = frozenset(name for name, table in bound.items() if table)
    module.constants = frozenset(name for name, table in bound.items() if not table)
    return module


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


def _tour(module: Module, node: ast.AST, qual: str, owner: str, outer: Function | None) -> None:
    tour = module.tour
    first = len(tour)
    tour.append(node)
    kind = type(node)
    function: Function | None = None
    if kind in _DEFINES:
        if kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
            assert isinstance(node, FunctionNode)
            name = f"{qual}.{node.name}" if qual else node.name
            a = node.args
            params = tuple(p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs])
            function = Function(node, node.name, name, owner, first, first, params)
            module.functions.append(function)
            if owner:
                module.methods.setdefault(owner, {}).setdefault(node.name, function)
                module.by_method.setdefault(node.name, []).append(function)
            elif outer is not None:
                outer.nested[node.name] = function
            else:
                module.top.setdefault(node.name, function)
            qual, owner, outer = name, "", function
        elif kind is ast.ClassDef:
            assert isinstance(node, ast.ClassDef)
            qual = owner = node.name  # methods are "Class.method" wherever the class stands
            module.bases[node.name] = tuple(filter(None, (dotted(b) for b in node.bases)))
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
        elif kind is ast.Assign:
            assert isinstance(node, ast.Assign)
            loaded = imported_module(node.value)
            if loaded and isinstance(node.targets[0], ast.Name):
                module.imports[node.targets[0].id] = f"{loaded}:"
    for field_name in _fields_of(kind):
        value = getattr(node, field_name, None)
        if type(value) is list:
            for item in value:
                if type(item) in _LEAVES:
                    tour.append(item)
                elif isinstance(item, ast.AST):
                    _tour(module, item, qual, owner, outer)
        elif type(value) in _LEAVES:
            tour.append(value)
        elif isinstance(value, ast.AST):
            _tour(module, value, qual, owner, outer)
    if function is not None:
        function.last = len(tour)
    if isinstance(node, ast.stmt):
        module.span[id(node)] = (first, len(tour))


_DEFINES = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign})
