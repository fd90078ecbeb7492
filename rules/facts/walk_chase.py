"""F1: the place of the next comparison is read at the place of this one."""

from __future__ import annotations

from collections.abc import Iterable

from rules.facts.judging import EQUALITY, Judge, Walk
from rules.facts.places import both_tables, direct_reads, made_walk
from rules.facts.values import ALL_EDGES, DATA_INDEX, C, D, I, L, P

LONGEST = (
    200  # lines of a loop that accepts; longer ones are main loops, and what accepts in them has a loop of its own
)


def chases(look: Judge, loop: int) -> list[Walk]:
    flow, nodes = look.flow, look.nodes
    here = flow.loops[loop]
    if here.kind == "comp":
        return []
    found: list[Walk] = []
    if here.end - here.line > LONGEST:
        return []
    for part in look.components(loop):
        written = look.written(loop) | _built_by_chasing(look, loop)
        links = [
            (a, b)
            for a in part
            for b, how in nodes[a].edges
            if how == I
            and b in part
            and nodes[a].kind == "read"
            and nodes[a].name not in written
            and look.inside(nodes[a].loop, loop)
            and not _walks_itself(look, a, part)
        ]
        links += [  # children by arithmetic: k * node + j
            (a, b)
            for a in part
            for b, how in nodes[a].edges
            if how == D
            and b in part
            and nodes[a].kind == "bin"
            and nodes[a].name in "*<"
            and look.inside(nodes[a].loop, loop)
        ]
        if not links:
            continue
        tables = {nodes[a].name for a, _ in links if nodes[a].kind == "read"}
        deciding = _deciding(look, loop, part)
        streams = [s for s in _verdicts(look, loop, part, written, tables) if s[0] in deciding]
        keyed = next((k for k in _keyed(look, part, links, written) if k in deciding or here.guarded), None)
        if streams:
            strong = [s for s in streams if s[1]]
            cmp = (strong or streams)[0][0]
            found.append(
                made_walk(look, "chase", here.line, here.end, cmp, tables | both_tables(look, cmp), weak=not strong)
            )
        elif keyed is not None:
            found.append(
                Walk("chase", here.line, here.end, nodes[keyed].line, tuple(sorted(tables)), accepts=("greedy",))
            )
    return found


def _built_by_chasing(look: Judge, loop: int) -> set[str]:
    """Tables that another loop of the function fills while it follows them (a failure function): no tree."""
    nodes, found = look.nodes, set[str]()
    for other in range(len(look.flow.loops)):
        written = look.written(other) if other != loop and not look.inside(loop, other) else set()
        if not written:
            continue
        for part in look.components(other):
            found |= {
                nodes[a].name
                for a in part
                if nodes[a].kind == "read" and any(how == I and b in part for b, how in nodes[a].edges)
            } & written
    return found


def _deciding(look: Judge, loop: int, part: set[int]) -> frozenset[int]:
    """What the end of the loop, the next place or a write in the loop depends on as a predicate."""
    flow, nodes = look.flow, look.nodes
    starts: set[int] = set()
    for number, here in enumerate(flow.loops):
        if look.inside(number, loop):
            starts.update(*here.exits)
    for number in part:
        starts.update(t for t, how in nodes[number].edges if how == P)
    for write in flow.writes:
        if look.inside(write.loop, loop):
            starts |= write.under | write.mask
    for node in nodes:
        if node.kind in ("sel", "upd") and look.inside(node.loop, loop):
            starts.update(t for t, how in node.edges if how == P)
    return look.below(starts, frozenset({D, C, P, L}))


def _walks_itself(look: Judge, read: int, part: set[int]) -> bool:
    """The table is the chased value itself (a nested container), and no other table says which element is next."""
    nodes = look.nodes
    base = [t for t, how in nodes[read].edges if how == D]
    if not any(b in part and nodes[b].kind in ("phi", "sel") for b in base):
        return False
    index = frozenset(t for t, how in nodes[read].edges if how == I)
    return not any(nodes[r].kind == "read" and nodes[r].name != nodes[read].name for r in look.top_reads(index))


def _verdicts(look: Judge, loop: int, part: set[int], written: set[str], tables: set[str]) -> list[tuple[int, bool]]:
    """(comparison, certain) in this loop that set a token at the chased place against another stream there. Certain:
    both sides are
    read at a place that depends on the chase (or one side is random), and not from attributes alone."""
    nodes = look.nodes
    found: list[tuple[int, bool]] = []
    for cmp in look.cmps:
        if not look.inside(nodes[cmp].loop, loop):
            continue
        node = nodes[cmp]
        sides = []
        for side in (node.left, node.right):
            reads = [r for r in look.top_reads(side) if nodes[r].name not in written]
            at = [r for r in reads if _depends(look, r, part)]
            sides.append(at)
        left_at, right_at = sides
        names_left = {nodes[r].name for r in left_at}
        names_right = {nodes[r].name for r in right_at}
        if node.name not in EQUALITY:  # p[x, token[c]]: the token stream stands in the index
            for reads, names in ((left_at, names_left), (right_at, names_right)):
                index = frozenset(t for r in reads for t, how in nodes[r].edges if how == I)
                names |= {nodes[r].name for r in direct_reads(look, index) if _depends(look, r, part)}
        random = look.is_random(node.left) or look.is_random(node.right)
        attributes = sum(any(not n.startswith(".") for n in names) for names in (names_left, names_right))
        if node.name not in EQUALITY and not look.accepts_ratio(cmp):
            continue
        if names_left and names_right and (names_left - names_right or names_right - names_left):
            found.append((cmp, attributes >= 1))
        elif (
            node.name in ("In", "NotIn")
            and left_at
            and look.tops(node.right) & tables
            and names_left - look.tops(node.right)
        ) or (random and len({n for n in names_left | names_right if not n.startswith(".")}) >= 2):
            found.append((cmp, True))
    found.sort(key=lambda f: not f[1])
    return found


def _depends(look: Judge, read: int, part: set[int]) -> bool:
    """Whether the place of a read (or, for an element of an iteration, what it runs over) depends on the chased
    value."""
    if read in part:
        return True
    starts = [t for t, how in look.nodes[read].edges if how == I or look.nodes[read].kind == "iter"]
    starts += [
        t
        for t, how in look.nodes[read].edges
        if how == D and look.nodes[t].kind in ("read", "iter", "call", "sel", "bin")
    ]
    return not part.isdisjoint(look.below(starts, DATA_INDEX)) if starts else False


def _keyed(look: Judge, part: set[int], links: list[tuple[int, int]], written: set[str]) -> Iterable[int]:
    """A lookup that is itself the comparison: the next place is read under the token that another table holds at
    this place."""
    nodes = look.nodes
    phis = {n for n in part if nodes[n].kind == "phi"}
    for link, _ in links:
        if nodes[link].kind != "read":
            continue
        index = frozenset(t for t, how in nodes[link].edges if how == I)
        for read in direct_reads(look, index):
            if (
                read == link
                or nodes[read].name in written
                or nodes[read].name == nodes[link].name
                or nodes[read].name.startswith(".")
            ):
                continue
            if _depends(look, read, part) and not phis.isdisjoint(look.below([read], DATA_INDEX)):
                others = look.below((t for t, how in nodes[link].edges if how in (D, I) and t != read), DATA_INDEX)
                if not phis.isdisjoint(others) and nodes[read].kind == "read":
                    yield link


def _decides_place(look: Judge, first: int, same: list[int]) -> bool:
    """Where another of these comparisons reads was decided by this one (one line of a helper, entered again and
    again)."""
    nodes = look.nodes
    for cmp in same:
        reads = (*look.top_reads(nodes[cmp].left), *look.top_reads(nodes[cmp].right))
        index = [t for r in reads for t, how in nodes[r].edges if how == I]
        if cmp != first and first in look.below(index, ALL_EDGES):
            return True
    return False


def by_hand(look: Judge) -> list[Walk]:
    """F1 without a loop: the next place read from the same table at the place before, again and again, and the same
    two tables
    compared at one place after the other."""
    nodes = look.nodes
    if len(look.tokens[2]) < 2:
        return []
    chain: set[int] = set()
    filled = {w.root for w in look.flow.writes if w.how in ("store", "append", "aug")}  # here: not handed in
    for read, node in enumerate(nodes):
        if node.kind == "read" and not node.name.startswith(".") and node.name not in filled:
            index = frozenset(t for t, how in node.edges if how == I)
            before = {  # in this round: what comes around a loop is the loop's own question
                r for r in look.made_of(index) if nodes[r].kind == "read" and nodes[r].name == node.name and r != read
            }
            if before:
                chain |= before | {read}
    hits: dict[tuple[frozenset[str], frozenset[str]], list[int]] = {}
    for cmp in sorted(look.tokens[2]) if chain else ():
        node = nodes[cmp]
        reads = [r for r in (*look.top_reads(node.left), *look.top_reads(node.right)) if r not in chain]
        if any(
            not chain.isdisjoint(direct_reads(look, frozenset(t for t, how in nodes[r].edges if how == I)))
            for r in reads
        ):
            hits.setdefault((look.tops(node.left), look.tops(node.right)), []).append(cmp)
    for same in hits.values():
        lines = {nodes[c].line for c in same}
        if len(lines) >= 2 or any(_decides_place(look, first, same) for first in same):
            return [
                made_walk(
                    look,
                    "chase",
                    min(lines),
                    max(lines),
                    same[0],
                    {nodes[r].name for r in chain} | both_tables(look, same[0]),
                )
            ]
    return []
