"""An EAGLE-style drafter's KV at a position depends on the *next* token, so with prefix caching the last cached block
must be dropped. DFlash builds its KV from target hidden states alone and needs no drop. Where the drop covers every
drafter that uses hidden states, a hybrid (GDN) target with dflash can get zero prefix-cache hits, without a warning:
each turn is prefilled anew (vLLM issues 54360 and 51250; hits were seen on 0.24.0, so measure: the same long prompt
twice).

The rule evaluates, for ``method="dflash"``, what the scheduler hands to the KV cache manager. ``yes``: nothing is
dropped by default. A manual switch (``disable_eagle_block_drop``) is named but doesn't make it a ``yes``: it has to
be known and set.
"""

from __future__ import annotations

import ast
from typing import Any

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.config_model import Configuration, config_facts, default_facts
from rules.doubt import unless_unread
from rules.interpret import Interpreter, Refused, Thing, Unknown
from rules.parts import holding, tree_of
from rules.recheck import Recheck

ID = "eagle-block-drop"
QUESTION = "Is dropping the last prefix-cache block limited to the methods that need it (not dflash)?"
CHANGES_IF = "the predicate behind the KV cache manager's drop flag excludes dflash (or includes it again)"
NEEDLES = (b"class SpeculativeConfig", b"KVCacheManager(")
_OWNER = "SpeculativeConfig"


def extract(path: str, source: bytes) -> list[Fact]:
    found: list[Fact] = []
    if b"class SpeculativeConfig" in source:
        short = {
            p.name: p.text for p in holding(source, "self.", "return") if p.owner == _OWNER and p.end_line - p.line < 30
        }
        deciding = {name for name, text in short.items() if "self.method" in text}
        for _ in range(3):  # predicates of predicates
            deciding |= {name for name, text in short.items() if any(f"self.{other}()" in text for other in deciding)}
        found += config_facts(source, lambda name, text: name in deciding)
        found += [
            {**f, "fields": {k: v for k, v in f["fields"].items() if isinstance(v, bool)}}
            for f in default_facts(source, frozenset({_OWNER}))
        ]
        found += _switches(source)
    for part in holding(source, "KVCacheManager("):
        found += _handed(part.text, part.line, part.symbol)
    return found


def _switches(source: bytes) -> list[Fact]:
    """Documented fields that turn the drop off."""
    return [
        {"kind": "switch", "name": item.target.id, "line": item.lineno, "end_line": item.lineno}
        for owner in tree_of(source).body
        if isinstance(owner, ast.ClassDef) and owner.name == _OWNER
        for item in owner.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and "block_drop" in item.target.id
    ]


def _handed(text: str, line: int, symbol: str) -> list[Fact]:
    """The manager's drop argument, ``self.x``, and every assignment to ``self.x`` before it with the tests around
    it."""
    indented = text[:1] in " \t"
    top = ast.parse("if 1:\n" + text if indented else text)
    shift = line - (2 if indented else 1)
    arguments: list[tuple[str, str, int]] = []
    assigned: list[tuple[str, str, list[str], int, int]] = []

    def walk(body: list[ast.stmt], tests: list[str]) -> None:
        for node in body:
            for call in (
                ast.walk(node) if not isinstance(node, (ast.If, ast.FunctionDef, ast.For, ast.With, ast.Try)) else []
            ):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("KVCacheManager"):
                    for keyword in call.keywords:
                        if keyword.arg and ("eagle" in keyword.arg or "drop" in keyword.arg):
                            arguments.append((keyword.arg, ast.unparse(keyword.value), keyword.value.lineno))
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    where = (node.lineno, node.end_lineno or node.lineno)
                    assigned.append((ast.unparse(target), ast.unparse(node.value), tests, *where))
            elif isinstance(node, ast.If):
                test = ast.unparse(node.test)
                walk(node.body, [*tests, test])
                walk(node.orelse, [*tests, f"not ({test})"])
            elif isinstance(node, (ast.For, ast.With, ast.Try, ast.FunctionDef)):
                walk(node.body, tests)

    walk(top.body[0].body if indented else top.body, [])  # type: ignore[attr-defined]
    found: list[Fact] = []
    for name, value, at in arguments:
        steps = [
            {"value": v, "tests": [t for t in tests if t != "1"], "line": first + shift, "end_line": last + shift}
            for target, v, tests, first, last in assigned
            if target == value
        ]
        found.append(
            {
                "kind": "handed",
                "argument": name,
                "value": value,
                "symbol": symbol,
                "line": at + shift,
                "end_line": at + shift,
                "steps": steps,
            }
        )
    return found


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    handed = [(file, f) for file, found in facts for f in found if f["kind"] == "handed"]
    # The scheduler of the engine in force: connectors and offloaders build managers of their own from the same
    # predicate.
    mine = [h for h in handed if "/core/sched/" in h[0].path] or handed
    configuration = Configuration(
        [(file, [f for f in found if f["kind"] not in ("handed", "switch")]) for file, found in facts]
    )
    if not mine or _OWNER not in configuration.functions:
        why = "the call that hands the drop flag to a KV cache manager was not found"
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    file, fact = mine[0]
    answers = {method: _dropped(configuration, fact, method) for method in ("dflash", "eagle3")}
    evidence = [ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"])]
    check = Recheck(ctx)
    for step in fact["steps"]:
        evidence.append(ctx.evidence(file, step["line"], step["end_line"], fact["symbol"]))
        check.lines(file, step["line"], step["end_line"])
    check.lines(file, fact["line"], fact["end_line"])
    for name in _called(configuration, fact):
        function, where = configuration.functions[_OWNER][name], configuration.files[f"{_OWNER}.{name}"]
        evidence.append(
            ctx.evidence(where, function.lineno, function.end_lineno or function.lineno, f"{_OWNER}.{name}")
        )
        check.lines(where, function.lineno, function.end_lineno or function.lineno)
    switches = [(f, s) for f, found in facts for s in found if s["kind"] == "switch"]
    items = tuple({"method": method, "drops_last_block": answer} for method, answer in answers.items())
    drops = answers["dflash"]
    outcome: Outcome
    if drops is None:
        outcome, summary = "unknown", f"whether {fact['value']} holds for dflash can't be told from the code alone"
    elif drops:
        outcome = "no"
        summary = f"the last cached block is dropped for dflash too ({file.path}:{fact['line']})"
        summary += ", which can leave a hybrid target without prefix-cache hits"
        if switches:
            summary += f"; {switches[0][1]['name']}=true in the speculative config turns it off by hand"
    else:
        outcome, summary = "yes", f"nothing is dropped for dflash ({file.path}:{fact['line']})"
    return Verdict(
        ID,
        outcome,
        summary,
        evidence=tuple(evidence),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=items,
        **check.done(),
    )


def _dropped(configuration: Configuration, fact: Fact, method: str) -> bool | None:
    speculative = configuration.thing(_OWNER, method=method, draft_model_config=Thing("draft_model_config"))
    interpreter = configuration.interpreter({"speculative_config": speculative})
    this = Thing("scheduler", {})

    def value(text: str, local: Interpreter = interpreter) -> Any:
        try:
            return local.expression(
                text.replace("self.vllm_config.speculative_config", "speculative_config"), self=this
            )
        except Refused:
            return Unknown(text)

    answer: Any = Unknown(fact["value"])
    if not fact["steps"]:
        answer = value(fact["value"])
    for step in fact["steps"]:
        tests = [value(test) for test in step["tests"]]
        if any(not isinstance(t, Unknown) and not interpreter.true(t) for t in tests):
            continue
        if any(isinstance(t, Unknown) for t in tests):
            continue  # a special deployment: the default is what is asked
        answer = value(step["value"])
    return None if isinstance(answer, Unknown) else interpreter.true(answer)


def _called(configuration: Configuration, fact: Fact) -> list[str]:
    """Predicates of the speculative configuration that the assignments reach, in the order they are called."""
    functions = configuration.functions[_OWNER]
    todo = [
        name for step in fact["steps"] for name in functions if f".{name}()" in step["value"] + " ".join(step["tests"])
    ]
    todo += [name for name in functions if f".{name}()" in fact["value"]]
    found: list[str] = []
    while todo:
        name = todo.pop(0)
        if name not in found:
            found.append(name)
            todo += [other for other in functions if f"self.{other}()" in ast.unparse(functions[name])]
    return found


def _install(
    predicates: str, steps: str = "self.drop = spec.drops()", argument: str = "use_eagle=self.drop"
) -> dict[str, str]:
    body = "".join(f"    {line}\n" for line in predicates.split("\n"))
    text = "".join(f"        {line}\n" for line in steps.replace("spec.", "speculative_config.").split("\n"))
    return {
        "vllm/config/speculative.py": f"class SpeculativeConfig:\n    disable_block_drop: bool = False\n{body}",
        "vllm/v1/core/sched/scheduler.py": (
            "class Scheduler:\n    def __init__(self, vllm_config):\n"
            f"{text}        self.manager = KVCacheManager({argument})\n"
        ),
    }


_ALL = 'def uses_hidden(self):\n    return self.method in ("eagle3", "dflash")\n'
VALID = (
    Example(
        "dflash is not among the methods",
        _install('def drops(self):\n    return self.method in ("eagle", "eagle3")'),
        "yes",
        items=2,
    ),
    Example(
        "excluded by a second predicate",
        _install(_ALL + 'def drops(self):\n    return self.uses_hidden() and not self.method == "dflash"'),
        "yes",
    ),
    Example(
        "guarded where it is set",
        _install(_ALL, 'self.drop = False\nif spec.uses_hidden() and spec.method != "dflash":\n    self.drop = True'),
        "yes",
    ),
    Example("never dropped", _install(_ALL, "self.drop = False"), "yes"),
)
INVALID = (
    Example(
        "every drafter that uses hidden states",
        _install(_ALL, "self.drop = False\nif spec.uses_hidden():\n    self.drop = True"),
        "no",
        items=2,
    ),
    Example(
        "a switch that is off by default",
        _install(_ALL + "def drops(self):\n    return self.uses_hidden() and not self.disable_block_drop"),
        "no",
    ),
    Example(
        "the exclusion is a comment",
        _install(_ALL + "def drops(self):\n    return self.uses_hidden()  # not self.method == 'dflash'"),
        "no",
    ),
    Example(
        "the exclusion covers another method",
        _install(_ALL + "def drops(self):\n    return self.uses_hidden() and self.method != 'dspark'"),
        "no",
    ),
    Example("decided elsewhere", _install(_ALL, "self.drop = policy.drops(vllm_config)"), "unknown"),
    Example(
        "no manager",
        {
            "vllm/config/speculative.py": (
                "class SpeculativeConfig:\n    def drops(self):\n        return self.method == 'a'\n"
            )
        },
        "unknown",
    ),
)
