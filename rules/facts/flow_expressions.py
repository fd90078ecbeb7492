"""Expressions: operators, subscripts, attributes, comprehensions."""

from __future__ import annotations

import ast
from typing import Any

from rules.facts.flow_calls import CallFlow
from rules.facts.module import dotted
from rules.facts.naming import item_name, root_name
from rules.facts.values import NONE, D, Env, I, L, Loop, P, Value
from rules.facts.verbs import LIBRARIES, META, OPERATORS, SAME_VALUE


class ExpressionFlow(CallFlow):
    """The value of each kind of expression."""

    def expr(self, node: Any, env: Env) -> Value:
        kind = type(node)
        if node is None or kind is ast.Constant:
            return NONE
        if kind is ast.Name:
            name = node.id
            found = env.get(name)
            if found is not None:
                return found
            if name in self.module.top or name in ("True", "False", "None") or name in LIBRARIES:
                return NONE
            return frozenset({self.root(name, "const" if self._is_constant(name) else "root")})
        if kind is ast.Attribute:
            return self._attribute(node, env)
        if kind is ast.Call:
            return self._call(node, env)
        match node:
            case ast.Subscript():
                if (held := env.get(item_name(node))) is not None:
                    return held
                base = self.expr(node.value, env)
                if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                    return self._field(base, dotted(node.value), node.slice.value, node.lineno)
                index = self._index(node.slice, env)
                if not index:
                    return base
                table = self.table(base, root_name(node.value))
                window = isinstance(
                    node.slice, ast.Slice
                )  # several places at once: something to compare, nowhere to go
                return frozenset({self.add("window" if window else "read", table, node.lineno, (base, D), (index, I))})
            case ast.BinOp():
                left, right = self.expr(node.left, env), self.expr(node.right, env)
                op = OPERATORS.get(type(node.op), "?")
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

    def _attribute(self, node: ast.Attribute, env: Env) -> Value:
        name = dotted(node)
        if name and name in env:
            return env[name]
        if node.attr in META:
            made = self.expr(node.value, env)
            return (
                frozenset({self.add("len", "size", node.lineno, (made, L))}) if node.attr == "size" and made else NONE
            )
        base = self.expr(node.value, env)
        if node.attr in self.module.properties:
            call = ast.Call(node, [], [], lineno=node.lineno, col_offset=0)
            computed = self._inline(call, node, node.attr, base, env)
            if computed is not None:
                return computed
        if node.attr in SAME_VALUE:
            return base
        return self._field(base, dotted(node.value), node.attr, node.lineno)

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
