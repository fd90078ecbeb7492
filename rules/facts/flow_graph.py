"""The graph itself: nodes added within a budget, names from outside, what is chosen at the moment."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from rules.facts.module import Function, Module
from rules.facts.values import NONE, C, D, Env, Loop, Node, P, TooLarge, Value, Write
from rules.facts.verbs import BUILTINS


class GraphFlow:
    """Nodes, and what every part of the flow asks of them. ``resolve``: functions of other files by name."""

    def __init__(
        self,
        module: Module,
        budget: int,
        resolve: Callable[[Module, str], tuple[Module, Function] | None] | None,
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
        self._left: list[list[Env]] = []  # attributes of self where a function returns
        self._self_calls: list[tuple[Function, dict[str, set[int]]]] = []
        self.truncated = False
        self.returned: Value = NONE

    def expr(self, node: Any, env: Env) -> Value:
        """The value of an expression (``ExpressionFlow``)."""
        raise NotImplementedError

    def block(self, body: list[ast.stmt], env: Env) -> bool:
        """Runs statements; True when control never gets past them (``StatementFlow``)."""
        raise NotImplementedError

    def add(
        self, kind: str, name: str, line: int, *edges: tuple[Value, int], left: Value = NONE, right: Value = NONE
    ) -> int:
        if len(self.nodes) >= self._budget:
            raise TooLarge
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

    def _now(self) -> Value:
        return frozenset().union(*self.under[-6:]) if self.under else NONE

    def _chosen(self, value: Value, line: int) -> Value:
        under = self._now()
        return frozenset({self.add("sel", "return", line, (value, D), (under, P))}) if value and under else value

    def _cmp(self, op: str, left: Value, right: Value, line: int) -> Value:
        if not left and not right:
            return NONE
        return frozenset({self.add("cmp", op, line, (left, C), (right, C), left=left, right=right)})

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
            or name in BUILTINS
        )
