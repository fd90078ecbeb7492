"""Acceptance that follows a tree: after a draft token is accepted, the next comparison happens at a place that the
tree's own tables
(children, siblings, parents, paths, an ancestor mask) name, not simply at the next position.

The question is about shape, not names. Every function of every file is read as dataflow (docs/audit-anchors.md §2):
a walk is a cycle
through at least one index, with two token streams set against each other at the place that the cycle leads to. A
chain has no such
cycle. A walk counts only where it is reachable from the sampler that a runner constructs, is given by its sampler
hook, or a plugin
puts in place.

``yes``: a walk is reachable. ``partial``: one is there, but nothing leads to it, or only through a switch that is
off as shipped.
``no``: none in scope. ``unknown``: a file in the way could not be read, or acceptance goes through code whose source
isn't here.
"""

from __future__ import annotations

from typing import Any

from reports.model import Confidence, Dismissed, Verdict
from rules.acceptance import (
    PROSE,
    accepts,
    dismiss,
    evidence,
    item,
    near_misses,
    runners_without_acceptance,
    slice_of,
    unread_in_slice,
)
from rules.base import Context, Example
from rules.examples import ENTRY, REGISTERS, elsewhere, install, plugged_in, subclassed, switched
from rules.examples_walks import CHAINS, LOOKALIKES, WALKS
from rules.opaque import hidden_acceptance

ID = "tree-walk"
QUESTION = "Does any acceptance that the runner in force can reach follow a tree?"
CHANGES_IF = (
    "a plugin in vllm.general_plugins or a file that differs from RECORD brings a walk; or a live probe accepts "
    "different paths for two sibling drafts at one position"
)


def judge(ctx: Context) -> Verdict:
    walks = accepts(ctx, "walk")
    live = [w for w in walks if w.state == "in"]
    off = [w for w in walks if w.state == "off" and not w.weak]
    idle = [w for w in walks if w.state == "out" and not w.weak]
    dismissed = [
        dismiss(
            w, "a walk along links", f"not reached from a sampler, no second token stream for certain: {PROSE[w.shape]}"
        )
        for w in walks
        if w.weak and w.state != "in"
    ]
    chains = [c for c in accepts(ctx, "chain") if c.state != "out"]
    dismissed += [dismiss(c, "acceptance", f"a chain: {PROSE['chain']}") for c in chains]
    dismissed += near_misses(ctx)
    found = live or off or idle
    recheck, expect = _recheck(ctx)
    common: dict[str, Any] = {
        "evidence": tuple(evidence(ctx, w) for w in found[:8]),
        "scope": ctx.scope(),
        "dismissed": tuple(_ordered(dismissed)),
        "recheck": recheck,
        "recheck_expect": expect,
        "changes_if": CHANGES_IF,
        "items": tuple(item(w) for w in found),
    }
    if live:
        first = live[0]
        confidence: Confidence = "medium" if all(w.weak for w in live) else "high"
        via = " > ".join(first.reached.via) if first.reached else ""
        said = f"{first.where()} walks a tree ({PROSE[first.shape]}), reached through {via}"
        return Verdict(ID, "yes", said + _more(len(live)), confidence, **common)
    hidden = hidden_acceptance(ctx)
    unread = unread_in_slice(ctx)
    if off:
        switch = off[0].reached.off if off[0].reached else ""
        said = f"{off[0].where()} walks a tree ({PROSE[off[0].shape]}), but only if `{switch}`, which is off as shipped"
        return Verdict(ID, "partial", said + _more(len(off)), **common)
    lost = runners_without_acceptance(ctx)
    if unread or hidden or lost:
        if unread:
            why = f"could not be read: {', '.join(unread[:3])}"
        else:
            why = hidden[0] if hidden else f"the {lost[0]} runner is in force, and no accept function of it was found"
        return Verdict(
            ID,
            "unknown",
            f"no walk in what could be read, but acceptance can't be followed to its end: {why}",
            "low",
            **common,
        )
    if idle:
        said = (
            f"{idle[0].where()} has the shape of a tree walk ({PROSE[idle[0].shape]}), "
            "but no sampler of a runner leads to it"
        )
        return Verdict(ID, "partial", said + _more(len(idle)), **common)
    reach = slice_of(ctx)
    said = (
        f"no acceptance follows a tree: {len(chains)} accept functions reachable, all chains; "
        f"{ctx.scope().functions_examined} functions of {ctx.scope().files_parsed} files examined"
    )
    if not reach.roots:
        return Verdict(
            ID,
            "unknown",
            "no runner that constructs a sampler was found, so nothing says what is reachable",
            "low",
            **common,
        )
    return Verdict(ID, "no", said, **common)


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def _ordered(dismissed: list[Dismissed]) -> list[Dismissed]:
    """Places where people look first, then the rest; at most 60."""
    first = ("vllm/v1/sample/", "vllm/v1/worker/", "vllm/v1/spec_decode/")
    return sorted(dismissed, key=lambda d: (not d.file.startswith(first), d.file, d.line))[:60]


def _recheck(ctx: Context) -> tuple[str, str]:
    """By hand: every place where a value is read at a place that was itself read, in the files that acceptance goes
    through."""
    paths = sorted({a.file.path for kind in ("chain", "walk") for a in accepts(ctx, kind) if a.state != "out"})
    if not paths:
        return "", ""
    pattern = "parent|child|sibling|ancestor|next_token|retriev|tree"
    count = sum(len([1 for line in _lines(ctx, path) if _matches(line)]) for path in paths)
    return f"cat {' '.join(paths)} | grep -ciE '{pattern}' || true", str(count)


def _lines(ctx: Context, path: str) -> list[str]:
    file = ctx.file(path)
    if file is None:
        return []
    try:
        return ctx.tree.read(file.sha256).decode("utf-8", "replace").split("\n")
    except OSError:
        return []


def _matches(line: str) -> bool:
    lower = line.lower()
    return any(word in lower for word in ("parent", "child", "sibling", "ancestor", "next_token", "retriev", "tree"))


_W = WALKS["triton-child-and-sibling"]
_FAR = """
    from vllm.v1.sample.steps import below


    def accept(kids, tok, tgt):
        x, out = 0, []
        while True:
            x = below(x, kids, tok, tgt)
            if x < 0:
                return out
            out.append(x)
"""
_STEPS = """
    def fits(c, x, tok, tgt):
        return tok[c] == tgt[x]


    def below(x, kids, tok, tgt):
        for c in kids[x]:
            if fits(c, x, tok, tgt):
                return c
        return -1
"""
_ENVS = """
import os

environment_variables = {
    "VLLM_X_TREE": lambda: bool(int(os.getenv("VLLM_X_TREE", "0"))),
}
"""
_RUNNER_OF_ITS_OWN = """
    from extra.walking import accept
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


    class Mine(GPUModelRunner):
        def _sample(self, logits, metadata):
            return accept(*metadata.tables, logits.argmax(-1))


    def register():
        import vllm.v1.worker.gpu_worker as worker

        worker.GPUModelRunner = Mine
"""


def _chosen(walk: str) -> dict[str, str]:
    """The runner takes its sampler from a table of classes."""
    files = install(CHAINS["zip-and-break"], vllm__v1__sample__walking=walk, vllm__v1__worker__gpu_worker="")
    runner = files["vllm/v1/worker/gpu_model_runner.py"]
    files["vllm/v1/sample/other.py"] = (
        files["vllm/v1/sample/rejection_sampler.py"]
        .replace("vllm.v1.sample.accepting", "vllm.v1.sample.walking")
        .replace("class RejectionSampler", "class Other")
    )
    files["vllm/v1/worker/gpu_model_runner.py"] = runner.replace(
        "from vllm.v1.sample.sampler import Sampler\n",
        "from vllm.v1.sample.other import Other\nfrom vllm.v1.sample.sampler import Sampler\n\n"
        'KINDS = {"a": RejectionSampler, "b": Other}\n',
    ).replace(
        "self.rejection_sampler = RejectionSampler(self.sampler)",
        "made = KINDS[config.kind]\n        self.rejection_sampler = made(self.sampler)",
    )
    return files


VALID = (
    *(Example(f"in the sampler: {name}", install(source), "yes") for name, source in WALKS.items()),
    *(Example(f"plugin {name}", plugged_in(_W, hook), "yes", entry_points=ENTRY) for name, hook in REGISTERS.items()),
    *(
        Example(f"in a subclass: {name}", subclassed(WALKS[name]), "yes")
        for name in ("dict-of-children", "paths-and-cumprod")
    ),
    Example("the step is another file's function", install(_FAR, vllm__v1__sample__steps=_STEPS), "yes"),
    Example(
        "two files away",
        install(
            _FAR.replace("sample.steps", "sample.more"),
            vllm__v1__sample__steps=_STEPS,
            vllm__v1__sample__more="from vllm.v1.sample.steps import below\n",
        ),
        "yes",
    ),
    Example("chosen from a table", _chosen(WALKS["objects"]), "yes"),
    Example("a plugin's own runner", plugged_in(_W, _RUNNER_OF_ITS_OWN), "yes", entry_points=ENTRY),
    Example("switch that is on", switched(_W, "TREE = True", "TREE"), "yes"),
    Example("configuration decides", switched(_W, "", "metadata.method == 'tree'"), "yes"),
)
INVALID = (
    *(Example(f"chain: {name}", install(source), "no") for name, source in CHAINS.items()),
    *(Example(f"looks like one: {name}", install(source), "no") for name, source in LOOKALIKES.items()),
    *(
        Example(f"nothing leads to it: {name}", elsewhere(WALKS[name]), "partial")
        for name in (
            "dict-of-children",
            "triton-child-table",
            "triton-compares-parents",
            "parents-in-order",
            "pointer-doubling",
            "paths-in-loops",
        )
    ),
    Example("constant is off", switched(_W, "TREE = False", "TREE"), "partial"),
    Example("environment is off", switched(_W, "TREE = os.environ.get('X_TREE', '0') == '1'", "TREE"), "partial"),
    Example("environment is off, asked in place", switched(_W, "", "int(os.getenv('X_TREE', '0'))"), "partial"),
    Example(
        "vLLM's table of environment variables says off",
        {**switched(_W, "import vllm.envs as envs", "envs.VLLM_X_TREE"), "vllm/envs.py": _ENVS},
        "partial",
    ),
    Example(
        "an attribute of the sampler is off",
        switched(_W, "", "self.follow")
        | {
            "vllm/v1/sample/rejection_sampler.py": switched(_W, "", "self.follow")[
                "vllm/v1/sample/rejection_sampler.py"
            ].replace("self.sampler = sampler", "self.sampler = sampler\n        self.follow = False")
        },
        "partial",
    ),
    Example("environment must be there", switched(_W, "", "'X_TREE' in os.environ"), "partial"),
    Example("plugin that is never entered", plugged_in(_W, REGISTERS["setattr on the runner"]), "partial"),
    Example(
        "plugin that registers nothing", plugged_in(_W, "def register():\n    pass\n"), "partial", entry_points=ENTRY
    ),
    Example("a sampler that can't be parsed", install("def accept(:\n"), "unknown"),
    Example("no runner", {"vllm/v1/sample/accepting.py": CHAINS["cumprod"]}, "unknown"),
)
