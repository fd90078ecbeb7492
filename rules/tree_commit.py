"""What is kept after acceptance is the accepted path, by index: KV slots (and hidden states) of accepted nodes are
gathered to where the
next step expects them. A chain needs none of it: it keeps the first n positions, by count.

This is a witness of its own beside ``tree-walk``: a tree walk without it loses most of what it accepts, and the two
disagreeing is a
finding. ``yes``: rows are moved by a list of indices in code that belongs to a reachable walk (its file, its
package, or what calls it).
``partial``: such code is there, but not on the way. ``no``: acceptance is committed by count alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reports.model import Dismissed, Evidence, Verdict
from rules.acceptance import accepts, slice_of
from rules.base import Context, Example, Fact
from rules.examples import install
from rules.examples_walks import WALKS
from rules.tree import SourceFile
from rules.tree_shapes import commits

ID = "tree-commit"
QUESTION = "Is the accepted path committed by index, not by count?"
CHANGES_IF = "a plugin or a changed file gathers KV slots by accepted node index"
NEEDLES = (b"tl.load", b"index_select", b"gather", b"index_copy_", b"copy_", b", :", b":, ", b"...,", b"take")
_COUNT = re.compile(
    r"num_computed_tokens\w*(\[[^\]]*\])? *-= *\w*reject\w*|num_rejected\w* *= *\w+ *- *num_sampled\w*"
)
_COUNTED_IN = (
    "vllm/v1/core/sched/scheduler.py",
    "vllm/v1/worker/gpu/input_batch.py",
    "vllm/v1/worker/gpu_model_runner.py",
)


def extract(path: str, source: bytes) -> list[Fact]:
    return commits(source)


def judge(ctx: Context) -> Verdict:
    moves = [(file, fact) for file, facts in ctx.facts(ID) for fact in facts]
    walks = [w for w in accepts(ctx, "walk") if w.state == "in"]
    idle = [w for w in accepts(ctx, "walk") if w.state != "in" and not w.weak]
    step = slice_of(ctx).step
    places = {(w.file.path.rpartition("/")[0], w.file.origin) for w in (*walks, *idle)}
    near = [
        (f, x) for f, x in moves if (f.path.rpartition("/")[0], f.origin) in places or f.origin != "vllm" or not f.stock
    ]
    live = [(f, x) for f, x in near if walks and _on_the_way(ctx, f, x, step)]
    counted = _counts(ctx)
    aside = [(f, x) for f, x in moves if (f, x) not in near and f.path.startswith("vllm/v1/")]
    dismissed = tuple(
        Dismissed(
            f.path,
            x["l"],
            x["f"],
            "a commit by index",
            "moves rows of a batch or copies within a buffer; belongs to no tree walk",
        )
        for f, x in aside[:20]
    )
    found = live or near
    evidence = tuple(ctx.evidence(f, x["l"], min(x["e"], x["l"] + 40), x["f"]) for f, x in found[:4]) or counted
    common: dict[str, Any] = {
        "evidence": evidence,
        "scope": ctx.scope(),
        "dismissed": dismissed,
        "changes_if": CHANGES_IF,
    }
    recheck = (
        f"grep -nE '{_COUNT.pattern.replace(chr(92) + 'w', '[A-Za-z_]')}' {' '.join(sorted({e.file for e in counted}))}"
        if counted
        else ""
    )
    common["recheck"] = recheck
    if live:
        f, x = live[0]
        return Verdict(
            ID,
            "yes",
            f"{f.path}:{x['l']} {x['f']} keeps rows by accepted index, beside a reachable tree walk",
            "medium",
            **common,
        )
    if near:
        f, x = near[0]
        why = "no reachable tree walk asks for it" if not walks else "nothing on the way from acceptance leads to it"
        return Verdict(ID, "partial", f"{f.path}:{x['l']} {x['f']} moves rows by index, but {why}", "medium", **common)
    where = f" ({counted[0].file}:{counted[0].line})" if counted else ""
    said = f"acceptance is committed by count{where}: no code of a tree walk gathers what it accepted"
    if walks:
        said = (
            f"there is a tree walk ({walks[0].where()}), and no commit by index beside it: "
            "accepted branches other than the first would be lost"
        )
    return Verdict(ID, "no", said, "medium" if walks else "high", **common)


def _on_the_way(ctx: Context, file: SourceFile, fact: Fact, step: Mapping[tuple[str, str], object]) -> bool:
    return (file.path, fact["f"]) in step


def _counts(ctx: Context) -> tuple[Evidence, ...]:
    """Where the number of accepted tokens, not which, moves a request on."""
    found: list[Evidence] = []
    for path in _COUNTED_IN:
        file = ctx.file(path)
        if file is None:
            continue
        try:
            lines = ctx.tree.read(file.sha256).decode("utf-8", "replace").split("\n")
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if _COUNT.search(line):
                found.append(ctx.evidence(file, number, number + 1, "commit by count"))
                break
    return tuple(found)


_RUNNER = """
    from vllm.v1.sample.keeping import keep
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler


    class GPUModelRunner:
        def __init__(self, config):
            self.sampler = Sampler()
            self.rejection_sampler = RejectionSampler(self.sampler)

        def _sample(self, logits, metadata):
            return self.rejection_sampler(metadata, logits)

        def execute_model(self, batch):
            path = self._sample(batch.logits, batch.metadata)
            {call}
            return path
"""
_KEEP = """
    import torch


    def keep(kv, where, path):
        {body}
"""


def _kept(
    body: str, walk: str = WALKS["dict-of-children"], call: str = "keep(self.kv, batch.slots, path)"
) -> dict[str, str]:
    return install(
        walk,
        vllm__v1__worker__gpu_model_runner=_RUNNER.replace("{call}", call),
        vllm__v1__sample__keeping=_KEEP.replace("{body}", body),
    )


_TRITON = """
    import triton
    import triton.language as tl


    @triton.jit
    def move(kv, rows, start, S: tl.constexpr, B: tl.constexpr):
        i = tl.program_id(0)
        src = tl.load(rows + i)
        lane = tl.arange(0, B)
        x = tl.load(kv + src * S + lane)
        tl.store(kv + (start + i) * S + lane, x)


    def keep(kv, where, path):
        move[(len(path),)](kv, path, where, kv.stride(0), 128)
"""
_SWAP = "def swap(x, i, j):\n    x[i, :] = x[j, :]\n"
VALID = (
    Example("index_copy of an index_select", _kept("kv.index_copy_(0, where, kv.index_select(0, path))"), "yes"),
    Example("slots assigned from slots", _kept("kv[:, where] = kv[:, path]"), "yes"),
    Example("the kept part copied down", _kept("kv[:, : len(path)].copy_(kv[:, path])"), "yes"),
    Example(
        "a Triton kernel",
        install(
            WALKS["dict-of-children"],
            vllm__v1__worker__gpu_model_runner=_RUNNER.replace("{call}", "keep(self.kv, batch.slots, path)"),
            vllm__v1__sample__keeping=_TRITON,
        ),
        "yes",
    ),
)
INVALID = (
    Example("a chain, by count", install(), "no"),
    Example("a walk, by count", install(WALKS["dict-of-children"]), "no"),
    Example("a walk that keeps the first ones", _kept("kv[:, len(path) :] = 0"), "no"),
    Example("nothing calls it", _kept("kv[:, where] = kv[:, path]", call="pass").copy(), "partial"),
    Example("rows of a batch are swapped", install(vllm__v1__worker__batch=_SWAP), "no"),
)
