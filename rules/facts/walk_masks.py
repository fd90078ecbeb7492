"""F3, F4: every path is compared and the best taken, or mismatches under an ancestor matrix rule nodes out."""

from __future__ import annotations

from rules.facts.judging import BEST, EQUALITY, PREFIX, REDUCE, Judge, Walk
from rules.facts.places import both_tables, direct_reads, made_walk, plain_parts
from rules.facts.values import ALL_EDGES, DATA, DATA_INDEX, C, D, I, P


def best_paths(look: Judge) -> list[Walk]:
    nodes = look.nodes
    for best in nodes:
        if best.kind != "call" or best.name not in BEST - {"amax"}:
            continue
        below = look.below([t for t, how in best.edges if how == D], DATA)
        counts = [i for i in below if nodes[i].kind == "call" and nodes[i].name in ("sum", "count_nonzero")]
        for count in counts:
            under = look.below([count], DATA)
            prefix = [i for i in under if nodes[i].kind == "call" and nodes[i].name in PREFIX]
            for first in prefix:
                verdicts = sorted(look.tokens[0] & look.below([first], DATA))
                if verdicts and (best.name in ("argmax", "argsort", "topk") or _used_as_index(look, best)):
                    return [
                        made_walk(
                            look,
                            "paths",
                            nodes[verdicts[0]].line,
                            best.line,
                            verdicts[0],
                            both_tables(look, verdicts[0]),
                        )
                    ]
    return []


def _used_as_index(look: Judge, best: object) -> bool:
    number = next(i for i, n in enumerate(look.nodes) if n is best)
    return any(
        number in look.below([t for t, how in n.edges if how == I], DATA) for n in look.nodes if n.kind == "read"
    )


def path_loops(look: Judge) -> list[Walk]:
    """W4 in loops: an inner loop compares along one path, the outer loop keeps the best path."""
    flow, nodes = look.flow, look.nodes
    for cmp in look.cmps:
        node = nodes[cmp]
        inner = node.loop
        if inner < 0 or flow.loops[inner].parent < 0 or cmp not in look.tokens[2]:
            continue
        outer = flow.loops[inner].parent
        rows = [r for side in (node.left, node.right) for r in look.top_reads(side)]
        if not any(_along_a_path(look, r, inner, outer) for r in rows):
            continue
        if _keeps_best(look, outer, cmp):
            loop = flow.loops[outer]
            return [made_walk(look, "paths", loop.line, loop.end, cmp, both_tables(look, cmp))]
    return []


def _along_a_path(look: Judge, read: int, inner: int, outer: int) -> bool:
    """The place is an element of the outer loop's row: read (or iterated) at the inner position, out of what the
    outer loop chose."""
    nodes, loops = look.nodes, look.flow.loops
    index = look.below([t for t, how in nodes[read].edges if how == I], DATA_INDEX)
    for step in index:
        node = nodes[step]
        if node.kind not in ("read", "iter") or not look.inside(node.loop, inner):
            continue
        below = look.below([t for t, _ in node.edges], DATA_INDEX)
        position = (
            node.kind == "iter"
            or not loops[inner].var.isdisjoint(below)
            or bool(set(loops[inner].phis.values()) & below)
        )
        if position and not loops[outer].var.isdisjoint(below):
            return True
    return False


def _keeps_best(look: Judge, outer: int, verdict: int) -> bool:
    flow, nodes = look.flow, look.nodes
    loop = flow.loops[outer]
    for phi in loop.phis.values():
        for cmp in look.cmps:
            node = nodes[cmp]
            if node.name not in ("Gt", "Lt", "GtE", "LtE") or node.loop != outer:
                continue
            if phi not in plain_parts(look, node.left | node.right):
                continue
            for chosen in nodes:
                if chosen.kind == "sel" and (cmp, P) in chosen.edges and chosen.loop == outer:
                    return True
    for best in nodes:
        if best.kind == "call" and best.name in BEST:
            below = look.below([t for t, how in best.edges if how == D], ALL_EDGES)
            if verdict in below and not look.inside(best.loop, outer):
                return True
    return False


def ancestor_masks(look: Judge) -> list[Walk]:
    nodes = look.nodes
    tokens = frozenset(c for c in look.tokens[0] if nodes[c].name in EQUALITY)
    if not tokens:
        return []
    for chosen in nodes:
        if chosen.kind != "call" or chosen.name not in BEST | {"nonzero"}:
            continue
        below = look.below([t for t, how in chosen.edges if how == D], frozenset({D, P, C}))
        if tokens.isdisjoint(below):
            continue
        for number in below:
            mix = nodes[number]
            masked = mix.kind == "bin" and mix.name in "&|*@"
            picked = mix.kind == "sel" and mix.name in ("where", "masked_fill")
            if not (masked or picked):
                continue
            if masked:
                sides = [mix.left, mix.right] if mix.right else [frozenset({t}) for t in mix.left]
            else:
                sides = [mix.left, frozenset(t for t, how in mix.edges if how == D)]
            for verdict_side in sides:
                verdicts = sorted(tokens & look.below(verdict_side, DATA))
                if not verdicts:
                    continue
                matrix = look.below(frozenset().union(*(s for s in sides if s is not verdict_side)), DATA)
                if not tokens.isdisjoint(matrix):
                    continue
                cmp = verdicts[0]
                tables = {nodes[i].name for i in matrix if nodes[i].kind in ("root", "param", "read")}
                if tables - both_tables(look, cmp) and _reduced(look, below, number):
                    gathered = cmp in look.tokens[1]
                    return [
                        made_walk(
                            look,
                            "ancestors",
                            nodes[cmp].line,
                            chosen.line,
                            cmp,
                            tables | both_tables(look, cmp),
                            weak=not gathered,
                        )
                    ]
    return []


def ancestor_bits(look: Judge) -> list[Walk]:
    """F4 in integers: mismatches are gathered into one word (or set), and a node is out if any of its ancestors is
    in it."""
    nodes = look.nodes
    if not look.tokens[2]:
        return []
    gathered = {c for c in look.tokens[2] if nodes[c].name in EQUALITY and _read_under_a_table(look, c)}
    for number, mix in enumerate(nodes) if gathered else ():
        if mix.kind != "bin" or mix.name not in "&|" or not mix.right:
            continue
        for side, other in ((mix.left, mix.right), (mix.right, mix.left)):
            verdicts = sorted(gathered & look.below(side, frozenset({D, P})))
            matrix = look.top_reads(other)
            if not verdicts or not matrix or not gathered.isdisjoint(look.below(other, frozenset({D, P}))):
                continue
            decides = any(
                (n.kind == "sel" and number in look.below([t for t, how in n.edges if how == P], frozenset({D, C})))
                for n in nodes
            )
            if decides and nodes[verdicts[0]].loop != mix.loop:
                tables = {nodes[r].name for r in matrix}
                return [
                    made_walk(
                        look,
                        "ancestors",
                        nodes[verdicts[0]].line,
                        mix.line,
                        verdicts[0],
                        tables | both_tables(look, verdicts[0]),
                    )
                ]
    return []


def _read_under_a_table(look: Judge, cmp: int) -> bool:
    node = look.nodes[cmp]
    for read in (*look.top_reads(node.left), *look.top_reads(node.right)):
        index = frozenset(t for t, how in look.nodes[read].edges if how == I)
        if direct_reads(look, index) or any(
            look.nodes[i].kind == "iter" and not look.nodes[i].name.startswith(".") for i in plain_parts(look, index)
        ):
            return True
    return False


def matrix_steps(look: Judge) -> list[Walk]:
    """W5 as algebra: a matrix of accepted edges (a parent table set against positions, and two token streams set
    against each other) is applied to the reached nodes again and again."""
    nodes, flow = look.nodes, look.flow
    tokens = [c for c in look.tokens[0] if nodes[c].name in EQUALITY]
    edges = [c for c in look.cmps if nodes[c].name in ("Eq", "In") and _against_positions(look, c)]
    for number, step in enumerate(nodes) if tokens and edges else ():
        if step.kind != "bin" or step.name != "@" or step.loop < 0:
            continue
        for state, matrix in ((step.left, step.right), (step.right, step.left)):
            below = look.below(matrix, DATA)
            token = next((c for c in tokens if c in below), None)
            if token is None or not any(e in below and e != token for e in edges):
                continue
            for phi in flow.loops[step.loop].phis.values():
                if phi in look.below(state, DATA) and number in look.below([t for t, _ in nodes[phi].edges], DATA):
                    loop = flow.loops[step.loop]
                    return [made_walk(look, "parents", loop.line, loop.end, token, both_tables(look, token))]
    return []


def _against_positions(look: Judge, cmp: int) -> bool:
    """One side is nothing but positions (arange), the other comes from a table."""
    node = look.nodes[cmp]
    for mine, other in ((node.left, node.right), (node.right, node.left)):
        kinds = {look.nodes[i].kind for i in look.below(mine, DATA)}
        if "affine" in kinds and kinds <= {"affine", "call", "bin"} and look.tops(other):
            return True
    return False


def _reduced(look: Judge, below: frozenset[int], mix: int) -> bool:
    """Between the masking and the choice, a reduction over ancestors: all, any, a product, or a matrix product set
    against a number."""
    nodes = look.nodes
    for number in below:
        node = nodes[number]
        if node.kind == "call" and node.name in REDUCE and mix in look.below([number], DATA):
            return True
        if nodes[mix].name == "@" and node.kind == "cmp" and mix in look.below([number], frozenset({D, C})):
            return True
    return False
