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
from collections.abc import Callable

from rules.facts.flow_statements import StatementFlow
from rules.facts.module import Function, Module
from rules.facts.values import D, Env, Loop, TooLarge


class Flow(StatementFlow):
    """The graph of one function. ``resolve`` may supply functions of other files by their name here (cross-file
    helpers)."""

    def __init__(
        self,
        module: Module,
        function: Function,
        budget: int = 4000,
        resolve: Callable[[Module, str], tuple[Module, Function] | None] | None = None,
    ) -> None:
        super().__init__(module, budget, resolve)
        self.lines = (function.node.lineno, function.node.end_lineno or function.node.lineno)
        try:
            self._top(function)
        except (TooLarge, RecursionError):
            self.truncated = True

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
        self._left.append([])
        self.block(function.node.body, env)
        self.returned = frozenset().union(*self._returns[0])

    def _calls_itself(self, function: Function) -> bool:
        for node in self.module.nodes(function):
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
