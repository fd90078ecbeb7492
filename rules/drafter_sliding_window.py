"""DFlash drafters for Qwen3.6 and others mix full and sliding-window layers (``layer_types``, a window of 2048 or
4096). A vLLM that ignores this runs full attention that the drafter was not trained for: acceptance falls as the
context grows past the window, without a word (vLLM pull requests 40898, 46104, 47914).

The rule finds the drafter's model through the architecture registry and asks whether the window that its attention is
built with comes from the checkpoint's ``layer_types``. ``items`` say what happens to a drafter whose layers are all
sliding, and to one that mixes them (honoured, honoured on V2 only, or refused at start-up: some releases honour one
and refuse the other).
"""

from __future__ import annotations

import ast
import re

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.parts import Part, holding, parse, parts, place, strings_in, text_of, tree_of
from rules.recheck import Recheck
from rules.tree import SourceFile

ID = "drafter-sliding-window"
QUESTION = "Does the DFlash drafter honour layer_types and its sliding window?"
CHANGES_IF = "the drafter's attention is built with a window taken from layer_types (or no longer is)"
NEEDLES = (b"DFlash",)
_ARCHITECTURE = "DFlashDraftModel"
_WINDOWS = {"sliding_window", "swa_window_size"}


def extract(path: str, source: bytes) -> list[Fact]:
    found: list[Fact] = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == _ARCHITECTURE and isinstance(value, ast.Tuple):
                    names = [e.value for e in value.elts if isinstance(e, ast.Constant)]
                    if len(names) == 2:
                        found.append(
                            {
                                "kind": "registered",
                                "module": names[0],
                                "class": names[1],
                                "symbol": _ARCHITECTURE,
                                "line": key.lineno,
                                "end_line": key.lineno,
                            }
                        )
        elif isinstance(node, ast.ClassDef) and "DFlash" in node.name:
            found.append({"kind": "class", "symbol": node.name, "line": node.lineno, "end_line": node.lineno})
    if any(f["kind"] == "class" for f in found):
        for part in parts(source):
            if re.search(r"\bAttention\(", part.text):
                found += _attention(part)
        for part in holding(source, "layer_types"):
            found += _layer_types(part)
    return found


def _attention(part: Part) -> list[Fact]:
    """The constructions of an attention layer, and the window that each is given."""
    import libcst.matchers as m

    function, lines = parse(part)
    found = []
    for call in m.findall(function, m.Call(func=m.OneOf(m.Name("Attention"), m.Attribute(attr=m.Name("Attention"))))):
        window = ""
        for argument in call.args:  # type: ignore[attr-defined]
            name = argument.keyword.value if argument.keyword is not None else ""
            if "sliding_window" in name and not m.matches(argument.value, m.Name("None")):
                window = text_of(argument.value)
        found.append(place(part, "attention", lines(call), window=window))
    return found


def _layer_types(part: Part) -> list[Fact]:
    """A function that reads ``layer_types`` and the window, and whether it refuses a mix."""
    import libcst as cst
    import libcst.matchers as m

    function, lines = parse(part)
    words = strings_in(function) | {n.attr.value for n in m.findall(function, m.Attribute())}  # type: ignore[attr-defined]
    mixed, at = "honoured", [0, 0]
    for branch in m.findall(function, m.If()):
        assert isinstance(branch, cst.If)
        refusals = [
            r
            for r in m.findall(branch.body, m.Raise())
            if "NotImplementedError" in text_of(r) or "mixed" in text_of(r).lower()
        ]
        if refusals:
            mixed = "on V2 only" if "v2_model_runner" in text_of(branch.test) else "refused"
            at = [lines(branch.test)[0], lines(refusals[0])[1]]
    if "layer_types" not in words:
        return []
    return [place(part, "layer_types", window=bool(words & _WINDOWS), mixed=mixed, mixed_at=at)]


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    registered = [(file, f) for file, found in facts for f in found if f["kind"] == "registered"]
    drafter = _drafter(facts, registered)
    if drafter is None:
        support = ctx.verdicts.get("dflash-support")
        absent = support is not None and support.outcome == "no"
        why = "this vLLM has no dflash drafter" if absent else f"the model of {_ARCHITECTURE} was not found"
        return Verdict(
            ID,
            "n/a" if absent else "unknown",
            why,
            "high" if absent else "low",
            scope=ctx.scope(),
            changes_if=CHANGES_IF,
            question=QUESTION,
        )
    file, found = drafter
    attention = [f for f in found if f["kind"] == "attention"]
    readers = [f for f in found if f["kind"] == "layer_types" and f["window"]]
    windowed = [f for f in attention if f["window"]]
    check, evidence = Recheck(ctx), []
    for where, fact in registered:
        check.lines(where, fact["line"], fact["end_line"])
    for fact in [*attention, *readers]:
        last = fact["end_line"] if fact["kind"] == "attention" else max(fact["line"], fact["mixed_at"][1])
        evidence.append(ctx.evidence(file, fact["line"], last, fact["symbol"]))
    for fact in attention:
        check.lines(file, fact["line"], fact["end_line"])
    check.count(file, "layer_types").count(file, "sliding_window")
    if not attention:
        return Verdict(
            ID,
            "unknown",
            f"no attention layer is built in {file.path}",
            "low",
            tuple(evidence),
            ctx.scope(),
            changes_if=CHANGES_IF,
            question=QUESTION,
            **check.done(),
        )
    outcome: Outcome
    if windowed and readers:
        mixed = readers[0]["mixed"]
        outcome = "yes"
        summary = f"the window comes from layer_types ({file.path}:{readers[0]['line']})"
        summary += {
            "honoured": "",
            "refused": "; a drafter that mixes full and sliding layers is refused at start-up, on every runner",
        }.get(mixed, "; one that mixes full and sliding layers needs the V2 runner")
        if readers[0]["mixed_at"][0]:
            check.lines(file, *readers[0]["mixed_at"])
        items = ({"layers": "all sliding", "answer": "honoured"}, {"layers": "mixed", "answer": mixed})
    else:
        what = "a window that doesn't come from layer_types" if windowed else "no window"
        outcome, summary = (
            "no",
            (
                f"the drafter's attention is built with {what} "
                f"({file.path}:{attention[0]['line']}): every layer attends to everything"
            ),
        )
        items = ({"layers": "all sliding", "answer": "ignored"}, {"layers": "mixed", "answer": "ignored"})
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


def _drafter(
    facts: list[tuple[SourceFile, list[Fact]]], registered: list[tuple[SourceFile, Fact]]
) -> tuple[SourceFile, list[Fact]] | None:
    """The file of the class that the registry names; without a registry, the one file that defines a DFlash model
    with attention."""
    for _, entry in registered:
        for file, found in facts:
            module = entry["module"].replace(".", "/") + ".py"
            if file.path.endswith(f"/{module.rsplit('/', 1)[-1]}") and any(
                f["kind"] == "class" and f["symbol"] == entry["class"] for f in found
            ):
                return file, found
    models = [(file, found) for file, found in facts if any(f["kind"] == "attention" for f in found)]
    return models[0] if len(models) == 1 and not registered else None


_REGISTRY = {
    "vllm/model_executor/models/registry.py": (
        '_MODELS = {\n    "DFlashDraftModel": ("dflash_model", "DFlashForCausalLM"),\n}\n'
    )
}


def _model(window: str, resolve: str = "", name: str = "dflash_model") -> dict[str, str]:
    body = "".join(f"    {line}\n" for line in resolve.split("\n")) if resolve else "    return None\n"
    text = (
        f"def resolve(config, i):\n{body}\n\nclass Block:\n"
        "    def __init__(self, config, i):\n        w = resolve(config, i)\n"
        f"        self.attn = Attention(8, 64{window})\n\n\nclass DFlashForCausalLM:\n"
        "    block = Block\n"
    )
    return {**_REGISTRY, f"vllm/model_executor/models/{name}.py": text}


_READ = (
    'kinds = getattr(config, "layer_types", None)\n'
    'if kinds is None or kinds[i] != "sliding_attention":\n    return None\n'
    "return config.sliding_window"
)
_MIX = (
    "kinds = config.layer_types\n"
    'if 0 < sum(k == "sliding_attention" for k in kinds) < len(kinds){0}:\n'
    '    raise NotImplementedError("mixed layers")\nreturn config.sliding_window'
)
VALID = (
    Example("per layer", _model(", per_layer_sliding_window=w", _READ), "yes", items=2),
    Example("a mix is refused", _model(", per_layer_sliding_window=w", _MIX.format("")), "yes", items=2),
    Example(
        "a mix needs V2",
        _model(", per_layer_sliding_window=w", _MIX.format(" and not current.use_v2_model_runner")),
        "yes",
    ),
    Example(
        "another window key",
        _model(
            ", per_layer_sliding_window=w",
            _READ.replace("config.sliding_window", 'config.dflash_config["swa_window_size"]'),
        ),
        "yes",
    ),
)
INVALID = (
    Example("all layers see everything", _model(""), "no", items=2),
    Example("read, and never used", _model("", _READ), "no"),
    Example("None is not a window", _model(", per_layer_sliding_window=None", _READ), "no"),
    Example("one window for all layers", _model(", per_layer_sliding_window=w", "return config.sliding_window"), "no"),
    Example(
        "registered, but the model is not there",
        {
            **_REGISTRY,
            "vllm/config/speculative.py": 'class SpeculativeConfig:\n    method: Literal["dflash"]  # DFlash\n',
        },
        "unknown",
    ),
)
