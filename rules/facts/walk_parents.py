"""W3, F2, W5: the next place is searched for in a parent table, or a node is accepted if its parent is."""

from __future__ import annotations

from rules.facts.judging import EQUALITY, Judge, Walk
from rules.facts.places import both_tables, made_walk, plain_parts, steps_along
from rules.facts.values import ALL_EDGES, DATA, DATA_INDEX, C, D, I, P


def searches(look: Judge, loop: int) -> list[Walk]:
    flow, nodes = look.flow, look.nodes
    here = flow.loops[loop]
    if here.kind == "comp":
        return []
    found: list[Walk] = []
    for name, phi in here.phis.items():
        finders: list[int] = []
        finder_tables: set[str] = set()
        for cmp in look.cmps:
            node = nodes[cmp]
            if node.name not in ("Eq", "NotEq", "In", "NotIn") or not look.inside(node.loop, loop):
                continue
            for mine, other in ((node.left, node.right), (node.right, node.left)):
                plain = plain_parts(look, mine)
                if phi in plain and not plain_parts(look, other) & {phi} and look.tops(other) - {name}:
                    finders.append(cmp)
                    finder_tables |= look.tops(other)
        if not finders:
            continue
        ends = [t for t, how in nodes[phi].edges if how in (D, P)]
        decided = look.below(ends, ALL_EDGES)
        finders = [c for c in finders if c in decided]
        if not finders:
            continue
        written = look.written(loop)
        for cmp in look.cmps:
            node = nodes[cmp]
            if cmp in finders or not look.inside(node.loop, loop) or cmp not in decided or cmp not in look.tokens[1]:
                continue
            reads = [
                r for r in (*look.top_reads(node.left), *look.top_reads(node.right)) if nodes[r].name not in written
            ]
            at = [r for r in reads if _at(look, r, {phi})]
            if at and _together(look, cmp, finders, phi) and not both_tables(look, cmp) <= finder_tables:
                found.append(
                    made_walk(look, "search", here.line, here.end, cmp, both_tables(look, cmp) | finder_tables)
                )
                break
    return found


def _at(look: Judge, read: int, places: set[int]) -> bool:
    index = [t for t, how in look.nodes[read].edges if how == I]
    return not places.isdisjoint(look.below(index, DATA_INDEX))


def _together(look: Judge, cmp: int, finders: list[int], phi: int) -> bool:
    """Both comparisons decide the same choice of the next place."""
    for node in look.nodes:
        if node.kind in ("sel", "upd", "call", "bin", "phi", "read"):
            kinds = ALL_EDGES if node.kind in ("sel", "upd", "phi") else frozenset({D, C})
            direct = look.below([t for t, how in node.edges if how in kinds], frozenset({D, P}))
            if cmp in direct and any(f in direct for f in finders):
                return True
    return False


def parent_loops(look: Judge, loop: int) -> list[Walk]:
    flow, nodes = look.flow, look.nodes
    here = flow.loops[loop]
    found: list[Walk] = []
    written = look.written(loop)
    for name, phi in here.phis.items():
        if name not in written:
            continue
        for read, node in enumerate(nodes):
            if not look.inside(node.loop, loop):
                continue
            if node.kind == "read":
                base = {t for t, how in node.edges if how == D}
                index = [t for t, how in node.edges if how == I]
            elif node.kind == "cmp" and node.name in ("In", "NotIn"):
                base, index = set(node.right), list(node.left)
            else:
                continue
            if phi not in look.below(base, DATA) or not index:
                continue
            links = {
                nodes[r].name
                for r in look.top_reads(frozenset(index))
                if nodes[r].name not in written
                and not _is_of(look, r, phi)
                and look.inside(nodes[r].loop, loop)
                and steps_along(look, r, loop)
            }
            if not links:
                continue
            back = look.below([t for t, how in nodes[phi].edges], frozenset({D, P, C}))
            if read not in back:
                continue
            cmp = _token_verdict(look, links, written, loop, back)
            if cmp is not None:
                found.append(made_walk(look, "parents", here.line, here.end, cmp, links | both_tables(look, cmp)))
                return found
    return found


def _is_of(look: Judge, read: int, phi: int) -> bool:
    return phi in look.below([t for t, how in look.nodes[read].edges if how == D], DATA)


def _token_verdict(look: Judge, links: set[str], written: set[str], loop: int, back: frozenset[int]) -> int | None:
    """A comparison of two streams that decides what the round writes; one side read under the parent table, here or
    before the loop."""
    nodes = look.nodes
    for cmp in look.cmps:
        node = nodes[cmp]
        if (
            node.name in ("In", "NotIn")
            or (node.name not in EQUALITY and not look.is_random(node.left | node.right))
            or cmp not in back
            or cmp not in look.tokens[2]
        ):
            continue
        if both_tables(look, cmp) & written - links:
            continue
        for side in (node.left, node.right):
            for read in look.top_reads(side):
                index = look.below([t for t, how in nodes[read].edges if how == I], DATA_INDEX)
                names = {nodes[i].name for i in index if nodes[i].kind in ("read", "root", "param", "iter")}
                if names & links and nodes[read].name not in links:
                    return cmp
    return None


def parent_jumps(look: Judge) -> list[Walk]:
    """W5: acceptance of whole vectors, and-ed with itself read at the parents, in a loop or written out."""
    nodes = look.nodes
    found: list[Walk] = []
    for number, node in enumerate(nodes):
        if node.kind != "bin" or node.name not in "&*" or not node.left | node.right:
            continue
        for read in look.top_reads(frozenset(t for t, how in node.edges if how == D)):
            if nodes[read].kind != "read":
                continue
            index = [t for t, how in nodes[read].edges if how == I]
            base = [t for t, how in nodes[read].edges if how == D]
            made_of = look.below(base, frozenset({D}))
            verdicts = [c for c in look.tokens[1] if c in made_of and nodes[c].name in EQUALITY]
            if not verdicts or not index:
                continue
            at = look.below(index, DATA_INDEX)
            affine = all(
                nodes[i].kind in ("affine", "phi", "fresh") or (nodes[i].kind == "bin" and nodes[i].name in "+-")
                for i in at
            )
            other = look.below([t for t, how in node.edges if how == D and t != read], DATA)
            if affine or not any(c in other for c in look.cmps):
                continue
            links = {nodes[i].name for i in at if nodes[i].kind in ("root", "param", "read")}
            for cmp in verdicts:
                for side in (nodes[cmp].left, nodes[cmp].right):
                    for r in look.top_reads(side):
                        below = look.below([t for t, how in nodes[r].edges if how == I], DATA_INDEX)
                        if links & {nodes[i].name for i in below if nodes[i].kind in ("root", "param", "read")}:
                            again = (
                                number in made_of
                                or node.loop >= 0
                                or any(
                                    n.kind == "bin" and n.name in "&*" and i != number and i in made_of
                                    for i, n in enumerate(nodes)
                                )
                            )
                            if again and not any(f.verdict == nodes[cmp].line for f in found):
                                found.append(
                                    made_walk(
                                        look, "parents", nodes[cmp].line, node.line, cmp, links | both_tables(look, cmp)
                                    )
                                )
    return found
