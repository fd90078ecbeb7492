"""Names to places in an install: modules, re-exports, classes and what they inherit, attributes, conditions."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rules.conditions import switched_off
from rules.facts.module import dotted
from rules.tree import SourceFile

if TYPE_CHECKING:
    from rules.context import ScanContext

Key = tuple[str, str]  # (path, qualified name)


@dataclass(frozen=True)
class Reached:
    """How a function is reached. ``off``: the condition that stands in the way as shipped ("" when none does)."""

    runner: str
    via: tuple[str, ...]
    off: str = ""
    hops: int = 0


@dataclass
class Slice:
    """``reached`` are functions that acceptance can pass through; ``step`` also those that a step of the runner
    calls around it (not
    through a drafter or a model)."""

    roots: tuple[str, ...] = ()
    reached: dict[Key, Reached] = field(default_factory=dict)
    step: dict[Key, Reached] = field(default_factory=dict)
    ops: dict[str, tuple[Key, bool]] = field(default_factory=dict)  # op -> (who calls it, whether that file is stock)
    executed: dict[Key, list[int]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)  # files in the way that could not be read or parsed
    not_examined: tuple[str, ...] = ()
    resolver: Resolver | None = None
    across: dict[Key, list[Any]] = field(default_factory=dict)  # walks that show only with another file's functions
    replaced: list[tuple[Key, str]] = field(
        default_factory=list
    )  # what plugins put in place: (function, what it replaces)


class Resolver:
    """Names to places: modules, re-exports, classes and what they inherit, attributes, conditions."""

    def __init__(self, ctx: ScanContext) -> None:
        self.ctx = ctx
        self.slice = Slice()
        self._module_of: dict[str, SourceFile | None] = {}
        self._consts: dict[tuple[str, str], str | None] = {}

    # ---- names to files

    def module(self, name: str) -> SourceFile | None:
        if name not in self._module_of:
            base = name.replace(".", "/")
            self._module_of[name] = self.ctx.file(f"{base}.py") or self.ctx.file(f"{base}/__init__.py")
        return self._module_of[name]

    def absolute(self, path: str, module: str) -> str:
        """A module name as an import in ``path`` means it (leading dots are relative)."""
        level = len(module) - len(module.lstrip("."))
        if not level:
            return module
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        if not path.endswith("__init__.py"):
            level += 0
            parts = parts[: len(parts) - level]
        else:
            parts = parts[: len(parts) - level + 1]
        rest = module.lstrip(".")
        return ".".join([*parts, *([rest] if rest else [])])

    def resolve(self, path: str, name: str, hops: int = 6) -> tuple[SourceFile, str] | None:
        """Where a (dotted) name of a file is defined: (file, name in it), name "" for a module. Follows re-exports."""
        file = self.ctx.file(path)
        graph = self.graph(file) if file is not None else None
        if file is None or graph is None or hops == 0:
            return None
        first, _, rest = name.partition(".")
        if first in graph["classes"] or first in graph["functions"]:
            return file, name
        origin = graph["imports"].get(first)
        if origin is None:
            return None
        module, _, attribute = origin.partition(":")
        module = self.absolute(path, module)
        if not attribute:  # import a.b [as c]
            full = f"{module}.{rest}" if rest else module
            return self._in_module(full, hops)
        found = self.module(f"{module}.{attribute}")
        if found is not None:
            return self.resolve(found.path, rest, hops - 1) if rest else (found, "")
        target = self.module(module)
        if target is None:
            return None
        return self.resolve(target.path, f"{attribute}.{rest}" if rest else attribute, hops - 1)

    def _in_module(self, full: str, hops: int) -> tuple[SourceFile, str] | None:
        parts = full.split(".")
        for cut in range(len(parts), 0, -1):
            target = self.module(".".join(parts[:cut]))
            if target is not None:
                rest = ".".join(parts[cut:])
                return self.resolve(target.path, rest, hops - 1) if rest else (target, "")
        return None

    def graph(self, file: SourceFile) -> Any:
        graph = self.ctx.graph(file)
        if graph is None:
            self.slice.unread.add(file.path)
        return graph

    # ---- classes

    def mro(self, path: str, name: str, hops: int = 6) -> list[tuple[SourceFile, str]]:
        """A class and what it inherits from, as far as it is in the install."""
        key = ("mro", path, name, hops)
        if key not in self.ctx.links:
            self.ctx.links[key] = self._find_mro(path, name, hops)
        found: list[tuple[SourceFile, str]] = self.ctx.links[key]
        return found

    def _find_mro(self, path: str, name: str, hops: int) -> list[tuple[SourceFile, str]]:
        found = self.resolve(path, name)
        if found is None or hops == 0:
            return []
        file, cls = found
        graph = self.graph(file)
        if graph is None or cls not in graph["classes"]:
            return []
        order = [(file, cls)]
        for base in graph["classes"][cls]["b"]:
            order += [c for c in self.mro(file.path, base, hops - 1) if c not in order]
        return order

    def method(self, path: str, cls: str, name: str) -> Key | None:
        for file, owner in self.mro(path, cls):
            if f"{owner}.{name}" in self.graph(file)["functions"]:
                return file.path, f"{owner}.{name}"
        return None

    def attribute(self, path: str, cls: str, name: str) -> list[tuple[str, str, list[str]]]:
        """(file, source text, conditions) of what a class binds self.<name> to."""
        found: list[tuple[str, str, list[str]]] = []
        for file, owner in self.mro(path, cls):
            for text, _, under in self.graph(file)["classes"][owner]["a"].get(name, ()):
                found.append((file.path, text, under))
        return found

    def constructed(self, path: str, text: str, tables: bool = True) -> list[tuple[SourceFile, str]]:
        """Classes that an expression constructs or names, those in a table of a module (``KINDS[name](...)``) too."""
        try:
            nodes = list(ast.walk(ast.parse(text, mode="eval")))
        except SyntaxError:
            return []
        found: list[tuple[SourceFile, str]] = []
        for node in nodes:
            target = node.func if isinstance(node, ast.Call) else node
            name = dotted(target)
            if name and not name.startswith("self."):
                where = self.resolve(path, name)
                if where is not None and where[1] and self._is_class(*where) and where not in found:
                    found.append(where)
                elif where is None and tables and isinstance(node, ast.Name):
                    place, held = self._table(path, name)
                    found += [c for c in self.constructed(place, held, False) if c not in found] if held else []
        return found

    def _table(self, path: str, name: str) -> tuple[str, str]:
        """(file, source text) of a dict or list that a module binds to this name, ("", "") for anything else."""
        file = self.ctx.file(path)
        graph = self.graph(file) if file is not None else None
        if graph is None:
            return "", ""
        if name not in graph["consts"]:
            module, _, name = graph["imports"].get(name, "").partition(":")
            file = self.module(self.absolute(path, module)) if name else None
            graph = self.graph(file) if file is not None else None
        text = str(graph["consts"].get(name, "")) if graph is not None else ""
        return (file.path, text) if file is not None and text[:1] in ("{", "[", "(") and text else ("", "")

    def _is_class(self, file: SourceFile, name: str) -> bool:
        graph = self.graph(file)
        return graph is not None and name in graph["classes"]

    # ---- conditions

    def off(self, key: Key, conditions: list[str]) -> str:
        if not conditions:
            return ""
        path, qual = key
        asked = ("off", path, qual, *conditions)
        if asked not in self.ctx.links:
            environment = self.ctx.tree.environment
            self.ctx.links[asked] = switched_off(conditions, lambda name: self._bound(path, qual, name), environment)
        return str(self.ctx.links[asked])

    def _bound(self, path: str, qual: str, name: str) -> str | None:
        """The source text that a name in a function is bound to, when it is bound once."""
        file = self.ctx.file(path)
        graph = self.ctx.graph(file) if file is not None else None
        if graph is None:
            return None
        if name.startswith("self.") and name.count(".") == 1:
            cls = qual.split(".")[0]
            values = self.attribute(path, cls, name[5:]) if cls in graph["classes"] else []
            return values[0][1] if len(values) == 1 else None
        first, _, rest = name.partition(".")
        if not rest and name in graph["consts"]:
            return str(graph["consts"][name])
        where = self.resolve(path, first) if first in graph["imports"] else None
        if where is not None and where[1] == "" and rest:
            inner = self.ctx.graph(where[0])
            if inner is not None:
                for key in (rest, f"environment_variables[{rest}]"):
                    if key in inner["consts"]:
                        return str(inner["consts"][key])
            return None
        origin = graph["imports"].get(first, "")
        module, _, attribute = origin.partition(":")
        target = self.module(self.absolute(path, module)) if attribute else None
        inner = self.ctx.graph(target) if target is not None else None
        return (
            str(inner["consts"][attribute]) if inner is not None and attribute in inner["consts"] and not rest else None
        )
