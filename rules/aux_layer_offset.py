"""DFlash checkpoints name the *outputs* of target layers (``target_layer_ids``), while vLLM captures the stream that
*enters* layer i. So the ids need +1 before hidden states are captured. Without it the drafter is fed one layer too
early: no error, only a lower acceptance length (mt-bench 3.92-4.03 instead of 4.11-4.16, vLLM pull request 40727).

The rule finds each function that reads ``target_layer_ids`` out of the drafter's ``dflash_config`` and hands the ids
on, and looks whether 1 is added on the way. ``len(ids)`` and the like hand nothing on. Checkpoints in speculators
format carry ``eagle_aux_hidden_state_layer_ids`` instead and are not concerned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import Part, guards, holding, names_in, parse, place, strings_in, walk
from rules.recheck import Recheck

if TYPE_CHECKING:
    import libcst as cst

ID = "aux-layer-offset"
QUESTION = "Do a DFlash drafter's target_layer_ids get their +1 before hidden states are captured?"
CHANGES_IF = (
    "the ids that are read from dflash_config pass (or stop passing) through an addition of 1 before they are returned"
)
NEEDLES = (b"target_layer_ids",)
_KEY = "target_layer_ids"


def extract(path: str, source: bytes) -> list[Fact]:
    return [fact for part in holding(source, _KEY, "return") if "dflash" in part.text.lower() for fact in _reads(part)]


def _reads(part: Part) -> list[Fact]:
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    key = m.SimpleString(value=m.MatchIfTrue(lambda text: text.strip("rbu\"'") == _KEY))
    reading = m.OneOf(
        m.Call(func=m.Attribute(attr=m.Name("get")), args=[m.Arg(key), m.ZeroOrMore()]),
        m.Call(func=m.Name("getattr"), args=[m.DoNotCare(), m.Arg(key), m.ZeroOrMore()]),
        m.Subscript(slice=[m.SubscriptElement(m.Index(key))]),
        m.Attribute(attr=m.Name(_KEY)),
    )
    stored = {id(t.target) for a in walk(function) if isinstance(a, cst.Assign) for t in a.targets}
    kinds = (cst.Call, cst.Subscript, cst.Attribute)
    found = [n for n in walk(function) if isinstance(n, kinds) and m.matches(n, reading)]
    reads: list[cst.CSTNode] = [r for r in found if id(r) not in stored and _of_dflash(function, r)]
    if not reads:
        return []
    carried, raised = _follow(function, reads)
    returned = [r for r in m.findall(function, m.Return()) if r.value and _mentions(r.value, carried, reads)]  # type: ignore[attr-defined]
    if not returned:
        return []
    first = min(lines(r)[0] for r in reads)
    last = max([lines(r)[1] for r in reads] + [lines(r)[1] for r in raised])
    return [place(part, "reads", (first, last), plus_one=bool(raised))]


def _of_dflash(function: cst.FunctionDef, read: cst.CSTNode) -> bool:
    """Whether the config that is read from is the drafter's ``dflash_config``."""
    import libcst as cst
    import libcst.matchers as m

    base: cst.CSTNode | None
    if isinstance(read, cst.Call):
        base = read.args[0].value if isinstance(read.func, cst.Name) else read.func.value  # type: ignore[attr-defined]
    else:
        base = read.value  # type: ignore[attr-defined]
    known = names_in(base) | strings_in(base) if base is not None else set()
    for assign in m.findall(function, m.Assign()):
        assert isinstance(assign, cst.Assign)
        if any(isinstance(t.target, cst.Name) and t.target.value in known for t in assign.targets):
            known |= names_in(assign.value) | strings_in(assign.value)
    return any("dflash" in word.lower() for word in known)


def _follow(function: cst.FunctionDef, reads: list[cst.CSTNode]) -> tuple[set[str], list[cst.CSTNode]]:
    """Names that the ids reach, and the additions of 1 that they pass through."""
    import libcst as cst
    import libcst.matchers as m

    carried: set[str] = set()
    elements: set[str] = set()
    raised: list[cst.CSTNode] = []
    one = m.Integer(value="1")
    nodes = list(walk(function))
    loops = [n for n in nodes if isinstance(n, (cst.CompFor, cst.For))]
    maps = [n for n in nodes if m.matches(n, m.Call(func=m.Name("map"), args=[m.Arg(m.Lambda()), m.AtLeastN(n=1)]))]
    added = m.OneOf(m.BinaryOperation(operator=m.Add(), right=one), m.BinaryOperation(operator=m.Add(), left=one))
    sums = [n for n in nodes if isinstance(n, cst.BinaryOperation) and m.matches(n, added)]
    assigns = [n for n in nodes if isinstance(n, (cst.Assign, cst.AnnAssign, cst.AugAssign)) and n.value is not None]
    verbs = m.OneOf(m.Name("append"), m.Name("extend"))
    growing = [n for n in nodes if m.matches(n, m.Call(func=m.Attribute(value=m.Name(), attr=verbs)))]
    for _ in range(4):  # names flow forward; a few rounds reach a fixpoint in functions of this size
        for loop in loops:
            if _mentions(loop.iter, carried, reads):
                elements |= names_in(loop.target)
        for call in maps:
            assert isinstance(call, cst.Call)
            if any(_mentions(a.value, carried, reads) for a in call.args[1:]):
                elements |= {p.name.value for p in call.args[0].value.params.params}  # type: ignore[attr-defined]
        for node in sums:
            if _mentions(node, carried | elements, reads) and not any(node is known for known in raised):
                raised.append(node)
        for assign in assigns:
            if assign.value is not None and _mentions(assign.value, carried | elements, reads):
                targets = [t.target for t in assign.targets] if isinstance(assign, cst.Assign) else [assign.target]
                carried |= {t.value for t in targets if isinstance(t, cst.Name)}
        for call in growing:
            assert isinstance(call, cst.Call)
            if any(_mentions(a.value, carried | elements, reads) for a in call.args):
                carried.add(call.func.value.value)  # type: ignore[attr-defined]
    return carried, [node for node in raised if not _never(function, node)]


def _never(function: cst.FunctionDef, node: cst.CSTNode) -> bool:
    """Whether an addition stands under ``if False`` or the like."""
    return any(not strings_in(t) and names_in(t) == {"False"} for t in guards(function, node))


def _mentions(node: cst.CSTNode, names: set[str], reads: list[cst.CSTNode]) -> bool:
    """Whether the ids themselves stand in an expression: counting them (``len``) passes no id on."""
    import libcst as cst
    import libcst.matchers as m

    if isinstance(node, cst.Call) and m.matches(node.func, m.OneOf(m.Name("len"), m.Name("isinstance"))):
        return False
    if any(node is read for read in reads) or (isinstance(node, cst.Name) and node.value in names):
        return True
    return any(_mentions(child, names, reads) for child in node.children)


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    found = [(file, fact) for file, facts in ctx.facts(ID) for fact in facts]
    check, evidence, items = Recheck(ctx), [], []
    for file, fact in found:
        runner = "V2" if "/worker/gpu/" in file.path else "V1" if file.origin == "vllm" else file.origin
        evidence.append(ctx.evidence(file, fact["line"], fact["end_line"], fact["symbol"]))
        check.lines(file, fact["line"], fact["end_line"])
        items.append(
            {
                "runner": runner,
                "plus_one": fact["plus_one"],
                "file": file.path,
                "line": fact["line"],
                "symbol": fact["symbol"],
            }
        )
    if not found:
        support = ctx.verdicts.get("dflash-support")
        if support is not None and support.outcome == "no":
            return Verdict(
                ID, "n/a", "this vLLM has no dflash method", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION
            )
        why = (
            "no function that hands target_layer_ids of a dflash_config on was found, so where the ids go can't be told"
        )
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    good = [item for item in items if item["plus_one"]]
    where = ", ".join(f"{i['runner']} {i['file']}:{i['line']}" for i in (good or items))
    outcome: Outcome
    if len(good) == len(items):
        outcome, summary = "yes", f"1 is added to the layer ids: {where}"
    elif good:
        bad = ", ".join(f"{i['runner']} {i['file']}:{i['line']}" for i in items if not i["plus_one"])
        outcome, summary = "partial", f"1 is added in {where}, but not in {bad}"
    else:
        outcome = "no"
        summary = (
            f"the layer ids are used as they stand, one layer too early for checkpoints with dflash_config: {where}"
        )
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


def _runner(body: str) -> dict[str, str]:
    text = "class Runner:\n    def layers(self, config):\n        extra = getattr(config, 'dflash_config', None)\n"
    return {"vllm/v1/worker/gpu_model_runner.py": text + "".join(f"        {line}\n" for line in body.splitlines())}


VALID = (
    Example(
        "one is added in a comprehension",
        _runner("return tuple(i + 1 for i in extra.get('target_layer_ids') or [])"),
        "yes",
        items=1,
    ),
    Example(
        "added by map, under another name",
        _runner("got = extra['target_layer_ids']\nreturn list(map(lambda q: 1 + q, got))"),
        "yes",
    ),
    Example(
        "added in a loop",
        _runner("out = []\nfor x in extra['target_layer_ids']:\n    out.append(x + 1)\nreturn out"),
        "yes",
    ),
    Example(
        "added to an array",
        _runner("ids = np.asarray(extra.get('target_layer_ids'))\nids = ids + 1\nreturn ids.tolist()"),
        "yes",
    ),
)
INVALID = (
    Example("used as they stand", _runner("ids = extra.get('target_layer_ids')\nreturn tuple(ids)"), "no", items=1),
    Example(
        "the comment says so, the code doesn't",
        _runner("# add 1\nids = extra['target_layer_ids']\nreturn [i for i in ids]"),
        "no",
    ),
    Example(
        "1 is added to something else",
        _runner("n = len(extra['target_layer_ids']) + 1\nreturn list(extra['target_layer_ids'])"),
        "no",
    ),
    Example("zero is added", _runner("return [i + 0 for i in extra['target_layer_ids']]"), "no"),
    Example(
        "switched off",
        _runner("ids = extra['target_layer_ids']\nif False:\n    ids = [i + 1 for i in ids]\nreturn ids"),
        "no",
    ),
    Example("only counted", _runner("return len(extra['target_layer_ids'])"), "n/a"),
    Example(
        "one runner has it, the other not",
        {
            **_runner("return [i + 1 for i in extra['target_layer_ids']]"),
            "vllm/v1/worker/gpu/utils.py": "def layers(c):\n    return c.dflash_config['target_layer_ids']\n",
        },
        "partial",
        items=2,
    ),
)
