"""Where a value was read: directly under a table, at a loop's own position, at one place or at many."""

from __future__ import annotations

from collections.abc import Iterable

from rules.facts.judging import EQUALITY, Judge, Walk
from rules.facts.values import DATA, DATA_INDEX, D, I, L, Value


def both_tables(look: Judge, cmp: int) -> set[str]:
    node = look.nodes[cmp]
    return set(look.tops(node.left) | look.tops(node.right))


def made_walk(
    look: Judge, shape: str, line: int, end: int, cmp: int, tables: Iterable[str], weak: bool = False
) -> Walk:
    return Walk(
        shape, line, end, look.nodes[cmp].line, tuple(sorted(set(tables) - {""})), weak, (how_accepted(look, cmp),)
    )


def how_accepted(look: Judge, cmp: int) -> str:
    node = look.nodes[cmp]
    if node.name in EQUALITY:
        return "greedy"
    below = {
        look.nodes[i].name for i in look.below(node.left | node.right, DATA) if look.nodes[i].kind in ("bin", "call")
    }
    if below & {"/", "log", "exp", "*", "+", "-"}:
        return "ratio"
    return "other"


def direct_reads(look: Judge, value: Value) -> list[int]:
    """The reads that a value is made of without going through a container that the loop fills."""
    found: list[int] = []
    seen: set[int] = set()
    todo = list(value)
    while todo:
        number = todo.pop()
        if number in seen or look.nodes[number].kind in ("upd", "affine", "iter"):
            continue
        seen.add(number)
        if look.nodes[number].kind == "read":
            found.append(number)
        else:
            todo += [t for t, how in look.nodes[number].edges if how == D]
    return found


def plain_parts(look: Judge, value: Value) -> set[int]:
    """What a value is made of without any read, comparison or operation but sums."""
    seen: set[int] = set()
    todo = list(value)
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        node = look.nodes[number]
        if node.kind in ("phi", "sel", "iter") or (node.kind == "bin" and node.name in "+-"):
            todo += [t for t, how in node.edges if how == D]
        elif node.kind in ("call", "len", "upd"):
            todo += [t for t, how in node.edges if how in (D, L)]
    return seen


def steps_along(look: Judge, read: int, loop: int) -> bool:
    """Read at the loop's own position, or an element that the loop itself hands out."""
    nodes, here = look.nodes, look.flow.loops[loop]
    if read in here.var:
        return True
    index = look.below([t for t, how in nodes[read].edges if how == I], DATA_INDEX)
    if not here.var.isdisjoint(index):
        return True
    counters = {p for p in here.phis.values() if counts_up(look, p)}
    return not counters.isdisjoint(index)


def counts_up(look: Judge, phi: int) -> bool:
    """A name that goes up by a constant."""
    seen: set[int] = set()
    todo = [t for t, how in look.nodes[phi].edges if how == D]
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        if number == phi:
            return True
        node = look.nodes[number]
        if node.kind == "sel" or (node.kind == "bin" and node.name in "+-"):
            todo += [t for t, how in node.edges if how == D]
    return False


def at_one_place(look: Judge, read: int) -> bool:
    """Read at one place, not at a block of lanes."""
    index = frozenset(t for t, how in look.nodes[read].edges if how == I)
    todo, seen = list(index), set()
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        node = look.nodes[number]
        if node.kind == "affine" and node.name == "arange":
            return False
        if node.kind not in ("read", "iter", "call", "phi", "upd"):
            todo += [t for t, how in node.edges if how == D]
    return True
