"""What a function's dataflow says about acceptance: a walk through a tree (and of which family), or a chain.

Name-free: only syntax and the verbs of array libraries are looked at. The families (docs/audit-anchors.md §2.2,
docs/prior-art.md §2.0):
  chase      F1, W1, W2: the place of the next comparison is read at the place of this one (child tables, sibling
  links, tries, objects,
             worklists, pointer chains written out by hand)
  search     W3: the next place is found by comparing a parent table with this place
  parents    F2, W5: a node is accepted if its parent is, the parent read from a table (loops over nodes, or jumps
  over vectors)
  paths      F3, W4: every root-to-leaf path is compared and the best one taken
  ancestors  F4: a mismatch anywhere under an ancestor matrix rules a node out, and the deepest node left is taken
  chain      positions are compared one after another, or all at once and cut at the first mismatch
"""

from __future__ import annotations

from rules.facts.chains import chains
from rules.facts.flow import Flow
from rules.facts.judging import EQUALITY, Judge, Walk
from rules.facts.places import at_one_place, direct_reads, steps_along
from rules.facts.values import DATA_INDEX, I
from rules.facts.walk_chase import by_hand, chases
from rules.facts.walk_masks import ancestor_bits, ancestor_masks, best_paths, matrix_steps, path_loops
from rules.facts.walk_parents import parent_jumps, parent_loops, searches


def judge(flow: Flow) -> list[Walk]:
    """Every accept loop or accept expression of the function; tree shapes first."""
    if not flow.nodes:
        return []
    look = Judge(flow)
    if not look.cmps and not any(n.kind == "read" for n in flow.nodes):
        return []
    walks: list[Walk] = []
    own = [
        n for n, loop in enumerate(flow.loops) if flow.lines[0] <= loop.line <= flow.lines[1]
    ]  # a helper's own loop is the helper's
    for loop in own:
        walks += chases(look, loop)
    if not look.tokens[0]:
        return walks
    for loop in own:
        walks += searches(look, loop)
        walks += parent_loops(look, loop)
    walks += by_hand(look)
    walks += parent_jumps(look)
    walks += best_paths(look)
    walks += path_loops(look)
    walks += matrix_steps(look)
    walks += ancestor_masks(look) or ancestor_bits(look)
    by_place: dict[tuple[str, int], Walk] = {}
    for walk in walks:
        by_place.setdefault((walk.shape, walk.verdict), walk)
    walks = list(by_place.values())
    if not any(not w.weak for w in walks):
        walks += chains(look)
    return walks


def near(flow: Flow) -> str:
    """Why a function that follows links is no walk: "written" or "one-stream"; "" when it follows none."""
    look = Judge(flow)
    for loop, here in enumerate(flow.loops):
        if not flow.lines[0] <= here.line <= flow.lines[1]:
            continue
        for part in look.components(loop):
            links = [a for a in part for b, how in flow.nodes[a].edges if how == I and b in part]
            tables = {flow.nodes[a].name for a in links if flow.nodes[a].kind == "read"}
            asked = any(look.inside(flow.nodes[c].loop, loop) and flow.nodes[c].name in EQUALITY for c in look.cmps)
            if tables and (asked or any(not t.startswith(".") for t in tables)):
                return "written" if tables <= look.written(loop) else "one-stream"
    return ""


def leads_elsewhere(flow: Flow) -> bool:
    """A value that one round hands to the next goes through a function of another file: whether it is a walk shows
    only with that file."""
    look = Judge(flow)
    for call in flow.foreign:
        loop = flow.nodes[call].loop
        made = look.below([call], DATA_INDEX)
        while loop >= 0:
            if any(phi in made and call in look.below([phi], DATA_INDEX) for phi in flow.loops[loop].phis.values()):
                return True
            loop = flow.loops[loop].parent
    return False


def carries_state(flow: Flow) -> tuple[int, int] | None:
    """(line of the read, line of the write) where each round reads a buffer at a place that a table names for it and
    writes its own
    result into the same buffer: state handed from parent to child, not from one position to the next."""
    look = Judge(flow)
    nodes = flow.nodes
    for loop, here in enumerate(flow.loops):
        if here.kind not in ("for", "while"):
            continue
        stores = {w.root: w.line for w in flow.writes if w.how == "store" and look.inside(w.loop, loop)}
        for node in nodes:
            if node.kind != "read" or node.name not in stores or not look.inside(node.loop, loop):
                continue
            index = frozenset(t for t, how in node.edges if how == I)
            tables = [
                r
                for r in direct_reads(look, index)
                if nodes[r].name not in stores and steps_along(look, r, loop) and at_one_place(look, r)
            ]
            if tables:
                return node.line, stores[node.name]
    return None
