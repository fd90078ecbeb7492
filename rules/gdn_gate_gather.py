"""In a hybrid target's GDN layer, a batch that mixes speculative and other rows is split by two index tensors.
Everything the recurrence needs must be split: the packed q, k, v *and* the gates a and b. Where the gates of the
speculative rows are left in batch order, the state is updated with another token's gates: wrong text, and greedy
output that differs from the target's own (vLLM issue 51812, seen as 54928).

The rule looks at the layer that Qwen3-Next and Qwen3.5/3.6 use (other GDN layers are named as dismissed: they gather
in another form). Every tensor that is gathered for the non-speculative rows must be gathered for the speculative ones
too.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from reports.model import Dismissed, Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import Part, holding, parse, place, tree_of, walk
from rules.recheck import Recheck
from rules.tree import SourceFile

ID = "gdn-gate-gather"
QUESTION = "Are the gates of a GDN layer gathered for speculative rows, as its q, k, v are?"
CHANGES_IF = "the Qwen GDN layer gathers a and b by the index of the speculative rows (or stops doing so)"
NEEDLES = (b"spec_token_ind", b"mamba.gdn", b"gdn_linear_attn")
_ALIAS = re.compile(r"(\w+) = [\w.]*spec_token_ind")
_INDEX = re.compile(r"[\w.]*spec_token_ind\w*")
_MODELS = ("qwen3_next", "qwen3_5")


def extract(path: str, source: bytes) -> list[Fact]:
    found: list[Fact] = []
    if path.rsplit("/", 1)[-1].removesuffix(".py") in _MODELS:
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.ImportFrom) and node.module and "gdn" in node.module:
                found.append(
                    {"kind": "uses", "module": node.module, "names": [a.name for a in node.names], "line": node.lineno}
                )
    for part in holding(source, "spec_token_ind"):
        aliases = {*_ALIAS.findall(part.text), *_INDEX.findall(part.text)}
        if "index_select(" in part.text or any(f"[{name}]" in part.text for name in aliases):
            found += _gathers(part)
    return found


def _gathers(part: Part) -> list[Fact]:
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    index: dict[str, str] = {}  # local name -> "spec" or "rest"
    nodes = list(walk(function))
    for assign in nodes:
        if not isinstance(assign, cst.Assign) or not isinstance(assign.value, cst.Attribute):
            continue
        attr = assign.value.attr.value
        if "spec_token_ind" in attr and isinstance(assign.targets[0].target, cst.Name):
            index[assign.targets[0].target.value] = "rest" if "non" in attr else "spec"
    for param in function.params.params:
        if "spec_token_ind" in param.name.value:
            index[param.name.value] = "rest" if "non" in param.name.value else "spec"
    taken: dict[str, dict[str, int]] = {"spec": {}, "rest": {}}

    def take(tensor: str, by: cst.CSTNode, at: cst.CSTNode) -> None:
        rows = index.get(by.value) if isinstance(by, cst.Name) else None
        if isinstance(by, cst.Attribute) and "spec_token_ind" in by.attr.value:
            rows = "rest" if "non" in by.attr.value else "spec"
        if rows is not None:
            taken[rows].setdefault(tensor, lines(at)[0])

    for call in nodes:
        if not isinstance(call, cst.Call) or not m.matches(call, m.Call(func=m.Attribute(attr=m.Name("index_select")))):
            continue
        assert isinstance(call.func, cst.Attribute)
        if isinstance(call.func.value, cst.Name) and call.func.value.value != "torch":
            take(call.func.value.value, call.args[-1].value, call)
        elif len(call.args) >= 3 and isinstance(call.args[0].value, cst.Name):
            take(call.args[0].value.value, call.args[-1].value, call)
    for item in nodes:
        if not isinstance(item, cst.Subscript) or not isinstance(item.value, cst.Name):
            continue
        for element in item.slice:
            if isinstance(element.slice, cst.Index):
                take(item.value.value, element.slice.value, item)
    if not taken["spec"] or not taken["rest"]:
        return []
    every = [*taken["spec"].values(), *taken["rest"].values()]
    more: dict[str, Any] = {"spec": taken["spec"], "rest": taken["rest"]}
    return [place(part, "gathers", (min(every), max(every)), owner=part.owner, **more)]


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    found = [(file, f) for file, of_file in facts for f in of_file if f["kind"] == "gathers"]
    modules = {f["module"].replace(".", "/") + ".py" for _, of_file in facts for f in of_file if f["kind"] == "uses"}
    mine: list[tuple[SourceFile, Fact]] = []
    others: list[tuple[SourceFile, Fact]] = []
    for file, fact in found:
        (mine if _is_qwen(file, fact, modules) else others).append((file, fact))
    dismissed = tuple(
        Dismissed(
            file.path, fact["line"], fact["symbol"], "a gather of GDN inputs", "not the layer of Qwen3-Next and Qwen3.5"
        )
        for file, fact in others
    )
    if not mine:
        hybrid = any("qwen3_next" in f.path or "qwen3_5" in f.path for f in ctx.tree.files)
        unsure: Outcome = "unknown" if hybrid or found else "n/a"
        why = (
            "the Qwen GDN layer's gather was not found"
            if unsure == "unknown"
            else "this vLLM has no Qwen hybrid with GDN layers"
        )
        return Verdict(
            ID,
            unsure,
            why,
            "low" if unsure == "unknown" else "high",
            scope=ctx.scope(),
            dismissed=dismissed,
            changes_if=CHANGES_IF,
            question=QUESTION,
        )
    evidence, items, check = [], [], Recheck(ctx)
    for file, fact in mine:
        missing = sorted(set(fact["rest"]) - set(fact["spec"]))
        items.append(
            {
                "file": file.path,
                "symbol": fact["symbol"],
                "line": fact["line"],
                "gathered_for_spec": sorted(fact["spec"]),
                "gathered_for_rest": sorted(fact["rest"]),
                "missing": missing,
            }
        )
        rows = sorted([*fact["spec"].values(), *fact["rest"].values()])
        evidence.append(ctx.evidence(file, rows[0], rows[-1], fact["symbol"]))
        for line in dict.fromkeys(rows):
            check.lines(file, line, line)
    bad = [item for item in items if item["missing"]]
    where = ", ".join(f"{i['file']}:{i['line']}" for i in (bad or items))
    outcome: Outcome
    if not bad:
        outcome, summary = (
            "yes",
            f"all of {', '.join(items[0]['gathered_for_spec'])} are gathered for speculative rows: {where}",
        )
    else:
        outcome, summary = "no", f"{' and '.join(bad[0]['missing'])} are gathered for the other rows only: {where}"
    return Verdict(
        ID,
        outcome,
        summary,
        evidence=tuple(evidence),
        scope=ctx.scope(),
        dismissed=dismissed,
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=tuple(items),
        **check.done(),
    )


def _is_qwen(file: SourceFile, fact: Fact, modules: set[str]) -> bool:
    if modules:
        return file.path in modules
    other = any(word in (file.path + fact["owner"]).lower() for word in ("olmo", "kimi", "/cpu/"))
    return not other


_HEAD = """class GatedDeltaNet(Layer):
    def core(self, mixed, a, b, out, meta):
        picked = meta.spec_token_indx
        rest = meta.non_spec_token_indx
"""


def _layer(body: str, path: str = "vllm/layers/qwen_gdn.py") -> dict[str, str]:
    return {
        path: _HEAD + "".join(f"        {line}\n" for line in body.split("\n")),
        "vllm/models/qwen3_next.py": "x = 1\n",
    }


_REST = "m_r = mixed.index_select(0, rest)\na_r = a.index_select(0, rest)\nb_r = b.index_select(0, rest)"
VALID = (
    Example(
        "all three are gathered",
        _layer(
            _REST
            + "\nm_s = mixed.index_select(0, picked)\na_s = a.index_select(0, picked)\nb_s = b.index_select(0, picked)"
        ),
        "yes",
        items=1,
    ),
    Example(
        "by subscript", _layer("r = mixed[rest], a[rest], b[rest]\ns = mixed[picked], a[picked], b[picked]"), "yes"
    ),
    Example(
        "by torch.index_select",
        _layer("r = torch.index_select(a, 0, rest)\ns = torch.index_select(a, 0, picked)"),
        "yes",
    ),
)
INVALID = (
    Example("the gates stay in batch order", _layer(_REST + "\nm_s = mixed.index_select(0, picked)"), "no", items=1),
    Example("one of the gates is forgotten", _layer(_REST + "\nm_s = mixed[picked]\na_s = a[picked]"), "no"),
    Example(
        "only in a comment",
        _layer(_REST + "\nm_s = mixed[picked]\n# a.index_select(0, picked), b.index_select(0, picked)"),
        "no",
    ),
    Example("nothing is split by rows", _layer("return self.kernel(mixed, a, b)"), "unknown"),
    Example("no hybrid", {"vllm/a.py": "x = 1\n"}, "n/a"),
)
