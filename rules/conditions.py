"""Whether a condition in the code is false as shipped: constants, environment variables and their defaults. Unknown
is None."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

#: Asks for the source text that a name or an attribute is bound to, None when it isn't known.
Lookup = Callable[[str], "str | None"]
UNKNOWN = object()
_FALSE = ("", "0", "false", "no", "off", "none")


def switched_off(conditions: list[str], lookup: Lookup, environment: Mapping[str, str]) -> str:
    """The first of these conditions that is false as shipped (as text), or "". One that starts with "!" must be
    false to get there."""
    for condition in conditions:
        negated = condition.startswith("!")
        value = evaluate(condition.removeprefix("!"), lookup, environment)
        if value is not UNKNOWN and bool(value) == negated:
            return condition.removeprefix("!") if not negated else f"not ({condition[1:]})"
    return ""


def evaluate(text: str, lookup: Lookup, environment: Mapping[str, str], depth: int = 6) -> Any:
    """The value of an expression as far as it is fixed by constants and the environment, UNKNOWN otherwise."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return UNKNOWN
    return _value(node, lookup, environment, depth)


def _value(node: ast.expr, lookup: Lookup, env: Mapping[str, str], depth: int) -> Any:
    if depth <= 0:
        return UNKNOWN
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.Not()):
            value = _value(node.operand, lookup, env, depth)
            return UNKNOWN if value is UNKNOWN else not value
        case ast.BoolOp():
            values = [_value(v, lookup, env, depth) for v in node.values]
            stop = isinstance(node.op, ast.Or)
            known = [v for v in values if v is not UNKNOWN]
            if any(bool(v) == stop for v in known):
                return stop
            return UNKNOWN if len(known) < len(values) else (known[-1] if known else UNKNOWN)
        case ast.Compare(ops=[op]) if len(node.comparators) == 1:
            left, right = _value(node.left, lookup, env, depth), _value(node.comparators[0], lookup, env, depth)
            if isinstance(op, (ast.In, ast.NotIn)) and _name(node.comparators[0]).endswith("environ"):
                return UNKNOWN if left is UNKNOWN else (left in env) == isinstance(op, ast.In)
            if left is UNKNOWN or right is UNKNOWN:
                return UNKNOWN
            return _compare(op, left, right)
        case ast.Tuple() | ast.List() | ast.Set():
            values = [_value(v, lookup, env, depth) for v in node.elts]
            return UNKNOWN if any(v is UNKNOWN for v in values) else values
        case ast.IfExp():
            test = _value(node.test, lookup, env, depth)
            return UNKNOWN if test is UNKNOWN else _value(node.body if test else node.orelse, lookup, env, depth)
        case ast.Subscript() if _name(node.value).endswith("environ"):
            key = _value(node.slice, lookup, env, depth)
            return env.get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
        case ast.Call():
            return _call(node, lookup, env, depth)
        case ast.Name() | ast.Attribute():
            name = _name(node)
            text = lookup(name) if name else None
            if text is None:
                return UNKNOWN
            return evaluate(text, lookup, env, depth - 1)
    return UNKNOWN


def _call(node: ast.Call, lookup: Lookup, env: Mapping[str, str], depth: int) -> Any:
    name = _name(node.func)
    args = [_value(a, lookup, env, depth) for a in node.args]
    if name.endswith(("getenv", "environ.get")) and args and isinstance(args[0], str):
        return env.get(args[0], args[1] if len(args) > 1 else None)
    if name in ("int", "bool", "float", "str") and len(args) == 1 and args[0] is not UNKNOWN:
        try:
            return {"int": int, "bool": bool, "float": float, "str": str}[name](args[0])
        except (TypeError, ValueError):
            return UNKNOWN
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("lower", "upper", "strip") and not node.args:
        value = _value(node.func.value, lookup, env, depth)
        return getattr(value, node.func.attr)() if isinstance(value, str) else UNKNOWN
    if name in ("strtobool", "_bool", "env_flag") and args and isinstance(args[0], str):
        return args[0].lower() not in _FALSE
    return UNKNOWN


def _compare(op: ast.cmpop, left: Any, right: Any) -> Any:
    try:
        match op:
            case ast.Eq() | ast.Is():
                return left == right
            case ast.NotEq() | ast.IsNot():
                return left != right
            case ast.In():
                return left in right
            case ast.NotIn():
                return left not in right
            case ast.Gt():
                return left > right
            case ast.GtE():
                return left >= right
            case ast.Lt():
                return left < right
            case ast.LtE():
                return left <= right
    except TypeError:
        return UNKNOWN
    return UNKNOWN


def _name(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
