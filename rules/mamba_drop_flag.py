"""With prefix caching, the cache of recurrent (Mamba, GDN) state is told whether the last block must be dropped
because a drafter's state in it depends on the next token. The Mamba manager's ``find_longest_cache_hit`` takes that
flag and, in every release looked at, never reads it (vLLM issue 48375), so a hybrid target can restore a state that
is one block too far.

The rule finds the cache manager for Mamba state by shape (its lookup asserts a Mamba spec, or its class is named so)
and asks whether the flag is used for anything but an assertion.
"""

from __future__ import annotations

import re
from typing import Any

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import Part, holding, parse, place
from rules.recheck import Recheck

ID = "mamba-drop-flag"
QUESTION = "Does the Mamba cache manager use the flag that tells it to drop the last block?"
CHANGES_IF = "the lookup of the Mamba cache manager reads its flag"
NEEDLES = (b"find_longest_cache_hit",)
_ASSERTED = re.compile(r"assert isinstance\(\s*\w+,\s*\w*Mamba")


def extract(path: str, source: bytes) -> list[Fact]:
    found = []
    for part in holding(source, "find_longest_cache_hit", "kv_cache_spec"):
        if part.name == "find_longest_cache_hit" and (_ASSERTED.search(part.text) or "Mamba" in part.owner):
            found.append(_flag(part))
    return found


def _flag(part: Part) -> Fact:
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    boolean = m.Param(annotation=m.Annotation(m.Name("bool")))
    flags = [p.name.value for p in m.findall(function.params, boolean)]  # type: ignore[attr-defined]
    named = [f for f in flags if "eagle" in f or "drop" in f] or flags
    idle = [n for kind in (m.Assert(), m.Del()) for n in m.findall(function.body, kind)]
    silent = {id(n) for node in idle for n in m.findall(node, m.Name())}
    for assign in m.findall(function.body, m.Assign(targets=[m.AssignTarget(m.Name("_"))])):
        silent |= {id(n) for n in m.findall(assign, m.Name())}
    keywords = {id(a.keyword) for a in m.findall(function.body, m.Arg(keyword=m.Name()))}  # type: ignore[attr-defined]
    used: list[cst.CSTNode] = [
        n
        for n in m.findall(function.body, m.Name(value=m.MatchIfTrue(lambda v: v in named)))
        if id(n) not in silent | keywords
    ]
    asserted = any(m.findall(node, m.Name(value=m.MatchIfTrue(lambda v: v in named))) for node in idle)
    start = lines(function.params)[0]
    more: dict[str, Any] = {
        "flags": named,
        "uses": sorted({lines(n)[0] for n in used}),
        "asserted": asserted,
        "params": list(lines(function.params)),
    }
    return place(part, "lookup", (start, part.end_line), **more)


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    found = [(file, fact) for file, facts in ctx.facts(ID) for fact in facts]
    if not found:
        why = "no cache manager for Mamba state was found"
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    evidence, items, check = [], [], Recheck(ctx)
    for file, fact in found:
        evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
        first, last = fact["params"]
        items.append(
            {
                "file": file.path,
                "line": fact["line"],
                "symbol": fact["symbol"],
                "flag": fact["flags"],
                "used_at": fact["uses"],
            }
        )
        check.lines(file, first, last)
        for line in fact["uses"]:
            check.lines(file, line, line)
        for flag in fact["flags"]:
            hits = sum(
                flag in row
                for row in ctx.tree.read(file.sha256).decode("utf-8", "replace").split("\n")[last : fact["end_line"]]
            )
            name = check._path(file)
            check.shell(
                f"sed -n {last + 1},{fact['end_line']}p {name} | {{ grep -c -w -F -e {flag} || :; }}", f"{hits}\n"
            )
    where = ", ".join(f"{i['symbol']} ({i['file']}:{i['line']})" for i in items)
    outcome: Outcome
    if any(not i["flag"] for i in items):
        outcome, summary = "unknown", f"the lookup takes no flag: {where}"
    elif all(i["used_at"] for i in items):
        outcome, summary = "yes", f"the flag is used: {where}"
    else:
        flag = ", ".join(sorted({f for i in items for f in i["flag"]}))
        outcome, summary = "no", f"the lookup takes {flag} and never uses it: {where}"
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


def _manager(body: str, flag: str = "drop_last: bool, ") -> dict[str, str]:
    text = f"""class StateManager(Base):
    @classmethod
    def find_longest_cache_hit(cls, hashes, kv_cache_spec, {flag}pool):
        assert isinstance(kv_cache_spec, MambaSpec)
        found = ([],)
""" + "".join(f"        {line}\n" for line in body.split("\n"))
    return {"vllm/v1/core/managers.py": text}


VALID = (
    Example("the last hit is dropped", _manager("if drop_last and found[0]:\n    found[0].pop()\nreturn found"), "yes"),
    Example("it shortens the search", _manager("n = len(hashes) - int(drop_last)\nreturn search(found, n)"), "yes"),
    Example("handed on", _manager("return super().lookup(found, drop_last)"), "yes"),
)
INVALID = (
    Example("taken and never read", _manager("return found"), "no"),
    Example("only in a comment", _manager("# drop_last: nothing to do\nreturn found"), "no"),
    Example(
        "only asserted and thrown away",
        _manager("assert not drop_last\n_ = drop_last\ndel drop_last\nreturn found"),
        "no",
    ),
    Example("only the name of somebody else's argument", _manager("return search(found, drop_last=False)"), "no"),
    Example("no flag", _manager("return found", ""), "unknown"),
    Example("no such manager", {"vllm/a.py": "def find_longest_cache_hit(kv_cache_spec): ...\n"}, "unknown"),
)
