"""Whether a kernel hands state from a parent's place to its own: a closer look at the few functions that stage 1
points at."""

from __future__ import annotations

from textwrap import dedent

from rules.facts.flow import Flow
from rules.facts.judging import Judge
from rules.facts.module import read_module
from rules.facts.places import at_one_place, direct_reads, steps_along
from rules.facts.values import D, I


def hands_on(lines: list[str]) -> bool:
    """The function (its lines) is a Triton kernel that, for each position, reads a buffer where a table says, and
    writes what it makes
    of that to another place of the same buffer. Reading and writing one place is an update, not a step from parent
    to child."""
    text = dedent("\n".join(lines))
    if "tl.load" not in text or "tl.store" not in text:
        return False
    try:
        module = read_module.__wrapped__(text.encode())
    except (SyntaxError, ValueError):
        return False
    return any(_parent_to_child(Flow(module, function)) for function in module.functions)


def _parent_to_child(flow: Flow) -> bool:
    look = Judge(flow)
    for loop, here in enumerate(flow.loops):
        if here.kind not in ("for", "while"):
            continue
        for number, node in enumerate(flow.nodes):
            if node.kind != "read" or not look.inside(node.loop, loop):
                continue
            index = frozenset(t for t, how in node.edges if how == I)
            tables = {r for r in direct_reads(look, index) if steps_along(look, r, loop) and at_one_place(look, r)}
            for write in flow.writes:
                if write.root != node.name or write.how != "store" or not look.inside(write.loop, loop):
                    continue
                elsewhere = tables - set(direct_reads(look, write.index))
                if elsewhere and number in look.below(write.value, frozenset({D})):
                    return True
    return False
