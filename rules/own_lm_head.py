"""A drafter whose vocabulary differs from the target's needs its own ``lm_head``. When the V2 runner's loader
replaces it with the target's, nothing is accepted (acceptance length 1.00) and nothing is said (vLLM pull request
46435).

The rule looks at the function that gives the V2 dflash drafter the target's head: the assignment must be guarded,
either by a flag of the drafter (``has_own_lm_head``) or by the vocabularies themselves (a draft-to-target map that
exists exactly when sizes differ). ``n/a`` where V2 has no dflash. V1 has guarded it since dflash exists.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.dflash_support import selections
from rules.doubt import unless_unread
from rules.parts import Part, guards, holding, influences, parse, place
from rules.recheck import Recheck

if TYPE_CHECKING:
    import libcst as cst

ID = "own-lm-head"
QUESTION = "Does the V2 loader keep a dflash drafter's own lm_head when vocabularies differ?"
CHANGES_IF = "the assignment of the target's lm_head to the drafter gains (or loses) its guard"
NEEDLES = (b".lm_head = ", b"draft_id_to_target_id")
_GIVES = re.compile(r"\.lm_head = [\w.]+$", re.M)


def extract(path: str, source: bytes) -> list[Fact]:
    found: list[Fact] = []
    text = source.decode("utf-8", "replace")
    if _GIVES.search(text) and ("draft" in text or "dflash" in text):
        for part in holding(source, ".lm_head = "):
            if _GIVES.search(part.text) and ("draft" in part.text or "target" in part.text):
                found += _gives(part)
    if "dflash" in text.lower() and "draft_id_to_target_id" in text:
        for part in holding(source, "draft_id_to_target_id", "vocab_size"):
            found += _maps(part)
    return found


def _gives(part: Part) -> list[Fact]:
    """Assignments ``drafter.lm_head = <the target's>`` and what guards them."""
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    gives = m.Assign(
        targets=[m.AssignTarget(m.Attribute(attr=m.Name("lm_head")))], value=m.OneOf(m.Name(), m.Attribute())
    )
    found = []
    for assign in m.findall(function, gives):
        tests = guards(function, assign)
        says = influences(function, list(tests)) if tests else set()
        guard = (
            "flag"
            if any("own_lm_head" in w for w in says)
            else "vocabulary"
            if any(_is_vocabulary(w) for w in says)
            else ""
        )
        first = lines(tests[-1])[0] if tests else lines(assign)[0]
        assert isinstance(assign, cst.Assign)
        found.append(place(part, "gives", (first, lines(assign)[1]), guard=guard, dflash=_names_dflash(part)))
    return found


def _names_dflash(part: Part) -> bool:
    """Whether the function says itself that it loads a dflash drafter (by its name, or a tag it sets), beyond a
    comment."""
    return "dflash" in part.name.lower() or re.search(r"""\(["']\w*dflash""", part.text) is not None


def _is_vocabulary(word: str) -> bool:
    return "vocab" in word or "to_target" in word or word in ("d2t", "t2d")


def _maps(part: Part) -> list[Fact]:
    """A draft-to-target map that the model makes exactly when the sizes differ."""
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    found = []
    differs = m.Comparison(comparisons=[m.ComparisonTarget(operator=m.NotEqual())])
    for branch in m.findall(function, m.If(test=differs)):
        assert isinstance(branch, cst.If)
        target = m.Assign(targets=[m.AssignTarget(m.Attribute(attr=m.Name("draft_id_to_target_id")))])
        if "vocab" in _code(branch.test) and m.findall(branch.body, target):
            found.append(place(part, "maps", (lines(branch.test)[0], lines(branch.test)[1] + 1)))
    return found


def _code(node: cst.CSTNode) -> str:
    from rules.parts import text_of

    return text_of(node)


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    if not any(runner == "V2" for runner, _, _ in selections(ctx)):
        why = "the V2 runner of this vLLM has no dflash drafter, so its loader is not used"
        return Verdict(ID, "n/a", why, scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    facts = ctx.facts(ID)
    gives = [
        (file, f)
        for file, found in facts
        for f in found
        if f["kind"] == "gives"
        and file.path.startswith("vllm/v1/worker/gpu/")
        and ("/dflash/" in file.path or f["dflash"])
    ]
    gives = [g for g in gives if "/dflash/" in g[0].path] or gives
    maps = [(file, f) for file, found in facts for f in found if f["kind"] == "maps" and "dflash" in file.path]
    if not gives:
        why = "the function that gives the V2 dflash drafter the target's lm_head was not found"
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    evidence, items, check = [], [], Recheck(ctx)
    for file, fact in gives:
        evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
        check.lines(file, fact["line"], fact["end_line"])
        items.append(
            {"file": file.path, "line": fact["line"], "symbol": fact["symbol"], "guard": fact["guard"] or "none"}
        )
    where = ", ".join(f"{i['file']}:{i['line']}" for i in items)
    outcome: Outcome
    if all(i["guard"] == "flag" for i in items):
        outcome, summary = "yes", f"the drafter's flag guards it: {where}"
    elif all(i["guard"] != "none" for i in items):
        outcome, summary = "yes", f"kept when the vocabularies differ, replaced when they have the same size: {where}"
        for file, fact in maps:
            evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
            check.lines(file, fact["line"], fact["end_line"])
    else:
        outcome, summary = "no", f"the target's lm_head replaces the drafter's without a question: {where}"
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


_SELECT = 'def init(config):\n    if config.method == "dflash":\n        return DFlashSpeculator(config)\n'


def _loader(
    body: str, path: str = "vllm/v1/worker/gpu/spec_decode/dflash/utils.py", select: str = _SELECT
) -> dict[str, str]:
    text = 'def load(target, draft):\n    """Load a dflash drafter."""\n    head = target.lm_head\n'
    return {
        "vllm/v1/worker/gpu/spec_decode/__init__.py": select,
        path: text + "".join(f"    {line}\n" for line in body.split("\n")),
    }


VALID = (
    Example(
        "guarded by the flag",
        _loader('if not getattr(draft, "has_own_lm_head", False):\n    draft.lm_head = head'),
        "yes",
    ),
    Example(
        "the flag decides through a name",
        _loader("share = not draft.has_own_lm_head\nif share and head is not None:\n    draft.lm_head = head"),
        "yes",
    ),
    Example(
        "the flag's name is an argument",
        _loader('if should_share(draft, "has_own_lm_head", head):\n    del draft.lm_head\n    draft.lm_head = head'),
        "yes",
    ),
    Example(
        "guarded by the vocabularies",
        _loader("if draft.vocab_size == target.vocab_size:\n    draft.lm_head = head"),
        "yes",
    ),
)
INVALID = (
    Example("replaced without a question", _loader("draft.lm_head = head"), "no"),
    Example(
        "only guarded against a missing head",
        _loader("if head is not None and draft.lm_head is not None:\n    draft.lm_head = head"),
        "no",
    ),
    Example(
        "the flag is read for something else",
        _loader("log(draft.has_own_lm_head)\nif head is not None:\n    draft.lm_head = head"),
        "no",
    ),
    Example("V2 has no dflash", _loader("draft.lm_head = head", select="x = 1\n"), "n/a"),
    Example("the loader is not to be found", _loader("return draft.attach(head)"), "unknown"),
)
