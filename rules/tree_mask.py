"""Attention can let a query see its ancestors only: a matrix between queries that is not just causal, made from a tree.

Three things are looked for: functions that make an ancestor mask (a node's row is its parent's row and itself; a
matrix set at each
node's ancestors; a climb from parent to parent), attention kernels that take a matrix between queries, and callers
that pass one.
``yes``: a mask is made and attention gets it. ``partial``: the kernel could take one, and nobody passes it; or a
mask is made and
nothing uses it. Arguments that are merely called ``tree_mask`` count for nothing.
"""

from __future__ import annotations

from reports.model import Dismissed, Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.examples import install
from rules.reach import named_by
from rules.tree import SourceFile
from rules.tree_shapes import masks

ID = "tree-mask"
QUESTION = "Can attention show a node its ancestors only?"
CHANGES_IF = (
    "a plugin or a changed file brings a backend with an ancestor mask, or passes one to a kernel that takes it"
)
NEEDLES = (b"mask", b"bias", b"<<", b"[parent", b"append", b"while ")


def extract(path: str, source: bytes) -> list[Fact]:
    return masks(source) if b"torch" in source or b"numpy" in source or b"triton" in source or b"<<" in source else []


def judge(ctx: Context) -> Verdict:
    made: list[tuple[SourceFile, Fact]] = []
    kernels: list[tuple[SourceFile, Fact]] = []
    passed: list[tuple[SourceFile, Fact]] = []
    for file, facts in ctx.facts(ID):
        for fact in facts:
            {"mask": made, "bias": kernels, "pass": passed}[fact["k"]].append((file, fact))
    made = [(f, x) for f, x in made if _about_attention(ctx, f.path)]
    given = [(f, x) for f, x in passed if any(x["p"] == k["p"] for _, k in kernels)]
    dismissed = tuple(
        Dismissed(f.path, x["v"], x["to"], "a tree mask", "an argument of that name; no mask is made from a tree here")
        for f, x in passed
        if "tree" in x["p"]
    )
    users = [(f, x, named_by(ctx, f.path)) for f, x in made]
    live = [(f, x, u) for f, x, u in users if u[0]]
    evidence = tuple(ctx.evidence(f, x["l"], x["e"], x["f"]) for f, x in [*made[:3], *kernels[:2]])
    evidence += tuple(ctx.evidence(f, x["v"], x["v"] + 3, x["to"]) for f, x in given[:3])
    if live or given:
        if live:
            file, fact, (_, name) = live[0]
            said = f"{file.path}:{fact['l']} {fact['f']} makes an ancestor mask"
            said += f", used by the backend `{name}`" if name else ""
        else:
            file, fact = given[0]
            said = f"{file.path}:{fact['v']} passes a mask between queries ({fact['p']}={fact['x']}) to attention"
        outcome: Outcome = "yes"
    elif kernels:
        names = sorted({k["p"] for _, k in kernels})
        file, fact = kernels[0]
        said = (
            f"an attention kernel takes a matrix between queries (`{', '.join(names)}`, {file.path}:{fact['l']}), "
            "and nobody passes one"
        )
        outcome = "partial"
    elif made:
        said, outcome = (
            f"{made[0][0].path}:{made[0][1]['l']} {made[0][1]['f']} makes an ancestor mask that nothing uses",
            "partial",
        )
    else:
        said, outcome = "no ancestor mask is made, and no attention kernel takes a matrix between queries", "no"
    names = sorted({k["p"] for _, k in kernels})
    command = (
        f"grep -rnE '{'|'.join(names)} *=' vllm --include='*.py' | "
        f"grep -vE '({'|'.join(names)}) *= *(None|\\1)' || true"
        if names
        else ""
    )
    return Verdict(
        ID,
        outcome,
        said,
        evidence=evidence,
        scope=ctx.scope(),
        dismissed=dismissed[:20],
        recheck=command,
        changes_if=CHANGES_IF,
    )


def _about_attention(ctx: Context, path: str) -> bool:
    """Compilers, parsers and pixel code have matrices of ancestors too; this is about what attention and drafting
    use."""
    aside = (
        "vllm/compilation/",
        "vllm/multimodal/",
        "vllm/tool_parsers/",
        "vllm/parser/",
        "vllm/entrypoints/",
        "vllm/distributed/",
    )
    return not path.startswith(aside)


_BACKEND = """
    import torch


    class Backend:
        def __init__(self, up):
            self.allowed = visible(up)

        def forward(self, q, k, v):
            s = (q @ k.transpose(-1, -2)).masked_fill(~self.allowed, float("-inf"))
            return s.softmax(-1) @ v


    def visible(up):
        m = torch.zeros(len(up), len(up), dtype=torch.bool)
        for i in range(len(up)):
            {body}
        return m
"""
_USER = """
    BACKENDS = dict(OTHER="vllm.v1.attention.other.Backend")
"""


def _backend(body: str, **more: str) -> dict[str, str]:
    return install(vllm__v1__attention__other=_BACKEND.replace("{body}", body), **more)


_KERNEL = """
    import triton
    import triton.language as tl


    @triton.jit
    def tile(extra_row_ptrs, keys, context, stride):
        rel = keys - context
        ok = (rel >= 0) & (rel < stride)
        return tl.load(extra_row_ptrs + rel[None, :], mask=ok[None, :], other=0.0)


    def attention(q, k, v, extra_bias=None):
        return launch(q, k, v, extra_bias=extra_bias)
"""
_ROWS = "m[i, i] = True\n            m[i] |= m[up[i]]"
_CLIMB = "j = i\n            while j >= 0:\n                m[i, j] = True\n                j = up[j]"
_PREFIXES = """above = []
            for d in range(len(paths[i])):
                above.append(paths.index(paths[i][:d]))
            m[i, above] = True"""
_NAMED = """
    import torch


    def f(q, tree_mask):
        return torch.ops._C.extend(q, tree_mask=tree_mask.int())
"""
VALID = (
    Example("a row is the parent's row", _backend(_ROWS, vllm__v1__attention__registry=_USER), "yes"),
    Example("a climb to the root", _backend(_CLIMB, vllm__v1__attention__registry=_USER), "yes"),
    Example("prefixes of paths", _backend(_PREFIXES, vllm__v1__attention__registry=_USER), "yes"),
)
INVALID = (
    Example("nothing uses it", _backend(_ROWS), "partial"),
    Example("causal", _backend("m[i, : i + 1] = True", vllm__v1__attention__registry=_USER), "no"),
    Example(
        "a sliding window", _backend("m[i, max(0, i - 4) : i + 1] = True", vllm__v1__attention__registry=_USER), "no"
    ),
    Example("an argument called tree_mask", install(vllm__custom_ops=_NAMED), "no"),
    Example("nothing of the kind", install(), "no"),
)
