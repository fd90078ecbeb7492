"""Functions entered where they are called: helpers of the file, lambdas, recursion, ``reduce`` and ``map``."""

from __future__ import annotations

import ast

from rules.facts.flow_binding import BindingFlow
from rules.facts.module import Function, dotted
from rules.facts.naming import last_name
from rules.facts.values import NONE, D, Env, Loop, P, Value


class InliningFlow(BindingFlow):
    """Calls of functions whose body is known."""

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
            elif isinstance(func.value, ast.Call) and last_name(func.value.func) == "super":
                function, bound = (
                    next(filter(None, (module.method(b, name) for b in module.bases.get(owner, ()))), None),
                    True,
                )
            elif name in module.by_method and len(module.by_method[name]) == 1 and recv:
                function, bound = module.by_method[name][0], True
        elif isinstance(func, ast.Subscript):  # a kernel launch: kernel[grid](...)
            function = module.top.get(last_name(func.value)) if self.loop >= 0 else None
        if function is None and self._resolve is not None:
            full = dotted(func.value if isinstance(func, ast.Subscript) else func)
            found = self._resolve(module, full) if full.split(".")[0] in module.imports else None
            if found is not None:
                module, function = found
                bound = False
        if function is None:
            return None
        for recursive, params in self._self_calls:
            if recursive.node is function.node:
                return self._recurse(node, function, params, bound, env)
        if len(self._stack) > 3 or function in self._stack or len(module.nodes(function)) > 300:
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
        self._left.append([])
        under, self.under = self.under, self.under[-2:]
        depth = self.loop
        try:
            self.block(function.node.body, inner)
        finally:
            self.loop, self.under, self.module = depth, under, saved
            self._stack.pop()
            self._nested.pop()
            returned = self._returns.pop()
            left = self._left.pop()
        for attribute, held in inner.items():
            if attribute.startswith("self."):
                env[attribute] = held.union(*(e.get(attribute, NONE) for e in left))
        for attribute in {n for e in left for n in e if n not in inner}:
            env[attribute] = frozenset().union(*(e.get(attribute, NONE) for e in left))
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
