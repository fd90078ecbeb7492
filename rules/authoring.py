"""What ``ddaudit rules list | show ID | test [ID] | new ID`` say: pure functions on rule modules, no terminal in sight.

A rule brings its own examples, miniature installs whose outcome it must give; ``run_examples`` judges them with the
same extractors and judges as a scan, every rule that comes earlier in the report included, so that a rule may build
on another one's answer.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from reports.model import VERDICT_IDS, Verdict
from rules.base import Example, Rule
from rules.loading import load_rules
from rules.testing import tree_from_dir, tree_from_example
from rules.tree import InstallTree


@dataclass(frozen=True)
class ExampleResult:
    """How one example went. ``problem`` is empty when the rule gave the outcome that the example states."""

    rule: str
    kind: Literal["VALID", "INVALID"]
    example: str
    expected: str
    got: str
    problem: str = ""


@dataclass(frozen=True)
class RuleLine:
    """One line of ``rules list``."""

    id: str
    question: str
    examples: int
    origin: str


def list_rules(extra: Sequence[Path] = ()) -> list[RuleLine]:
    """Every rule in the order of a report, the user's own last. Raises ValueError for a rule file that is not one."""
    return [RuleLine(r.id, r.question, len(r.valid) + len(r.invalid), r.origin) for r in _ordered(load_rules(extra))]


def list_text(extra: Sequence[Path] = ()) -> str:
    lines = list_rules(extra)
    width = max((len(line.id) for line in lines), default=0)
    return "".join(
        f"{line.id:<{width}}  {line.question}{'' if line.origin == 'builtin' else f'  ({line.origin})'}\n"
        for line in lines
    )


def show_text(rule_id: str, extra: Sequence[Path] = ()) -> str:
    """A rule for its user: the question, what it looks for, what would change the answer, its examples. Raises
    KeyError."""
    rule = find(rule_id, extra)
    body = [
        f"{rule.id}\n{'=' * len(rule.id)}",
        rule.question,
        rule.doc.strip(),
        f"Would change the answer: {rule.changes_if}",
    ]
    examples = [f"  {kind:<7}  {example.outcome:<7}  {example.name}" for kind, example in _examples(rule)]
    body.append("Examples (`ddaudit rules test " + rule.id + "`):\n" + "\n".join(examples))
    body.append(f"Source: {rule.extra.get('path', rule.origin)}")
    return "\n\n".join(body) + "\n"


def find(rule_id: str, extra: Sequence[Path] = ()) -> Rule:
    """The rule of that id. Raises KeyError with the ids that come close."""
    rules = load_rules(extra)
    for rule in rules:
        if rule.id == rule_id:
            return rule
    import difflib

    near = difflib.get_close_matches(rule_id, [rule.id for rule in rules], 3)
    raise KeyError(f"no rule {rule_id!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))


def run_examples(rule_ids: Sequence[str] = (), extra: Sequence[Path] = ()) -> list[ExampleResult]:
    """Judge the examples of these rules (all when none are named). Raises KeyError for an unknown id, ValueError for
    a bad rule file."""
    rules = _ordered(load_rules(extra))
    wanted = [find(rule_id, extra).id for rule_id in rule_ids] or [rule.id for rule in rules]
    results = []
    for number, rule in enumerate(rules):
        if rule.id in wanted:
            results += [_run(rule, kind, example, rules[:number]) for kind, example in _examples(rule)]
    return results


def results_text(results: Sequence[ExampleResult]) -> str:
    """The failures, each with what was expected, and the count."""
    bad = [r for r in results if r.problem]
    lines = [f"{r.rule}: {r.kind} example {r.example!r}: {r.problem}" for r in bad]
    rules = len({r.rule for r in results})
    lines.append(f"{len(results) - len(bad)}/{len(results)} examples of {rules} rule{'' if rules == 1 else 's'} pass")
    return "\n".join(lines) + "\n"


def judge_example(rule: Rule, example: Example, before: Sequence[Rule] = ()) -> Verdict:
    """One rule's verdict on one example; ``before`` are rules whose verdicts it may look at, in their order."""
    with example_tree(example) as tree:
        return judge_tree(rule, tree, before)


def judge_tree(rule: Rule, tree: InstallTree, before: Sequence[Rule] = ()) -> Verdict:
    """One rule's verdict on an install, with nothing cached and only the rules named."""
    from rules.cache import Cache, Row
    from rules.context import ScanContext
    from rules.extraction import extract_one, units_of

    units = units_of([*before, rule])
    rows: dict[str, Row] = {}
    for file in tree.files:
        source = tree.read(file.sha256)
        rows.setdefault(file.sha256, {}).update({u.id: [u.sha, extract_one(u, file.path, source)] for u in units})
    ctx = ScanContext(tree, rows, Cache(None), [])
    verdicts: dict[str, Verdict] = {}
    ctx.verdicts = verdicts
    for each in (*before, rule):
        verdicts[each.id] = each.judge(ctx)
    return verdicts[rule.id]


@contextmanager
def example_tree(example: Example) -> Iterator[InstallTree]:
    """An example as an install. With files of a ``*.dist-info`` folder it is written out and read back, RECORD and
    all."""
    if not any(fnmatch(path, "*.dist-info/*") for path in example.files):
        yield tree_from_example(example)
        return
    with tempfile.TemporaryDirectory() as folder:
        for path, text in example.files.items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, newline="")
        yield tree_from_dir(Path(folder))


def new_rule(rule_id: str) -> str:
    """The text of a rule file to start from. Raises ValueError for an id that is no lower-case-with-dashes word,
    or taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", rule_id):
        raise ValueError(
            f"{rule_id!r} is not a rule id: lower case letters, digits and dashes, such as who-writes-positions"
        )
    if rule_id in VERDICT_IDS:
        raise ValueError(f"{rule_id} is the id of a built-in rule; choose another")
    return _TEMPLATE.replace("<ID>", "ID").replace("RULE-ID", rule_id)


def file_name(rule_id: str) -> str:
    """The module that a rule of that id lives in."""
    return rule_id.replace("-", "_") + ".py"


def _run(rule: Rule, kind: Literal["VALID", "INVALID"], example: Example, before: Sequence[Rule]) -> ExampleResult:
    try:
        verdict = judge_example(rule, example, before)
    except Exception as error:  # the author wants to see which example broke, and the others
        return ExampleResult(rule.id, kind, example.name, example.outcome, "error", f"{type(error).__name__}: {error}")
    problem = ""
    if verdict.outcome != example.outcome:
        problem = f"expected {example.outcome}, got {verdict.outcome} ({verdict.summary})"
    elif example.items is not None and len(verdict.items) != example.items:
        problem = f"expected {example.items} items, got {len(verdict.items)}"
    elif kind == "VALID" and verdict.outcome != "yes":
        problem = "a VALID example states an outcome other than yes"
    return ExampleResult(rule.id, kind, example.name, example.outcome, verdict.outcome, problem)


def _examples(rule: Rule) -> list[tuple[Literal["VALID", "INVALID"], Example]]:
    good: list[tuple[Literal["VALID", "INVALID"], Example]] = [("VALID", example) for example in rule.valid]
    return good + [("INVALID", example) for example in rule.invalid]


def _ordered(rules: Sequence[Rule]) -> list[Rule]:
    return sorted(rules, key=lambda r: VERDICT_IDS.index(r.id) if r.id in VERDICT_IDS else len(VERDICT_IDS))


#: <ID> stands for ID, so that this module isn't taken for a rule.
_TEMPLATE = '''"""What this rule looks for, for its user: what goes wrong without it, and how code shows it."""

from __future__ import annotations

import ast

from reports.model import Verdict
from rules.base import Context, Example, Fact
from rules.recheck import Recheck

<ID> = "RULE-ID"
QUESTION = "Is there a function called my_function?"
CHANGES_IF = "a function of that name comes or goes"
NEEDLES = (b"my_function",)  # only files that hold one of these byte strings are looked at


def extract(path: str, source: bytes) -> list[Fact]:
    """Facts of one file as plain values, cached by its hash. libcst may be imported here, inside the function."""
    return [
        {"symbol": node.name, "line": node.lineno, "end_line": node.end_lineno or node.lineno}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "my_function"
    ]


def judge(ctx: Context) -> Verdict:
    """The answer, from the facts alone."""
    check = Recheck(ctx)
    evidence = []
    for file, facts in ctx.facts(ID):
        for fact in facts:
            evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
            check.lines(file, fact["line"], fact["line"])
    if not evidence:
        check.shell("grep -rn --include='*.py' -e 'def my_function' vllm || :", "")
    found = ", ".join(f"{e.file}:{e.line}" for e in evidence)
    return Verdict(
        ID,
        "yes" if evidence else "no",
        found or "no function of that name",
        evidence=tuple(evidence),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        **check.done(),
    )


VALID = (Example("it is there", {"vllm/a.py": "def my_function(): ...\\n"}, "yes"),)
INVALID = (
    Example("another name", {"vllm/a.py": "def other(): ...\\n"}, "no"),
    Example("only called", {"vllm/a.py": "my_function()\\n"}, "no"),
)
'''
