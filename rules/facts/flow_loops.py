"""Loops: every name that a body assigns is a value that one round hands to the next."""

from __future__ import annotations

import ast
from typing import Any

from rules.facts.flow_expressions import ExpressionFlow
from rules.facts.module import dotted
from rules.facts.naming import item_name, root_name
from rules.facts.values import NONE, D, Env, Loop, P
from rules.facts.verbs import ADD, POP, STORE


class LoopFlow(ExpressionFlow):
    """Loops and the ways out of them."""

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
                names[dotted(node)] = None
            elif kind is ast.Subscript and isinstance(node.ctx, ast.Store):
                names[item_name(node) or root_name(node)] = None
            elif kind is ast.Call:
                func = node.func
                if isinstance(func, ast.Attribute):
                    attr = func.attr
                    if isinstance(func.value, ast.Name) and func.value.id == "self":
                        names.update(dict.fromkeys(self._set_by(attr)))
                    elif len(own := self.module.by_method.get(attr, [])) == 1:
                        names.update(dict.fromkeys(self._set_by(attr, owner=own[0].owner)))
                    if attr in ADD or attr in POP or (attr.endswith("_") and not attr.endswith("__")):
                        names[root_name(func.value)] = None
                    if (attr in STORE or attr.startswith("atomic_") or attr in ("heappush", "heappop")) and node.args:
                        names[root_name(node.args[0])] = None
                elif isinstance(func, ast.Name):
                    called.append(func.id)
                    if func.id in ("heappush", "heappop", "setattr") and node.args:
                        names[root_name(node.args[0])] = None
        for scope in self._nested:
            for name in called:
                if name in scope:
                    inner = scope[name][0]
                    for node in self.module.nodes(inner):
                        if isinstance(node, ast.Nonlocal):
                            names.update(dict.fromkeys(node.names))
        names.pop("", None)
        return list(names)

    def _set_by(self, method: str, hops: int = 2, owner: str = "") -> list[str]:
        """Attributes of self that a method of the same class (or of ``owner``) sets."""
        owner = owner or next((f.owner for f in reversed(self._stack) if f.owner), "")
        function = self.module.method(owner, method)
        if function is None or function in self._stack:
            return []
        names: list[str] = []
        for node in self.module.nodes(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                if isinstance(node.ctx, ast.Store):
                    names.append(f"self.{node.attr}")
            elif (
                isinstance(node, ast.Call)
                and hops
                and isinstance(node.func, ast.Attribute)
                and dotted(node.func).startswith("self.")
            ):
                names += self._set_by(node.func.attr, hops - 1, owner)
        return names
