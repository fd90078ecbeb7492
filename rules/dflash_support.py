"""Whether the speculative method ``dflash`` (a block-diffusion drafter) is there: the configuration accepts the name,
and a runner constructs something for it. The summary says which runners.

A runner counts when one of its own conditions on the method (``method == "dflash"``, or a predicate of the
configuration that says the same) leads to the construction of a class that exists. A name in the configuration that
no runner acts on is ``partial``.
"""

from __future__ import annotations

import ast
import re

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import Part, parse, parts, place, strings_in, tree_of
from rules.recheck import Recheck
from rules.tree import SourceFile

ID = "dflash-support"
QUESTION = 'Is the speculative method "dflash" implemented, and in which runners?'
CHANGES_IF = (
    'the configuration takes (or loses) the method "dflash", or a '
    "runner gains (or loses) the branch that constructs its drafter"
)
NEEDLES = (b"dflash",)
_METHOD = "dflash"
# What a function must hold for libcst to look at it: a test on the method, and a class that is constructed.
_BRANCHES = re.compile(
    r"if .*(== *['\"]dflash['\"]|['\"]dflash['\"] *==|spec\w*(config|cfg)?\.\w+\(\)|config\.\w+\(\))"
)
_CONSTRUCTS = re.compile(r"(return |= *)[A-Z]\w+\(")


def extract(path: str, source: bytes) -> list[Fact]:
    found: list[Fact] = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            if any(isinstance(n, ast.Constant) and n.value == _METHOD for n in ast.walk(node.slice)):
                found.append(
                    {
                        "kind": "accepts",
                        "symbol": "Literal",
                        "line": node.lineno,
                        "end_line": node.end_lineno or node.lineno,
                    }
                )
        elif isinstance(node, ast.ClassDef) and "dflash" in node.name.lower():
            found.append({"kind": "class", "symbol": node.name, "line": node.lineno, "end_line": node.lineno})
    for part in parts(source):
        if part.end_line - part.line < 8 and f'self.method == "{_METHOD}"' in part.text.replace("'", '"'):
            found.append(place(part, "predicate", name=part.name))
        elif _CONSTRUCTS.search(part.text) and _BRANCHES.search(part.text):
            found += _selections(part)
    return found


def _selections(part: Part) -> list[Fact]:
    """Branches on the method that construct a class: ``self.drafter = X(...)`` or ``return X(...)``."""
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    made = m.Call(func=m.OneOf(m.Name(), m.Attribute()))
    found = []
    for branch in m.findall(function, m.If()):
        assert isinstance(branch, cst.If)
        calls = {c.func.attr.value for c in m.findall(branch.test, m.Call(func=m.Attribute()))}  # type: ignore[attr-defined]
        said = _METHOD in strings_in(branch.test) and bool(m.findall(branch.test, m.Comparison()))
        if not said and not calls:
            continue
        for step in m.findall(branch.body, m.OneOf(m.Assign(value=made), m.Return(value=made))):
            call = step.value  # type: ignore[attr-defined]
            name = call.func.value if isinstance(call.func, cst.Name) else call.func.attr.value
            if name[:1].isupper():
                at = (lines(branch.test)[0], lines(step)[1])
                found.append(place(part, "selects", at, made=name, literal=said, calls=sorted(calls)))
    return found


def selections(ctx: Context) -> list[tuple[str, SourceFile, Fact]]:
    """(runner, file, fact) of every branch on method dflash that constructs a drafter."""
    facts = ctx.facts(ID)
    predicates = {f["name"] for _, found in facts for f in found if f["kind"] == "predicate"}
    chosen = []
    for file, found in facts:
        for fact in found:
            if fact["kind"] == "selects" and (fact["literal"] or predicates & set(fact["calls"])):
                runner = (
                    "V2"
                    if file.path.startswith("vllm/v1/worker/gpu/")
                    else "V1"
                    if file.path.startswith("vllm/v1/worker/")
                    else file.origin
                )
                chosen.append((runner, file, fact))
    return chosen


@unless_unread(NEEDLES, keep_yes=True)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    accepts = [(file, f) for file, found in facts for f in found if f["kind"] == "accepts"]
    classes = {f["symbol"] for _, found in facts for f in found if f["kind"] == "class"}
    chosen = [(r, file, f) for r, file, f in selections(ctx) if r != "vllm"]
    evidence, items, check = [], [], Recheck(ctx)
    for file, fact in accepts[:2]:
        evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
        check.lines(file, fact["line"], fact["end_line"])
    for runner, file, fact in chosen:
        evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
        check.lines(file, fact["line"], fact["end_line"])
        items.append(
            {
                "runner": runner,
                "class": fact["made"],
                "file": file.path,
                "line": fact["line"],
                "class_found": fact["made"] in classes,
            }
        )
    runners = sorted({item["runner"] for item in items})
    made = ", ".join(f"{i['runner']} {i['class']} ({i['file']}:{i['line']})" for i in items)
    outcome: Outcome
    if accepts and items:
        outcome, summary = "yes", f"{' and '.join(runners)}: {made}"
    elif items:
        outcome, summary = (
            "partial",
            f'a runner constructs a drafter for it ({made}), but the configuration does not take "dflash"',
        )
    elif accepts:
        outcome, summary = "partial", 'the configuration takes "dflash", but no runner constructs a drafter for it'
    else:
        outcome, summary = "no", 'the configuration takes no method "dflash", and no runner has a branch for it'
        check.shell("grep -rlF --include=*.py -e '\"dflash\"' vllm | wc -l")
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


_CONFIG = """from typing import Literal
Methods = Literal["ngram", "dflash"]
class SpeculativeConfig:
    method: Methods | None = None
    def use_dflash(self):
        return self.method == "dflash"
"""
_V1 = """class GPUModelRunner:
    def __init__(self, config):
        if config.use_ngram():
            self.drafter = NgramProposer(config)
        elif config.use_dflash():
            self.drafter = DFlashProposer(config)
"""
_V2 = """def init_speculator(config):
    if config.method == "dflash":
        return DFlashSpeculator(config)
    raise NotImplementedError(config.method)
"""
_DRAFTER = "class DFlashProposer: ...\nclass DFlashSpeculator: ...\n"
VALID = (
    Example(
        "in the first runner",
        {
            "vllm/config/speculative.py": _CONFIG,
            "vllm/v1/worker/gpu_model_runner.py": _V1,
            "vllm/v1/spec_decode/dflash.py": _DRAFTER,
        },
        "yes",
        items=1,
    ),
    Example(
        "in the second runner",
        {"vllm/config/speculative.py": _CONFIG, "vllm/v1/worker/gpu/spec_decode/__init__.py": _V2},
        "yes",
        items=1,
    ),
    Example(
        "in both",
        {
            "vllm/config/speculative.py": _CONFIG,
            "vllm/v1/worker/gpu_model_runner.py": _V1,
            "vllm/v1/worker/gpu/spec_decode/__init__.py": _V2,
        },
        "yes",
        items=2,
    ),
    Example(
        "the predicate has another name",
        {
            "vllm/config/speculative.py": _CONFIG.replace("use_dflash", "is_block_drafter"),
            "vllm/v1/worker/gpu_model_runner.py": _V1.replace("use_dflash", "is_block_drafter") + "# dflash\n",
        },
        "yes",
    ),
)
INVALID = (
    Example("not there", {"vllm/config/speculative.py": _CONFIG.replace('"dflash"', '"eagle"')}, "no"),
    Example("a name that nothing acts on", {"vllm/config/speculative.py": _CONFIG}, "partial"),
    Example(
        "a branch that the configuration never lets through",
        {"vllm/v1/worker/gpu/spec_decode/__init__.py": _V2},
        "partial",
    ),
    Example(
        "a branch that only refuses",
        {
            "vllm/config/speculative.py": _CONFIG,
            "vllm/v1/worker/gpu_model_runner.py": (
                "class R:\n    def __init__(self, c):\n        if c.method == 'dflash':\n"
                "            raise ValueError(c)\n"
            ),
        },
        "partial",
    ),
)
