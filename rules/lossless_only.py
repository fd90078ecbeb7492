"""Speculation is lossless when the output distribution is the target's own. Some acceptance methods aren't:
``synthetic`` accepts at a set rate whatever the tokens are (a benchmark aid: the text is garbage), ``fly`` lets a
mismatch pass where the target is unsure. The rule lists the acceptance methods that can be selected (the Literal of
``rejection_sample_method``) and where each one acts.

``yes``: only methods known to be lossless (strict, standard, probabilistic, block) can be selected. ``no``: one that
is not can be. A name that is known neither way is ``unknown``. The default is named: a ``no`` here is about what can
be switched on.
"""

from __future__ import annotations

import ast

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import tree_of
from rules.recheck import Recheck
from rules.spec_methods import literal_fields

ID = "lossless-only"
QUESTION = "Can no acceptance method be selected that changes the output distribution?"
CHANGES_IF = "a lossy method is taken out of the Literal of rejection_sample_method, or one is added"
NEEDLES = (b"rejection_sample_method",)
_FIELD = "rejection_sample_method"
_LOSSLESS = {
    "strict": "a draft token is kept only when the target samples the same token",
    "standard": "rejection sampling: the output distribution is the target's",
    "probabilistic": "rejection sampling: the output distribution is the target's",
    "block": "block verification: the output distribution is the target's",
}
_LOSSY = {
    "synthetic": "accepts at a set rate whatever the tokens are: the text is garbage, for benchmarks only",
    "fly": "entropy-gated: lets a mismatch pass where the target is unsure",
    "typical": "typical acceptance: keeps any token above a probability threshold",
}


def extract(path: str, source: bytes) -> list[Fact]:
    found = literal_fields(source, _FIELD)
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Compare) and _FIELD in ast.unparse(node):
            values = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            found += [
                {
                    "kind": "acts",
                    "value": v,
                    "symbol": _FIELD,
                    "line": node.lineno,
                    "end_line": node.end_lineno or node.lineno,
                }
                for v in values
            ]
    return found


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    fields = [(file, f) for file, found in facts for f in found if f["kind"] == "field"]
    acts: dict[str, list[str]] = {}
    for file, found in facts:
        for fact in found:
            if fact["kind"] == "acts":
                acts.setdefault(fact["value"], []).append(f"{file.path}:{fact['line']}")
    if not fields:
        if not any(found for _, found in facts):
            why = "no field rejection_sample_method: this vLLM has no choice of acceptance method"
            return Verdict(ID, "n/a", why, scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
        why = "rejection_sample_method is used, but what it may be is not declared as a Literal"
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    items, evidence, check = [], [], Recheck(ctx)
    default = ""
    for file, fact in fields:
        default = default or str(fact["default"])
        for value, line, _ in fact["values"]:
            kind = "lossless" if value in _LOSSLESS else "lossy" if value in _LOSSY else "not known"
            items.append(
                {
                    "method": value,
                    "distribution": kind,
                    "why": _LOSSLESS.get(value) or _LOSSY.get(value, "a name that this tool doesn't know"),
                    "file": file.path,
                    "line": line,
                    "default": value == fact["default"],
                    "acts_at": acts.get(value, [])[:6],
                }
            )
        lines = sorted({line for _, line, _ in fact["values"]})
        evidence += [
            ctx.evidence(file, lines[0], lines[-1], fact["symbol"]),
            ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]),
        ]
        check.lines(file, lines[0], lines[-1]).lines(file, fact["line"], fact["end_line"])
    lossy = [str(i["method"]) for i in items if i["distribution"] == "lossy"]
    odd = [str(i["method"]) for i in items if i["distribution"] == "not known"]
    for file, found in facts:
        for fact in found:
            if fact["kind"] == "acts" and fact["value"] in (*lossy, *odd):
                evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
                check.lines(file, fact["line"], fact["end_line"])
    outcome: Outcome
    if lossy:
        outcome = "no"
        summary = (
            f"rejection_sample_method can be set to {' or '.join(lossy)}, "
            f"which is not lossless; the default ({default}) is"
        )
        summary += f"; not known: {', '.join(odd)}" if odd else ""
        if default in lossy:
            summary = f"the default acceptance method ({default}) is not lossless"
    elif odd:
        outcome, summary = (
            "unknown",
            f"rejection_sample_method can be set to {', '.join(odd)}, which this tool doesn't know",
        )
    else:
        outcome, summary = "yes", f"only lossless methods can be selected: {', '.join(str(i['method']) for i in items)}"
    return Verdict(
        ID,
        outcome,
        summary,
        evidence=tuple(evidence),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=tuple(items),
        **check.done(),
    )


def _config(values: str, default: str = "standard") -> dict[str, str]:
    text = f'M = Literal[{values}]\nclass SpeculativeConfig:\n    rejection_sample_method: M = "{default}"\n'
    return {"vllm/config/speculative.py": text}


VALID = (
    Example("two lossless ones", _config('"standard", "block"'), "yes", items=2),
    Example("the old names", _config('"strict", "probabilistic"', "strict"), "yes", items=2),
    Example("a single one", _config('"standard"'), "yes", items=1),
    Example("synthetic is only spoken of", _config('"standard"  # not "synthetic"\n'), "yes", items=1),
)
INVALID = (
    Example("the benchmark aid", _config('"standard", "synthetic"'), "no", items=2),
    Example("entropy-gated", _config('"standard", "block", "fly"'), "no", items=3),
    Example("a name of somebody's own", _config('"standard", "mellow"'), "unknown", items=2),
    Example(
        "any string",
        {
            "vllm/a.py": (
                "class SpeculativeConfig:\n    rejection_sample_method: str = ''\n"
                "x = c.rejection_sample_method == 'a'\n"
            )
        },
        "unknown",
    ),
    Example("no choice at all", {"vllm/a.py": "x = 1\n"}, "n/a"),
)
