"""Who calls whom in one file, and under which conditions: made only for the files that a slice visits.

One fact: {"imports": {name: "module:attr"}, "classes": {name: {"l", "b": bases, "a": {attribute: [values]}}},
"consts": {name: expression},
"functions": {qual: {"l", "e", "p": parameters, "d": {parameter: default}, "c": [[callee, line, [conditions]]], "r":
[[name, line,
[conditions]]], "o": [ops], "x": [executed strings], "n": calls}}}. Expressions and conditions are source text; a
condition that must be
false starts with "!". The module's own statements are the function ""."""

from __future__ import annotations

import ast
from typing import Any

from rules.facts.module import FunctionNode, dotted, imported_module, parse

_KEEP_TEXT = 120
_ASKS = frozenset({"isinstance", "issubclass", "cast", "typing.cast", "hasattr", "TypeVar"})


def extract(path: str, source: bytes) -> list[dict[str, Any]]:
    tree = parse(source)
    reader = _Reader()
    reader.body(tree.body, "", "", [])
    reader.forget()
    return [
        {"imports": reader.imports, "classes": reader.classes, "consts": reader.consts, "functions": reader.functions}
    ]


class _Reader:
    def __init__(self) -> None:
        self.imports: dict[str, str] = {}
        self.classes: dict[str, dict[str, Any]] = {}
        self.consts: dict[str, str] = {}
        self.functions: dict[str, dict[str, Any]] = {}
        self._tells: dict[tuple[str, str], bool] = {}
        self._new_function("", 1, 1)

    def forget(self) -> None:
        """Drop what leads nowhere: calls and references of builtins and plain local names."""
        tops = {name.split(".")[0] for name in self.functions if name}
        for qual, function in self.functions.items():
            nested = {name[len(qual) + 1 :] for name in self.functions if qual and name.startswith(qual + ".")}

            def known(name: str, nested: set[str] = nested) -> bool:
                first = name.split(".")[0]
                return (
                    first in self.imports
                    or first in self.classes
                    or first in tops
                    or first in nested
                    or first in ("self", "cls", "super")
                )

            calls: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
            for name, line, under in function["c"]:
                under = self._telling(under, qual)
                if not known(name):
                    name = f"?.{name.rsplit('.', 1)[-1]}" if "." in name else ""
                if name:
                    calls.setdefault((name, tuple(under)), [name, line, under])
            refs: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
            for name, line, under in function["r"]:
                under = self._telling(under, qual)
                if name.startswith("'") or (known(name) and name not in ("self", "cls", "super")):
                    refs.setdefault((name, tuple(under)), [name, line, under])
            function["c"], function["r"] = list(calls.values()), list(refs.values())
            function["o"] = sorted(set(function["o"]))
            for key in [k for k, v in function.items() if v in ([], {}) and k not in ("c", "r")]:
                del function[key]

    def _telling(self, conditions: list[str], qual: str) -> list[str]:
        """The conditions that could be settled without running: those on constants, the environment, and attributes
        bound once."""
        return [c for c in conditions if self._could_tell(c, qual)]

    def _could_tell(self, condition: str, qual: str) -> bool:
        key = (condition, qual.split(".")[0])
        if key not in self._tells:
            try:
                nodes = list(ast.walk(ast.parse(condition.removeprefix("!"), mode="eval")))
            except SyntaxError:
                nodes = []
            attributes = self.classes.get(key[1], {}).get("a", {})
            self._tells[key] = (
                "environ" in condition
                or "getenv" in condition
                or any(
                    (isinstance(n, ast.Name) and (n.id in self.consts or n.id in self.imports))
                    or (
                        isinstance(n, ast.Attribute)
                        and dotted(n).startswith("self.")
                        and len(attributes.get(n.attr, ())) == 1
                    )
                    for n in nodes
                )
                or (len(nodes) == 2 and isinstance(nodes[1], ast.Constant))
            )
        return self._tells[key]

    def _new_function(self, qual: str, line: int, end: int) -> dict[str, Any]:
        return self.functions.setdefault(
            qual, {"l": line, "e": end, "p": [], "d": {}, "c": [], "r": [], "o": [], "x": []}
        )

    def body(self, statements: list[ast.stmt], qual: str, owner: str, under: list[str]) -> None:
        under = list(under)
        for node in statements:
            self.statement(node, qual, owner, under)
            if isinstance(node, ast.If):  # what comes after a branch that leaves stands under the other condition
                if _leaves(node.body):
                    under.append("!" + _text(node.test))
                elif _leaves(node.orelse):
                    under.append(_text(node.test))

    def statement(self, node: ast.stmt, qual: str, owner: str, under: list[str]) -> None:
        here = self.functions.get(qual, self.functions[""])
        match node:
            case ast.Import():
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    ) + ":"
            case ast.ImportFrom():
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}:{alias.name}"
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, qual, owner, under)
            case ast.ClassDef():
                info = self.classes.setdefault(node.name, {"l": node.lineno, "b": [], "a": {}})
                info["b"] = [b for b in map(dotted, node.bases) if b]
                inner = node.name
                for statement in node.body:
                    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                        info["a"].setdefault(statement.targets[0].id, []).append(
                            [_text(statement.value), statement.lineno, under]
                        )
                    elif (
                        isinstance(statement, ast.AnnAssign)
                        and isinstance(statement.target, ast.Name)
                        and statement.value
                    ):
                        info["a"].setdefault(statement.target.id, []).append(
                            [_text(statement.value), statement.lineno, under]
                        )
                for statement in node.body:
                    self.statement(statement, qual if not isinstance(statement, FunctionNode) else inner, inner, under)
            case ast.If():
                self._expression(node.test, here, under)
                self.body(node.body, qual, owner, [*under, _text(node.test)])
                self.body(node.orelse, qual, owner, [*under, "!" + _text(node.test)])
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if node.value is not None:
                    for target in targets:
                        self._assigned(target, node.value, qual, owner, node.lineno, under)
                    self._expression(node.value, here, under)
                for target in targets:
                    self._expression(target, here, under)
            case ast.For() | ast.AsyncFor() | ast.While() | ast.With() | ast.AsyncWith() | ast.Try() | ast.Match():
                for name, value in ast.iter_fields(node):
                    if name in ("body", "orelse", "finalbody"):
                        self.body(value, qual, owner, under)
                    elif name == "handlers":
                        for handler in value:
                            self.body(handler.body, qual, owner, under)
                    elif name == "cases":
                        for case in value:
                            self.body(case.body, qual, owner, under)
                    elif isinstance(value, ast.AST):
                        self._expression(value, here, under)
                    elif isinstance(value, list):
                        for item in value:
                            self._expression(item, here, under)
            case _:
                self._expression(node, here, under)

    def _function(self, node: FunctionNode, qual: str, owner: str, under: list[str]) -> None:
        name = f"{qual}.{node.name}" if qual else node.name
        outer = self.functions.get(qual, self.functions[""])
        for decorator in node.decorator_list:
            self._expression(decorator, self._new_function(name, node.lineno, node.end_lineno or node.lineno), [])
        here = self._new_function(name, node.lineno, node.end_lineno or node.lineno)
        a = node.args
        positional = [*a.posonlyargs, *a.args]
        here["p"] = [p.arg for p in [*positional, *a.kwonlyargs]]
        for parameter, default in zip(reversed(positional), reversed(a.defaults), strict=False):
            here["d"][parameter.arg] = _text(default)
        for parameter, value in zip(a.kwonlyargs, a.kw_defaults, strict=True):
            if value is not None:
                here["d"][parameter.arg] = _text(value)
        if qual and qual not in self.classes:
            outer["r"].append(
                [name, node.lineno, list(under)]
            )  # a nested function runs where its outer function uses it
        self.body(node.body, name, owner, [])

    def _assigned(self, target: ast.expr, value: ast.expr, qual: str, owner: str, line: int, under: list[str]) -> None:
        if isinstance(target, ast.Tuple):
            for part in target.elts:
                self._assigned(part, value, qual, owner, line, under)
            return
        loaded = imported_module(value)
        if loaded and isinstance(target, ast.Name):
            self.imports[target.id] = f"{loaded}:"
        if isinstance(target, ast.Name) and qual == "" and len(_text(value)) < _KEEP_TEXT:
            self.consts[target.id] = _text(value)
        if (isinstance(target, ast.Name) and target.id == "environment_variables") or (
            isinstance(target, ast.Name) and qual == "" and isinstance(value, ast.Dict)
        ):
            for key, item in zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(item, ast.Lambda):
                    self.consts[f"{target.id}[{key.value}]"] = _text(item.body)
        name = dotted(target)
        if name.startswith("self.") and name.count(".") == 1 and owner:
            self.classes.setdefault(owner, {"l": line, "b": [], "a": {}})["a"].setdefault(name[5:], []).append(
                [_text(value), line, under]
            )
        elif name and "." in name and not name.startswith("self."):
            self.functions[qual].setdefault("s", []).append([name, _text(value), line, under])

    def _expression(self, node: ast.AST, here: dict[str, Any], under: list[str]) -> None:
        called: set[int] = set()
        conditions = list(under)
        for sub in ast.walk(node):
            if isinstance(sub, ast.Call) and dotted(sub.func) in _ASKS:  # naming a class to ask about it doesn't run it
                called.update(
                    id(part)
                    for argument in sub.args
                    for part in ast.walk(argument)
                    if isinstance(part, (ast.Name, ast.Attribute))
                )
                continue
            if isinstance(sub, ast.Call):
                func: ast.AST = sub.func
                while isinstance(func, ast.Subscript):
                    func = func.value
                name = dotted(func)
                called.add(id(func))
                if name in ("exec", "eval", "compile") and sub.args and not isinstance(sub.args[0], ast.Constant):
                    here["x"].append(sub.lineno)
                if name == "setattr" and len(sub.args) == 3 and isinstance(sub.args[1], ast.Constant):
                    here.setdefault("s", []).append(
                        [f"{dotted(sub.args[0])}.{sub.args[1].value!s}", _text(sub.args[2]), sub.lineno, conditions]
                    )
                if not name and isinstance(func, ast.Attribute):
                    inner = func.value
                    if isinstance(inner, ast.Call) and dotted(inner.func) == "super":
                        name = f"super.{func.attr}"
                    else:
                        name = f"?.{func.attr}"
                if name.startswith("torch.ops."):
                    here["o"].append(".".join(name.split(".")[2:4]))
                elif name:
                    here["c"].append([name, sub.lineno, conditions])
            elif isinstance(sub, ast.Attribute) and id(sub) not in called:
                name = dotted(sub)
                if name.startswith("torch.ops.") and name.count(".") >= 3:
                    here["o"].append(".".join(name.split(".")[2:4]))
                elif name.startswith("self.") and name.count(".") == 1:
                    here["r"].append([name, sub.lineno, conditions])
            elif isinstance(sub, ast.Name) and id(sub) not in called and isinstance(sub.ctx, ast.Load):
                here["r"].append([sub.id, sub.lineno, conditions])
            elif isinstance(sub, ast.Constant) and isinstance(sub.value, str) and 8 < len(sub.value) < 160:
                text = sub.value
                if text.count(".") >= 2 and text.replace(".", "").replace("_", "").replace(":", "").isalnum():
                    here["r"].append(["'" + text, sub.lineno, conditions])


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 400 else text[:400] + "…"
