"""Runs small decision functions of an install in three-valued logic: what would ``use_v2_model_runner`` say for
*this* configuration?

A verdict about a choice (which runner, which block to drop) must follow the code's own conditions, whatever their
order or names, so the functions are not matched but evaluated: on the standard ``ast``, over values that are known,
and ``Unknown`` for the rest. A test that can't be known counts as false ("the feature is off", as in a stock
deployment) and is written down in ``assumed``. Nothing of the install is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_STEPS = 20_000


@dataclass(frozen=True)
class Unknown:
    """A value that the configuration at hand doesn't fix; ``text`` says which."""

    text: str

    def __bool__(self) -> bool:
        raise TypeError(f"{self.text} is unknown")


@dataclass
class Thing:
    """An object of the configuration: its known attributes and its class's functions (name -> source, or a parsed
    function)."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)


class Refused(Exception):  # noqa: N818
    """The install's code raises here: ``line`` of the statement."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


class _Return(Exception):  # noqa: N818
    def __init__(self, value: Any, line: int) -> None:
        self.value = value
        self.line = line


@dataclass(frozen=True)
class _Bound:
    thing: Thing
    function: ast.FunctionDef


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "len": len,
    "bool": bool,
    "int": int,
    "str": str,
    "set": set,
    "frozenset": frozenset,
    "list": list,
    "tuple": tuple,
    "sum": sum,
    "any": any,
    "all": all,
    "min": min,
    "max": max,
    "sorted": sorted,
}
_PURE = {
    "append",
    "extend",
    "intersection",
    "union",
    "difference",
    "startswith",
    "endswith",
    "lower",
    "strip",
    "get",
    "join",
}


class Interpreter:
    """Evaluates expressions and functions over ``names`` (globals). ``assumed`` collects the tests that were taken as
    false, ``returned`` the line of the ``return`` that decided the outermost function last run."""

    def __init__(
        self, names: Mapping[str, Any], getenv: Callable[[str, Any], Any] = lambda name, default: default
    ) -> None:
        self.names = dict(names)
        self.assumed: list[str] = []
        self.returned = 0
        self._getenv = getenv
        self._steps = 0

    def expression(self, text: str, /, **local: Any) -> Any:
        """The value of one expression given as text."""
        return self._eval(ast.parse(text.strip(), mode="eval").body, dict(local))

    def run(self, function: ast.FunctionDef, thing: Thing | None = None, **arguments: Any) -> Any:
        """What a function returns (None when it falls off its end). Raises Refused when it raises."""
        local = dict(arguments)
        spelled = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        if thing is not None and spelled:
            local.setdefault(spelled[0], thing)
        for name in spelled:
            local.setdefault(name, Unknown(name))
        try:
            self._block(function.body, local)
        except _Return as done:
            self.returned = done.line
            return done.value
        self.returned = function.lineno
        return None

    def true(self, value: Any) -> bool:
        """Truth of a value; an unknown one counts as false and is written down."""
        if isinstance(value, Unknown):
            if value.text not in self.assumed:
                self.assumed.append(value.text)
            return False
        return True if isinstance(value, Thing) else bool(value)

    # -- statements
    # ------------------------------------------------------------------------------------------------------

    def _block(self, body: list[ast.stmt], local: dict[str, Any]) -> None:
        for node in body:
            self._statement(node, local)

    def _statement(self, node: ast.stmt, local: dict[str, Any]) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise Refused("too long to follow", node.lineno)
        match node:
            case ast.Return(value=value):
                raise _Return(None if value is None else self._eval(value, local), node.lineno)
            case ast.If(test=test, body=body, orelse=orelse):
                self._block(body if self.true(self._eval(test, local)) else orelse, local)
            case ast.Assign(targets=targets, value=value):
                result = self._eval(value, local)
                for target in targets:
                    self._assign(target, result, local)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, self._eval(value, local), local)
            case ast.AugAssign(target=ast.Name(id=name)):
                result = self._eval(ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value), local)
                local[name] = result
            case ast.Raise(exc=exc):
                raise Refused(self._message(exc, local), node.lineno)
            case ast.Expr(value=value):
                self._eval(value, local)
            case ast.For(target=target, iter=iterated, body=body):
                items = self._eval(iterated, local)
                for item in items if isinstance(items, (list, tuple, set, frozenset)) else ():
                    self._assign(target, item, local)
                    self._block(body, local)
            case ast.With(body=body) | ast.Try(body=body):
                self._block(body, local)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    name = (alias.asname or alias.name).split(".")[0]
                    local[name] = self.names.get(name, Unknown(name))
            case _:
                pass  # assert, pass, nested definitions: they decide nothing here

    def _assign(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            local[target.id] = value
        elif isinstance(target, ast.Attribute):
            thing = self._eval(target.value, local)
            if isinstance(thing, Thing):
                thing.values[target.attr] = value

    def _message(self, exc: ast.expr | None, local: dict[str, Any]) -> str:
        if isinstance(exc, ast.Call) and exc.args:
            value = self._eval(exc.args[0], local)
            return value.text if isinstance(value, Unknown) else str(value)
        return ast.unparse(exc) if exc is not None else "re-raised"

    # -- expressions
    # -----------------------------------------------------------------------------------------------------

    def _eval(self, node: ast.expr, local: dict[str, Any]) -> Any:
        try:
            return self._value(node, local)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            return Unknown(ast.unparse(node))

    def _value(self, node: ast.expr, local: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return local[name] if name in local else self.names.get(name, Unknown(name))
            case ast.Attribute(value=base, attr=attr):
                return self._attribute(self._eval(base, local), attr, ast.unparse(node))
            case ast.BoolOp(op=op, values=values):
                return self._bool(isinstance(op, ast.And), values, local)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._eval(operand, local)
                return Unknown(f"not {value.text}") if isinstance(value, Unknown) else not self.true(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._eval(operand, local)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compare([left, *others], ops, local, ast.unparse(node))
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](self._eval(left, local), self._eval(right, local))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._eval(body if self.true(self._eval(test, local)) else orelse, local)
            case ast.List(elts=elts):
                return [self._eval(e, local) for e in elts]
            case ast.Tuple(elts=elts):
                return tuple(self._eval(e, local) for e in elts)
            case ast.Set(elts=elts):
                return {self._eval(e, local) for e in elts}
            case ast.Dict(keys=keys, values=values):
                return {
                    self._eval(k, local): self._eval(v, local)
                    for k, v in zip(keys, values, strict=True)
                    if k is not None
                }
            case ast.JoinedStr(values=values):
                return "".join(self._formatted(v, local) for v in values)
            case ast.Subscript(value=base, slice=index):
                return self._eval(base, local)[self._eval(index, local)]
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                return self._comprehension(node, local)
            case ast.Call():
                return self._call(node, local)
            case ast.Lambda(body=body):
                return self._eval(
                    body, local
                )  # a lambda without arguments stands for its value (vLLM's table of variables)
        return Unknown(ast.unparse(node))

    def _attribute(self, base: Any, attr: str, text: str) -> Any:
        if isinstance(base, Unknown):
            return Unknown(f"{base.text}.{attr}")
        if isinstance(base, Thing):
            if attr in base.values:
                return base.values[attr]
            if attr in base.functions:
                function = base.functions[attr]
                decorators = {ast.unparse(d).split(".")[-1] for d in function.decorator_list}
                bound = _Bound(base, function)
                return self._run_quietly(bound, []) if decorators & {"property", "cached_property"} else bound
            return Unknown(f"{base.name}.{attr}")
        return getattr(base, attr) if attr in _PURE else Unknown(text)

    def _bool(self, is_and: bool, values: list[ast.expr], local: dict[str, Any]) -> Any:
        unknown: Unknown | None = None
        last: Any = is_and
        for node in values:
            last = self._eval(node, local)
            if isinstance(last, Unknown):
                unknown = unknown or last
            elif self.true(last) is not is_and:
                return last
        return unknown if unknown is not None else last

    def _compare(self, nodes: list[ast.expr], ops: list[ast.cmpop], local: dict[str, Any], text: str) -> Any:
        values = [self._eval(node, local) for node in nodes]
        for left, op, right in zip(values, ops, values[1:], strict=False):
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                return Unknown(text)
            if not _COMPARE[type(op)](left, right):
                return False
        return True

    def _formatted(self, node: ast.expr, local: dict[str, Any]) -> str:
        if isinstance(node, ast.FormattedValue):
            value = self._eval(node.value, local)
            return value.text if isinstance(value, Unknown) else str(value)
        return str(node.value) if isinstance(node, ast.Constant) else ""

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp, local: dict[str, Any]) -> Any:
        generator = node.generators[0]
        items = self._eval(generator.iter, local)
        if len(node.generators) > 1 or isinstance(items, (Unknown, Thing)):
            return Unknown(ast.unparse(node))
        found = []
        for item in items:
            inner = dict(local)
            self._assign(generator.target, item, inner)
            if all(self.true(self._eval(test, inner)) for test in generator.ifs):
                found.append(self._eval(node.elt, inner))
        return set(found) if isinstance(node, ast.SetComp) else found

    def _call(self, node: ast.Call, local: dict[str, Any]) -> Any:
        text = ast.unparse(node)
        name = ast.unparse(node.func)
        arguments = [self._eval(a, local) for a in node.args if not isinstance(a, ast.Starred)]
        if name in ("os.getenv", "os.environ.get", "getenv"):
            return self._getenv(arguments[0], arguments[1] if len(arguments) > 1 else None)
        if name == "getattr" and len(arguments) >= 2:
            base, attr = arguments[0], arguments[1]
            known = isinstance(base, Thing) and (attr in base.values or attr in base.functions)
            if known:
                return self._attribute(base, attr, text)
            if len(arguments) == 3 and isinstance(base, Thing):
                return arguments[2]
            return Unknown(text)
        if name.rsplit(".", 1)[-1].endswith("convert_bool"):
            return None if arguments[0] is None else bool(int(arguments[0]))
        function = self._eval(node.func, local)
        if isinstance(function, _Bound):
            return self._run_quietly(function, arguments)
        if isinstance(function, ast.FunctionDef):
            spelled = [a.arg for a in function.args.args]
            return self.run(function, **dict(zip(spelled, arguments, strict=False)))
        if isinstance(function, Unknown) and function.text in _BUILTINS:
            if any(isinstance(a, (Unknown, Thing)) for a in arguments):
                return Unknown(text)
            if name in ("any", "all") and any(isinstance(x, Unknown) for x in arguments[0]):
                return any(x is True for x in arguments[0]) if name == "any" else Unknown(text)
            return _BUILTINS[function.text](*arguments)
        if callable(function) and not isinstance(function, (Unknown, Thing)):
            if any(isinstance(a, Unknown) for a in arguments):
                return Unknown(text)
            return function(*arguments)
        return Unknown(text)

    def _run_quietly(self, bound: _Bound, arguments: list[Any]) -> Any:
        spelled = [a.arg for a in bound.function.args.args][1:]
        return self.run(bound.function, bound.thing, **dict(zip(spelled, arguments, strict=False)))
