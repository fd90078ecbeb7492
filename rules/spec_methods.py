"""The speculative methods that the configuration accepts, as its code declares them: the ``Literal`` of the field
``method``, with the aliases in it resolved. A method named here is a name that parses, no more: whether a runner
implements it is another question (``dflash-support`` for dflash)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reports.model import Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import tree_of
from rules.recheck import Recheck

ID = "spec-methods"
QUESTION = "Which speculative methods does the configuration accept?"
CHANGES_IF = (
    "the Literal of the field `method` (or an alias in it) is edited, or a plugin replaces the configuration class"
)
NEEDLES = (b"Literal[",)
_FIELD = "method"


def extract(path: str, source: bytes) -> list[Fact]:
    return literal_fields(source, _FIELD) if b"peculative" in source else []


def literal_fields(source: bytes, field: str) -> list[Fact]:
    """Every class field of that name whose annotation is a Literal (or an alias of one) of strings, in a class about
    speculation: its values in order, each with the line that spells it and the alias that it comes through, and the
    field's default."""
    tree = tree_of(source)
    aliases = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }

    def values(node: ast.AST, through: str, depth: int = 0) -> Iterator[tuple[str, int, str]]:
        if depth > 30:  # an alias that names itself
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno, through
        elif isinstance(node, ast.Name) and node.id in aliases:
            yield from values(aliases[node.id], node.id, depth + 1)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in (
            "Literal",
            "Optional",
            "Union",
        ):
            yield from values(node.slice, through, depth + 1)
        elif isinstance(node, ast.Tuple):
            for element in node.elts:
                yield from values(element, through, depth + 1)
        elif isinstance(node, ast.BinOp):
            yield from values(node.left, through, depth + 1)
            yield from values(node.right, through, depth + 1)

    found: list[Fact] = []
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef) or "peculative" not in owner.name:
            continue
        for item in owner.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == field:
                spelled = list(dict.fromkeys(values(item.annotation, "")))
                if spelled:
                    default = item.value.value if isinstance(item.value, ast.Constant) else None
                    found.append(
                        {
                            "kind": "field",
                            "symbol": f"{owner.name}.{field}",
                            "line": item.lineno,
                            "end_line": item.end_lineno or item.lineno,
                            "default": default,
                            "values": [list(value) for value in spelled],
                        }
                    )
    return found


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    fields = [(file, fact) for file, facts in ctx.facts(ID) for fact in facts]
    if not fields:
        why = "no class about speculation has a field `method` with a Literal type"
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    items, evidence, check = [], [], Recheck(ctx)
    for file, fact in fields:
        lines = sorted({line for _, line, _ in fact["values"]})
        evidence.append(ctx.evidence(file, lines[0], lines[-1], fact["symbol"]))
        evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
        check.lines(file, lines[0], lines[-1]).lines(file, fact["line"], fact["end_line"])
        items += [
            {"method": v, "file": file.path, "line": line, "alias": through} for v, line, through in fact["values"]
        ]
    names = [str(item["method"]) for item in items]
    plain = [n for n in names if not n.endswith("_mtp")]
    mtp = len(names) - len(plain)
    summary = ", ".join(plain) + (f", and {mtp} model-specific *_mtp names" if mtp else "")
    return Verdict(
        ID,
        "yes",
        summary,
        evidence=tuple(evidence),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=tuple(items),
        **check.done(),
    )


_CLASS = "from typing import Literal\n{0}\nclass SpeculativeConfig:\n    method: {1} = None\n"


def _one(before: str, annotation: str) -> dict[str, str]:
    return {"vllm/config/speculative.py": _CLASS.format(before, annotation)}


VALID = (
    Example("one Literal", _one("", 'Literal["ngram", "eagle"] | None'), "yes", items=2),
    Example(
        "aliases within aliases",
        _one('A = Literal["x_mtp"]\nB = Literal["eagle", A]\nM = Literal["ngram", B]', "M | None"),
        "yes",
        items=3,
    ),
    Example(
        "Optional, and a name twice", _one('M = Literal["ngram", "ngram", "ddtree"]', "Optional[M]"), "yes", items=2
    ),
)
INVALID = (
    Example("any string", _one("", "str"), "unknown"),
    Example(
        "a Literal of another class",
        {"vllm/config/a.py": 'class SpeculativeThing:\n    other: Literal["a"]\n'},
        "unknown",
    ),
    Example("no configuration", {"vllm/a.py": "M = Literal['ngram']  # Speculative\n"}, "unknown"),
)
