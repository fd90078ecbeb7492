"""Chains: positions are compared one after another, or all at once and cut at the first mismatch."""

from __future__ import annotations

from rules.facts.judging import EQUALITY, PREFIX, Judge, Walk
from rules.facts.places import at_one_place, both_tables, counts_up, plain_parts, steps_along
from rules.facts.values import DATA, C, D, P

FIRST_PLACE = frozenset({"nonzero", "argmin", "argmax", "argwhere", "flatnonzero", "where"})


def chains(look: Judge) -> list[Walk]:
    flow, nodes = look.flow, look.nodes
    found: list[Walk] = []
    first, last = flow.lines
    for loop, here in enumerate(flow.loops):
        if here.kind not in ("for", "while") or not first <= here.line <= last:  # a helper's own loop is the helper's
            continue
        deciders: list[int] = []
        changed = {w.root for w in flow.writes if not w.mask and w.how != "attr" and look.inside(w.loop, loop)}
        for cmp in look.cmps:
            node = nodes[cmp]
            if not look.inside(node.loop, loop) or cmp not in look.tokens[2]:
                continue
            if both_tables(look, cmp) & changed:
                continue
            reads = [r for s in (node.left, node.right) for r in look.top_reads(s)]
            at = [r for r in reads if steps_along(look, r, loop) and at_one_place(look, r)]
            random = look.is_random(node.left) or look.is_random(node.right)
            if len({nodes[r].name for r in at if not nodes[r].name.startswith(".")}) >= 2 or (at and random):
                deciders.append(cmp)
        if not deciders:
            continue
        kept = [c for c in deciders if _stops(look, loop, c)]
        if kept and _sinks(look, loop, kept):
            accepts = tuple(dict.fromkeys(_chain_accepts(look, c) for c in kept))
            first = kept[0]
            tables = set().union(*(both_tables(look, c) for c in kept))
            found.append(Walk("chain", here.line, here.end, nodes[first].line, tuple(sorted(tables)), accepts=accepts))
    if not found:
        found += _chain_vectors(look)
    return found[:1]


def _chain_accepts(look: Judge, cmp: int) -> str:
    node = look.nodes[cmp]
    if node.name in EQUALITY:
        return "greedy"
    below = {
        look.nodes[i].name for i in look.below(node.left | node.right, DATA) if look.nodes[i].kind in ("bin", "call")
    }
    return (
        "ratio" if below & {"/", "log", "exp"} else "synthetic" if look.is_random(node.left | node.right) else "other"
    )


def _stops(look: Judge, loop: int, cmp: int) -> bool:
    """The comparison ends the run: a flag that the next round reads, a break, or a masked write."""
    nodes, flow = look.nodes, look.flow
    for number, here in enumerate(flow.loops):
        if not look.inside(number, loop):
            continue
        if any(cmp in look.below(e, frozenset({D, P, C})) for e in here.exits):
            return True
        for phi in here.phis.values():
            back = look.below([t for t, how in nodes[phi].edges if t > phi], frozenset({D, P}))
            if cmp in back and _is_flag(look, phi, loop):
                return True
    here = flow.loops[loop]
    if any(
        n.kind == "sel"
        and (cmp, P) in n.edges
        and not here.var.isdisjoint(plain_parts(look, frozenset(t for t, how in n.edges if how == D)))
        for n in nodes
    ):
        return True  # the last position that passed is kept
    return any(
        look.inside(w.loop, loop) and w.mask and cmp in look.below(w.mask, frozenset({D, P})) for w in flow.writes
    )


def _is_flag(look: Judge, phi: int, loop: int) -> bool:
    """Something in the loop is done or not by this name's value."""
    for node in look.nodes:
        tests = [t for t, how in node.edges if how == P] if node.kind in ("sel", "upd") else []
        if tests and look.inside(node.loop, loop) and phi in look.below(tests, frozenset({D, C})):
            return True
    return any(look.inside(w.loop, loop) and phi in look.below(w.under, frozenset({D, C})) for w in look.flow.writes)


def _sinks(look: Judge, loop: int, kept: list[int]) -> bool:
    """The loop hands out tokens that it read at its own position, rewrites a stream that it compares, or counts and
    returns the count."""
    nodes, flow = look.nodes, look.flow
    compared = set().union(*(both_tables(look, c) for c in kept))
    for write in flow.writes:
        if not look.inside(write.loop, loop) or write.how == "attr":
            continue
        if write.root in compared and write.mask:
            return True
        if any(
            nodes[r].kind in ("read", "iter") and steps_along(look, r, loop) and at_one_place(look, r)
            for r in look.made_of(write.value)
        ):
            return True
    returned = look.below(flow.returned, DATA)
    return any(counts_up(look, phi) and phi in returned for phi in flow.loops[loop].phis.values())


def _chain_vectors(look: Judge) -> list[Walk]:
    nodes = look.nodes
    for number, node in enumerate(nodes):
        if node.kind != "call" or node.name not in PREFIX | FIRST_PLACE:
            continue
        below = look.below([t for t, how in node.edges if how == D], DATA)
        verdicts = sorted(look.tokens[0].intersection(below))
        if not verdicts:
            continue
        if node.name in PREFIX:
            summed = any(
                n.kind == "call"
                and n.name in ("sum", "argmin", "all", "count_nonzero")
                and number in look.below([i], DATA)
                for i, n in enumerate(nodes)
            )
            if not summed:
                continue
        elif not any(_finds_mismatch(look, node.name, c) for c in verdicts):
            continue
        cmp = verdicts[0]
        return [
            Walk(
                "chain",
                nodes[cmp].line,
                node.line,
                nodes[cmp].line,
                tuple(sorted(both_tables(look, cmp))),
                accepts=(_chain_accepts(look, cmp),),
            )
        ]
    return []


def _finds_mismatch(look: Judge, finder: str, cmp: int) -> bool:
    """The finder gives the first place where the comparison says no: the first False of "same", the first True of
    "differs"."""
    node = look.nodes[cmp]
    if node.name not in EQUALITY:
        return look.is_random(node.left | node.right)
    return (finder == "argmin") == (node.name in ("Eq", "In"))
