"""The few functions of a file that a history rule matches on, cut out before libcst sees them.

libcst with positions costs about 5 s per MB and the runner alone is 0.3 MB, so the standard ``ast`` finds the
functions (by the bytes they hold) and libcst parses those lines only. Line numbers stay those of the file.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rules.facts.module import read_module

if TYPE_CHECKING:
    import libcst as cst

Lines = Callable[["cst.CSTNode"], tuple[int, int]]


@dataclass(frozen=True)
class Part:
    """One outermost function or method: ``line`` to ``end_line`` (decorators included) of its file."""

    name: str
    owner: str  # the class it is a method of, or ""
    line: int
    end_line: int
    text: str

    @property
    def symbol(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def tree_of(source: bytes) -> ast.Module:
    """The file as Python's own ``ast``, shared with stage 1. Raises SyntaxError or ValueError."""
    return read_module(source).tree


@lru_cache(maxsize=8)
def parts(source: bytes) -> tuple[Part, ...]:
    """Every outermost function of a file, methods of (nested) classes included; functions within functions belong to
    the outer one."""
    lines = source.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")

    def within(body: list[ast.stmt], owner: str) -> Iterator[Part]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                last = node.end_lineno or node.lineno
                yield Part(node.name, owner, first, last, "\n".join(lines[first - 1 : last]) + "\n")
            elif isinstance(node, ast.ClassDef):
                yield from within(node.body, node.name)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                for inner in ("body", "orelse", "finalbody"):
                    yield from within(getattr(node, inner, []), owner)

    return tuple(within(tree_of(source).body, ""))


def holding(source: bytes, *words: str) -> list[Part]:
    """The functions whose text holds every one of ``words``."""
    return [part for part in parts(source) if all(word in part.text for word in words)]


def parse(part: Part) -> tuple[cst.FunctionDef, Lines]:
    """The function in libcst, and the first and last line in its file of any node under it."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider

    indented = part.text[:1] in " \t"
    wrapper = MetadataWrapper(cst.parse_module(("if 1:\n" if indented else "") + part.text), unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    shift = part.line - (2 if indented else 1)
    top = wrapper.module.body[0]
    found = top.body.body[0] if isinstance(top, cst.If) else top
    assert isinstance(found, cst.FunctionDef)

    def lines(node: cst.CSTNode) -> tuple[int, int]:
        place = positions[node]
        return place.start.line + shift, place.end.line + shift

    return found, lines


def text_of(node: cst.CSTNode) -> str:
    """Source text of one libcst node, on one line."""
    import libcst as cst

    return " ".join(cst.Module(body=[]).code_for_node(node).split())


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all under it (several times faster than ``matchers.findall``, which visits)."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        todo += node.children


def names_in(node: cst.CSTNode) -> set[str]:
    """Every plain name and attribute name that occurs under a libcst node."""
    import libcst as cst

    return {found.value for found in walk(node) if isinstance(found, cst.Name)}


def strings_in(node: cst.CSTNode) -> set[str]:
    """Every plain string literal under a libcst node."""
    import libcst as cst

    return {str(found.evaluated_value) for found in walk(node) if isinstance(found, cst.SimpleString)}


def place(part: Part, kind: str, lines: tuple[int, int] | None = None, **more: Any) -> dict[str, Any]:
    """A fact about one place: the part's own lines unless ``lines`` are given."""
    first, last = lines or (part.line, part.end_line)
    return {"kind": kind, "symbol": part.symbol, "line": first, "end_line": last, **more}


def guards(function: cst.FunctionDef, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The tests of every ``if``, ``elif`` and conditional expression that ``node`` stands under, outermost first."""
    return _tests(function).get(id(node), [])


def influences(function: cst.FunctionDef, nodes: list[cst.CSTNode]) -> set[str]:
    """Names and string literals that decide the value of ``nodes``: their own, then those of whatever was assigned to
    these names in the function and of the tests around these assignments."""
    sources = _sources(function)
    known: set[str] = set()
    todo: set[str] = set().union(*(names_in(n) | strings_in(n) for n in nodes)) if nodes else set()
    while todo:
        known |= todo
        todo = set().union(*(sources.get(name, set()) for name in todo)) - known
    return known


# One function is asked many times in a row; its tree is alive as long as it is the key.
@lru_cache(maxsize=4)
def _tests(function: cst.FunctionDef) -> dict[int, list[cst.BaseExpression]]:
    import libcst as cst

    found: dict[int, list[cst.BaseExpression]] = {}
    todo: list[tuple[cst.CSTNode, list[cst.BaseExpression]]] = [(function, [])]
    while todo:
        node, tests = todo.pop()
        found[id(node)] = tests
        inner = [*tests, node.test] if isinstance(node, (cst.If, cst.IfExp)) else tests
        todo += [(child, tests if inner is not tests and child is node.test else inner) for child in node.children]  # type: ignore[attr-defined]
    return found


@lru_cache(maxsize=4)
def _sources(function: cst.FunctionDef) -> dict[str, set[str]]:
    """local name -> names and strings of what is assigned to it, and of the tests around."""
    import libcst as cst
    import libcst.matchers as m

    sources: dict[str, set[str]] = {}
    for assign in m.findall(function, m.OneOf(m.Assign(), m.AnnAssign(), m.NamedExpr(), m.For())):
        if isinstance(assign, cst.Assign):
            targets: list[cst.CSTNode] = [t.target for t in assign.targets]
            value: cst.CSTNode | None = assign.value
        else:
            targets = [assign.target]  # type: ignore[attr-defined]
            value = assign.iter if isinstance(assign, cst.For) else assign.value  # type: ignore[attr-defined]
        names = [target.value for target in targets if isinstance(target, cst.Name)]
        if value is None or not names:
            continue
        says = names_in(value) | strings_in(value)
        for test in guards(function, assign):
            says |= names_in(test) | strings_in(test)
        for name in names:
            sources.setdefault(name, set()).update(says)
    return sources
