"""Linear-attention layers (GDN, Mamba) can read their state at a node's parent, not only at the last accepted token:
a kernel that, for
each position, takes the state from a place that a table names (the parent's) and writes the position's own state
beside it.

Stock vLLM picks one starting state per request, by the number of accepted tokens, and goes on along the chain: that
is ``no``, however
often ``num_accepted_tokens`` occurs. ``partial``: such a kernel is there and nothing calls it.
"""

from __future__ import annotations

from typing import Any

from reports.model import Verdict
from rules.base import Context, Example
from rules.examples import install
from rules.reach import lines_of, named_by
from rules.state_flow import hands_on

ID = "hybrid-tree-state"
QUESTION = "Can GDN or Mamba state be read at a node's parent?"
CHANGES_IF = "a plugin or a changed file brings recurrent or convolution kernels that take a parent table"


def judge(ctx: Context) -> Verdict:
    found = [
        (file, fact)
        for file, facts in ctx.facts("shapes")
        for fact in facts
        if fact["k"] == "state" and hands_on(lines_of(ctx, file)[fact["l"] - 1 : fact["e"]])
    ]
    users = [(f, x, named_by(ctx, f.path)[0]) for f, x in found]
    users.sort(key=lambda u: not u[2])
    common: dict[str, Any] = {
        "evidence": tuple(ctx.evidence(f, x["l"], min(x["e"], x["l"] + 60), x["f"]) for f, x, _ in users[:4]),
        "scope": ctx.scope(),
        "changes_if": CHANGES_IF,
        "items": tuple({"symbol": x["f"], "file": f.path, "line": x["l"], "used": bool(u)} for f, x, u in users),
    }
    if not users:
        said = "no kernel hands state on along a table of parents: recurrent state follows the chain"
        return Verdict(ID, "no", said, **common)
    file, fact, user = users[0]
    where = f"{file.path}:{fact['l']} {fact['f']}"
    if not user:
        return Verdict(
            ID, "partial", f"{where} hands state on along a table, and nothing imports it", "medium", **common
        )
    return Verdict(
        ID, "yes", f"{where} reads each position's state where a table says ({user} uses it)", "medium", **common
    )


_KERNEL = """
    import triton
    import triton.language as tl


    @triton.jit
    def recur(q, k, v, g, state, {extra}out, T, D: tl.constexpr):
        r = tl.program_id(0)
        lane = tl.arange(0, D)
        {before}
        for t in range(T):
            {body}
            h = h * tl.load(g + r * T + t) + tl.load(k + (r * T + t) * D + lane) * tl.load(v + (r * T + t) * D + lane)
            tl.store(out + (r * T + t) * D + lane, h * tl.load(q + (r * T + t) * D + lane))
            {after}
"""
_USER = "from vllm.v1.gdn import recur\n"


def _gdn(extra: str, before: str, body: str, after: str, user: str = _USER) -> dict[str, str]:
    text = (
        _KERNEL.replace("{extra}", extra).replace("{before}", before).replace("{body}", body).replace("{after}", after)
    )
    return install(vllm__v1__gdn=text, **({"vllm__v1__layer": user} if user else {}))


_STORE = "tl.store(state + (r * T + t) * D + lane, h)"
_BY_PARENT = (
    "up, ",
    "pass",
    "p = tl.load(up + r * T + t)\n            h = tl.load(state + (r * T + p) * D + lane)",
    _STORE,
)
_BY_COUNT = "h = tl.load(state + (r * T + tl.load(n_acc + r) - 1) * D + lane)"
VALID = (
    Example("state taken at the parent", _gdn(*_BY_PARENT), "yes"),
    Example(
        "through a slot table",
        _gdn("slots, ", "pass", "h = tl.load(state + tl.load(slots + r * T + t) * D + lane)", _STORE),
        "yes",
    ),
)
INVALID = (
    Example("nothing uses it", _gdn(*_BY_PARENT, user=""), "partial"),
    Example("one start by accepted count", _gdn("n_acc, ", _BY_COUNT, "pass", _STORE), "no"),
    Example("along the chain", _gdn("", "h = tl.zeros([D], tl.float32)", "pass", "pass"), "no"),
    Example("nothing of the kind", install(), "no"),
)
