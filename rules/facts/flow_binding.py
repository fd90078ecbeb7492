"""Names and containers get values: assignment, updates, what an iteration hands out."""

from __future__ import annotations

import ast

from rules.facts.flow_graph import GraphFlow
from rules.facts.module import dotted
from rules.facts.naming import item_name, last_name, root_name
from rules.facts.values import NONE, D, Env, P, Value, Write


class BindingFlow(GraphFlow):
    """Binding of names, of elements, of loop variables."""

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
        if (
            isinstance(target, (ast.Tuple, ast.List))
            and isinstance(value, (ast.GeneratorExp, ast.ListComp))
            and len(value.generators) == 1
            and isinstance(items := value.generators[0].iter, (ast.Tuple, ast.List))
            and len(items.elts) == len(target.elts)
        ):  # a, b = (f(x) for x in (c, d))
            for part, item in zip(target.elts, items.elts, strict=True):
                inner = dict(env)
                self.bind(value.generators[0].target, self.expr(item, env), inner)
                self.bind(part, self.expr(value.elt, inner), env)
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
            name = dotted(target)
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
        elif isinstance(target, ast.Subscript) and item_name(target):
            name = item_name(target)
            env[name] = value
            self.writes.append(Write(name, "attr", target.lineno, self.loop, NONE, value, self._now(), NONE))
        elif isinstance(target, ast.Subscript):
            self._update(root_name(target), how, self._index(target.slice, env), value, NONE, target.lineno, env)

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

    def _bind_iteration(self, target: ast.expr, iterable: ast.expr, source: Value, env: Env) -> None:
        line = target.lineno
        loop = self.loops[self.loop]
        if isinstance(iterable, ast.Call):
            called = last_name(iterable.func)
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
                item = frozenset({self.add("iter", self.table(source, root_name(iterable.func)), line, (source, D))})
                loop.var |= key | item
                self.bind(target.elts[0], key, env)
                self.bind(target.elts[1], item, env)
                return
            if called in ("reversed", "list", "tuple", "sorted", "iter", "tqdm", "set", "items") and (
                iterable.args or called == "items"
            ):
                inner = iterable.args[0] if iterable.args else iterable.func
                if not isinstance(inner, ast.Call) or last_name(inner.func) not in ("range", "arange"):
                    value = frozenset({self.add("iter", self.table(source, root_name(inner)), line, (source, D))})
                    loop.var |= value
                    self.bind(target, value, env)
                    return
                self._bind_iteration(target, inner, source, env)
                return
        if source:
            value = frozenset({self.add("iter", self.table(source, root_name(iterable)), line, (source, D))})
        else:
            value = frozenset({self.add("affine", "iter", line)})
        loop.var |= value
        self.bind(target, value, env)
