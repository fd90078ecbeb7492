"""A CUDA graph for uniform decode fits a batch in which every request brings 1+K tokens (K draft tokens). A *prompt*
of exactly 1+K tokens has the same shape: where the graph is chosen by shapes alone, that prefill replays a decode
graph and the answer is garbage (vLLM issue 53051). The guard is a flag that says whether the batch holds a prefill.

The rule finds the functions that compare a token count with (requests x query length), and asks whether a flag that
comes from prefill state takes part in the decision, in the function or where it is called. It answers for the runner
in force (``runner-in-force``): V1 and V2 decide apart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import Part, guards, influences, names_in, parse, parts, place, walk
from rules.recheck import Recheck
from rules.runner_in_force import runners
from rules.tree import SourceFile

if TYPE_CHECKING:
    import libcst as cst

ID = "uniform-decode-guard"
QUESTION = "Are decode graphs chosen by a prefill flag too, not by shapes alone (runner in force)?"
CHANGES_IF = (
    "the choice of a uniform decode graph consults (or no longer "
    "consults) prefill state, or the other runner is in force"
)
PATHS = ("vllm/v1/worker/**",)
_SHAPE = re.compile(r"== *(?:self\.)?\w+ *\* *(?:self\.)?\w+|\* *(?:self\.)?\w+ *==")
_UNIFORM = re.compile(r"\buniform_(?:decode|token|query|batch)\w*\(|\b\w*_uniform_(?:decode|token|query|batch)\w*\(")
_FLAG = re.compile(r"prefill|prompt_chunk|is_prompt|decode_only|pure_decode")


def extract(path: str, source: bytes) -> list[Fact]:
    text = source.decode("utf-8", "replace")
    if not _SHAPE.search(text) and "uniform" not in text:
        return []
    shapes = [part for part in parts(source) if _SHAPE.search(part.text) and part.end_line - part.line < 60]
    found = [fact for part in shapes for fact in _decision(part)]
    named = {fact["name"] for fact in found}
    wrapping = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(named)))})\(") if named else None
    for part in parts(source):
        if (
            wrapping is not None
            and part.name not in named
            and part.end_line - part.line < 25
            and wrapping.search(part.text)
        ):
            found += _decision(part, named)
    named = {fact["name"] for fact in found}
    wrapping = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(named)))})\(") if named else None
    for part in parts(source):
        if (_UNIFORM.search(part.text) and "model_runner" in path) or (
            wrapping is not None and wrapping.search(part.text)
        ):
            found += _calls(part, named)
    return found


def _decision(part: Part, through: frozenset[str] | set[str] = frozenset()) -> list[Fact]:
    """The function's shape test, and its parameters that take part in the same condition."""
    import libcst.matchers as m

    function, lines = parse(part)
    params = [p.name.value for p in (*function.params.params, *function.params.kwonly_params)]
    product = m.BinaryOperation(
        operator=m.Multiply(), left=m.OneOf(m.Name(), m.Attribute()), right=m.OneOf(m.Name(), m.Attribute())
    )
    test: Any = m.OneOf(
        m.Comparison(comparisons=[m.ComparisonTarget(operator=m.Equal(), comparator=product)]),
        m.Comparison(left=product, comparisons=[m.ComparisonTarget(operator=m.Equal())]),
    )
    if through:
        test = m.Call(
            func=m.OneOf(
                *(m.Name(name) for name in through), m.Attribute(attr=m.OneOf(*(m.Name(name) for name in through)))
            )
        )
    hits = m.findall(function, test)
    deciding = [h for h in hits if _decides(function, h)]
    if not deciding:
        return []
    flags: list[str] = []
    for hit in deciding:
        own = names_in(hit)
        for joined in _joined(function, hit):
            flags += [
                n for n in sorted(influences(function, [joined])) if n in params and n not in own and n not in flags
            ]
    flagged = any(
        _FLAG.search(n) for hit in deciding for joined in _joined(function, hit) for n in influences(function, [joined])
    )
    at = (min(lines(h)[0] for h in deciding), max(lines(h)[1] for h in deciding))
    return [place(part, "decides", name=part.name, params=params, flags=flags, flagged=flagged, at=list(at))]


def _decides(function: cst.FunctionDef, hit: cst.CSTNode) -> bool:
    """Whether a test reaches a return, directly or as the test of an ``if``."""
    import libcst as cst

    ends = [n.test if isinstance(n, cst.If) else n for n in walk(function) if isinstance(n, (cst.Return, cst.If))]
    return any(_under(end, hit) for end in ends)


def _under(node: cst.CSTNode, hit: cst.CSTNode) -> bool:
    return any(found is hit for found in walk(node))


def _joined(function: cst.FunctionDef, hit: cst.CSTNode) -> list[cst.CSTNode]:
    """The other operands of every ``and`` that the test is in, and the tests of the ``if`` around it."""
    import libcst as cst

    found: list[cst.CSTNode] = []
    for node in walk(function):
        if not isinstance(node, cst.BooleanOperation) or not isinstance(node.operator, cst.And):
            continue
        if _under(node.left, hit):
            found.append(node.right)
        elif _under(node.right, hit):
            found.append(node.left)
    return found + [g for g in guards(function, hit) if not _under(g, hit)]


def _calls(part: Part, named: set[str]) -> list[Fact]:
    """Calls of deciding functions (those of this file, or named for uniform decode), with what each argument comes
    from."""
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    found = []
    for call in walk(function):
        if not isinstance(call, cst.Call):
            continue
        callee = (
            call.func.value
            if isinstance(call.func, cst.Name)
            else call.func.attr.value
            if isinstance(call.func, cst.Attribute)
            else ""
        )
        if not isinstance(callee, str) or (callee not in named and not _UNIFORM.search(f"{callee}(")):
            continue
        arguments = []
        for argument in call.args:
            word = argument.keyword.value if argument.keyword is not None else ""
            plain = m.matches(argument.value, m.OneOf(m.Name("True"), m.Name("False"), m.Name("None")))
            flagged = not plain and any(_FLAG.search(n) for n in influences(function, [argument.value]))
            arguments.append({"name": word, "constant": plain, "flagged": flagged})
        joined = any(_FLAG.search(n) for other in _joined(function, call) for n in influences(function, [other]))
        found.append(place(part, "calls", lines(call), callee=callee, arguments=arguments, joined=joined))
    return found


@unless_unread(paths=PATHS)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    decisions = {f["name"]: (file, f) for file, found in facts for f in found if f["kind"] == "decides"}
    by_runner = {"V1": _judge_runner(facts, decisions, False), "V2": _judge_runner(facts, decisions, True)}
    in_force = runners(ctx)
    chosen = {t: r for t, r in in_force.items() if r in by_runner} or {
        f"runner {r}": r for r, a in by_runner.items() if a is not None
    }
    items, evidence, check = [], [], Recheck(ctx)
    for target, runner in chosen.items():
        answer = by_runner[runner]
        item: dict[str, Any] = {"target": target, "runner": runner, "guarded": None if answer is None else answer[0]}
        if answer is not None:
            item["file"], item["line"] = answer[2].path, answer[3]["line"]
        items.append(item)
    for runner in dict.fromkeys(chosen.values()):
        for file, fact in (by_runner[runner] or (None, []))[1]:
            first, last = fact["at"] if fact["kind"] == "decides" else (fact["line"], fact["end_line"])
            evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
            check.lines(
                file,
                first if fact["kind"] == "calls" else fact["line"],
                last if fact["kind"] == "calls" else fact["end_line"],
            )
    answers = {item["guarded"] for item in items}
    said = ", ".join(
        (
            f"{i['runner']} ({i['target']}): "
            f"{'guarded' if i['guarded'] else 'shapes alone' if i['guarded'] is not None else 'not found'}"
        )
        for i in items
    )
    if not items or answers == {None}:
        why = "the place where a uniform decode graph is chosen was not found"
        return Verdict(
            ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION, items=tuple(items)
        )
    outcome: Outcome = (
        "unknown" if None in answers else "yes" if answers == {True} else "no" if answers == {False} else "partial"
    )
    others = [
        f"{r} {'has' if a[0] else 'lacks'} it"
        for r, a in by_runner.items()
        if a is not None and r not in chosen.values()
    ]
    summary = said + (f"; the other runner: {', '.join(others)}" if others else "")
    if any(i["guarded"] is False for i in items):
        summary += "; a prompt of exactly 1+K tokens can replay a decode graph"
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


Answer = tuple[bool, list[tuple[SourceFile, Fact]], SourceFile, Fact]


def _judge_runner(
    facts: list[tuple[SourceFile, list[Fact]]], decisions: dict[str, tuple[SourceFile, Fact]], second: bool
) -> Answer | None:
    """(guarded, places, file and fact of the decision) for one runner: every call with a real argument must be
    guarded."""
    calls = []
    for file, found in facts:
        mine = file.path.startswith("vllm/v1/worker/gpu/") is second and "/spec_decode/" not in file.path
        runner = file.path.rsplit("/", 1)[-1] in ("model_runner.py", "gpu_model_runner.py") or not file.stock
        if mine and runner:
            calls += [(file, f) for f in found if f["kind"] == "calls" and f["callee"] in decisions]
    # A wrapper's own calls of the shape test say nothing: what counts is how the runner calls the outermost decision.
    called = {f["callee"] for _, f in calls}
    outer = [(file, f) for file, f in calls if f["symbol"].rsplit(".", 1)[-1] not in called]
    if not outer:
        return None
    verdicts = []
    for _, call in outer:
        _, decision = decisions[call["callee"]]
        flagged = [a for a in call["arguments"] if a["flagged"] and _is_flag(a, call, decision)]
        flags = [a for a in call["arguments"] if _is_flag(a, call, decision)]
        if flags and all(a["constant"] for a in flags):
            continue  # a capture or dummy run, which knows what it runs
        verdicts.append(bool(flagged) or call["joined"] or (decision["flagged"] and not decision["flags"]))
    file, decision = decisions[outer[-1][1]["callee"]]
    places = [(file, decision), *outer]
    return (bool(verdicts) and all(verdicts), places, file, decision)


def _is_flag(argument: dict[str, Any], call: Fact, decision: Fact) -> bool:
    """Whether an argument is given to a parameter that takes part in the decision."""
    if argument["name"]:
        return argument["name"] in decision["flags"]
    params = [p for p in decision["params"] if p not in ("self", "cls")]
    index = call["arguments"].index(argument)
    return index < len(params) and params[index] in decision["flags"]


def _runner(decide: str, call: str, before: str = "") -> dict[str, str]:
    body = "".join(f"        {line}\n" for line in before.split("\n")) if before else ""
    return {
        "vllm/v1/worker/gpu_model_runner.py": (
            f"{decide}\n\nclass GPUModelRunner:\n"
            "    def step(self, tokens, reqs, longest, batch):\n"
            f"{body}        return {call}\n"
        )
    }


_PLAIN = "def same_shape(tokens, reqs, longest):\n    return tokens == longest * reqs\n"
_FLAGGED = (
    "def same_shape(tokens, reqs, longest, busy):\n"
    "    if not busy and tokens == longest * reqs:\n        return longest\n"
    "    return None\n"
)
VALID = (
    Example(
        "a flag in the function",
        _runner(_FLAGGED, "same_shape(tokens, reqs, longest, batch.has_prefill)"),
        "yes",
        items=2,
    ),
    Example(
        "the flag comes from prefill state",
        _runner(_FLAGGED, "same_shape(tokens, reqs, longest, busy)", "busy = bool(batch.is_prefilling.any())"),
        "yes",
    ),
    Example(
        "the caller adds it", _runner(_PLAIN, "not batch.has_prefill and same_shape(tokens, reqs, longest)"), "yes"
    ),
    Example(
        "a wrapper adds it",
        _runner(
            _PLAIN
            + (
                "\ndef pick(tokens, reqs, longest, ok):\n"
                "    if ok and same_shape(tokens, reqs, longest):\n        return longest\n"
            ),
            "pick(tokens, reqs, longest, ok)",
            "ok = not batch.has_prefill",
        ),
        "yes",
    ),
)
INVALID = (
    Example("shapes alone", _runner(_PLAIN, "same_shape(tokens, reqs, longest)"), "no", items=2),
    Example(
        "the flag is for capture runs",
        _runner(
            (
                "def same_shape(tokens, reqs, longest, force=None):\n"
                "    return tokens == longest * reqs if force is None else force\n"
            ),
            "same_shape(tokens, reqs, longest, force=batch.force)",
        ),
        "no",
    ),
    Example(
        "the flag says something else", _runner(_FLAGGED, "same_shape(tokens, reqs, longest, batch.has_lora)"), "no"
    ),
    Example(
        "the flag is never given",
        _runner(_FLAGGED.replace("busy):", "busy=False):"), "same_shape(tokens, reqs, longest)"),
        "no",
    ),
    Example(
        "prefill is only logged", _runner(_PLAIN, "same_shape(tokens, reqs, longest)", "log(batch.has_prefill)"), "no"
    ),
    Example(
        "no such choice",
        {"vllm/v1/worker/gpu_model_runner.py": "class R:\n    def step(self):\n        return uniform()\n"},
        "unknown",
    ),
)
