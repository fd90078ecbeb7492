"""The drafter proposes a tree: more than one candidate for a position, each with its parent.

Looked for by shape: level by level (several candidates for every node of a level, the parents' inputs repeated for
them, the model run
on the level) or best first (a heap that is popped and pushed in one loop, beside a list of parents). A beam search
that keeps one line in
the end, and a suffix tree that is only searched, are not proposals of a tree.

``yes`` when a documented configuration value, or nothing at all, is needed to get it (the value is named);
``partial`` when no drafter
leads to it, or only a switch that is off.
"""

from __future__ import annotations

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.examples import install
from rules.reach import reached_by_drafters
from rules.tree_shapes import builds

ID = "tree-build"
QUESTION = "Can a drafter of this install propose a tree?"
CHANGES_IF = "a plugin or a changed file brings a drafter that proposes a tree"
NEEDLES = (b"topk", b"heappush", b"heapreplace")  # the verbs that the two shapes can't do without


def extract(path: str, source: bytes) -> list[Fact]:
    return builds(source)


def judge(ctx: Context) -> Verdict:
    found = [(file, fact) for file, facts in ctx.facts(ID) for fact in facts]
    if not found:
        return Verdict(
            ID,
            "no",
            "no function expands several candidates per node, level by level or best first",
            scope=ctx.scope(),
            changes_if=CHANGES_IF,
        )
    reach = reached_by_drafters(ctx)
    states = [(file, fact, reach.get((file.path, fact["f"]))) for file, fact in found]
    states.sort(key=lambda s: (s[2] is None, bool(s[2] and s[2].off)))
    file, fact, how = states[0]
    where = f"{file.path}:{fact['l']} {fact['f']}"
    outcome: Outcome
    shape = "level by level" if fact["s"] == "levels" else "best first"
    if how is None:
        said, outcome = f"{where} proposes a tree {shape}, but no drafter of a runner leads to it", "partial"
    elif how.off:
        said, outcome = f"{where} proposes a tree {shape}, but only if `{how.off}`, which is off as shipped", "partial"
    else:
        value = f"; the configuration value `{fact['c']}` gives the tree" if fact["c"] else ""
        said, outcome = f"{where} proposes a tree {shape}{value}", "yes"
    return Verdict(
        ID,
        outcome,
        said,
        evidence=tuple(ctx.evidence(f, x["v"], min(x["e"], x["v"] + 30), x["f"]) for f, x, _ in states[:4]),
        scope=ctx.scope(),
        recheck=f"sed -n {fact['v']},{min(fact['e'], fact['v'] + 30)}p {file.path}" if file.origin == "vllm" else "",
        changes_if=CHANGES_IF,
        items=tuple(
            {
                "symbol": x["f"],
                "file": f.path,
                "line": x["l"],
                "shape": x["s"],
                "config": x["c"],
                "reachable": bool(r and not r.off),
            }
            for f, x, r in states
        ),
    )


_RUNNER = """
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.drafter import Drafter


    class GPUModelRunner:
        def __init__(self, config):
            self.sampler = Sampler()
            self.drafter = Drafter(config)
            self.rejection_sampler = RejectionSampler(self.sampler)

        def _sample(self, logits, metadata):
            return self.rejection_sampler(metadata, logits)

        def execute_model(self, batch):
            out = self._sample(batch.logits, batch.metadata)
            return out, self.drafter.propose(batch)
"""
_LEVELS = """
    import ast
    import torch


    class Drafter:
        def __init__(self, config):
            text = config.tree_of_tokens
            self.shape = ast.literal_eval(text)

        def propose(self, batch):
            return self.expand(batch.logits, batch.hidden)

        def expand(self, logits, h):
            got = []
            for width in self.shape:
                ids = torch.topk(logits, width, dim=-1).indices.view(-1)
                h = h.repeat_interleave(width, dim=0)
                got.append(ids)
                logits, h = self.model(input_ids=ids, hidden_states=h)
            return torch.cat(got)
"""
_HEAP = """
    import heapq


    class Drafter:
        def propose(self, batch):
            return grow(batch.logp, 16)


    def grow(logp, budget):
        todo = [(-float(p), 0, 1, int(t)) for p, t in zip(*logp[0].topk(4))]
        heapq.heapify(todo)
        tokens, above = [], []
        while todo and len(tokens) < budget:
            s, up, depth, tok = heapq.heappop(todo)
            tokens.append(tok)
            above.append(up)
            for p, t in zip(*logp[depth].topk(4)):
                heapq.heappush(todo, (s - float(p), len(tokens), depth + 1, int(t)))
        return tokens, above
"""
_LINE = """
    import torch


    class Drafter:
        def propose(self, batch):
            ids, h, out = batch.ids, batch.hidden, []
            for _ in range(self.k):
                logits, h = self.model(input_ids=ids, hidden_states=h)
                ids = logits.argmax(-1)
                out.append(ids)
            return torch.stack(out, 1)
"""
_SAMPLED_LINE = """
    import torch


    class Drafter:
        def propose(self, batch):
            ids, h, out = batch.ids, batch.hidden, []
            for _ in range(self.k):
                logits, h = self.model(input_ids=ids, hidden_states=h)
                best = logits.topk(self.top, dim=-1)
                ids = best.indices.gather(-1, torch.multinomial(best.values.softmax(-1), 1)).squeeze(-1)
                out.append(ids)
            return torch.stack(out, 1)
"""
_SCHEDULE = """
    import heapq


    class Drafter:
        def propose(self, batch):
            order, ready = [], [(p, r) for r, p in batch.priorities]
            heapq.heapify(ready)
            while ready:
                p, r = heapq.heappop(ready)
                order.append(r)
                if p > 0:
                    heapq.heappush(ready, (p - 1, r))
            return order
"""


def _with(drafter: str) -> dict[str, str]:
    return install(vllm__v1__worker__gpu_model_runner=_RUNNER, vllm__v1__spec_decode__drafter=drafter)


VALID = (
    Example("level by level, shape from the configuration", _with(_LEVELS), "yes", items=1),
    Example("best first", _with(_HEAP), "yes", items=1),
)
INVALID = (
    Example("one line", _with(_LINE), "no"),
    Example("one line, drawn from the best few", _with(_SAMPLED_LINE), "no"),
    Example("a heap that schedules", _with(_SCHEDULE), "no"),
    Example("no drafter", install(), "no"),
    Example("nothing leads to it", install(vllm__v1__spec_decode__drafter=_HEAP), "partial"),
)
