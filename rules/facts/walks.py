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

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rules.facts.flow import C, D, Flow, I, L, P, Value, reaches

_DI = frozenset({D, I})
_D = frozenset({D})
_ALL = frozenset({D, I, C, P, L})
_EQ = frozenset({"Eq", "NotEq", "In", "NotIn", "Is", "IsNot"})
_BEST = frozenset({"argmax", "argsort", "topk", "sort", "sorted", "max", "nanargmax", "amax"})
_LONGEST = (
    200  # lines of a loop that accepts; longer ones are main loops, and what accepts in them has a loop of its own
)
_PREFIX = frozenset({"cumprod", "cummin", "logcumsumexp", "cumulative_and", "cummin_", "cumprod_", "accumulate"})
_REDUCE = frozenset({"all", "any", "amin", "prod", "min", "sum", "amax", "count_nonzero", "reduce_and"})
#: Calls that hand on what they get; a value that goes through any other call is no longer the place that was chased.
_HANDS_ON = frozenset(
    {
        "int",
        "item",
        "to",
        "long",
        "int32",
        "int64",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "tolist",
        "list",
        "tuple",
        "max",
        "min",
        "argmax",
        "argmin",
        "sum",
        "nonzero",
        "flatnonzero",
        "argwhere",
        "where",
        "any",
        "all",
        "first",
        "flatten",
        "cat",
        "stack",
        "tensor",
        "as_tensor",
        "asarray",
        "array",
        "clamp",
        "clone",
        "contiguous",
        "detach",
        "cuda",
        "expand",
        "broadcast_to",
        "repeat",
        "cast",
        "type",
        "type_as",
        "astype",
        "maximum",
        "minimum",
        "abs",
        "reversed",
        "sorted",
        "deque",
        "copy",
        "chain",
        "searchsorted",
        "bisect_left",
        "bucketize",
        "full",
        "index",
        "uint32",
        "uint64",
        "Int32",
        "squeeze_",
        "ravel",
        "select",
        "narrow",
        "zip",
        "filter",
        "map",
        "set",
        "append",
        "extend",
        "put",
        "unbind",
        "construct",
        "str",
        "join",
        "format",
        "repr",
        "hash",
        "split",
        "pop",
        "recursion",
        "next",
        "iter",
        "enumerate",
        "device_put",
        "block_until_ready",
    }
)
_FIRST = frozenset({"nonzero", "argmin", "argmax", "argwhere", "flatnonzero", "where"})


@dataclass(frozen=True)
class Walk:
    shape: str
    line: int
    end: int
    verdict: int  # line of the comparison that decides
    tables: tuple[str, ...]
    weak: bool = False  # the shape is there, the two token streams aren't certain
    accepts: tuple[str, ...] = ()


class Judge:
    """Looks at one graph. ``sides``: a comparison's sides as the tables they were read from, at the top."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.nodes = flow.nodes
        self.cmps = [i for i, n in enumerate(self.nodes) if n.kind == "cmp"]
        self._tops: dict[Value, frozenset[str]] = {}
        self._reads: dict[Value, list[int]] = {}
        self._scc: dict[int, set[int]] | None = None
        self._below: dict[tuple[frozenset[int], frozenset[int]], frozenset[int]] = {}

    # ---- small questions

    def below(self, start: Iterable[int], kinds: frozenset[int]) -> frozenset[int]:
        """``reaches``, remembered."""
        key = (frozenset(start), kinds)
        if key not in self._below:
            self._below[key] = frozenset(reaches(self.nodes, key[0], kinds))
        return self._below[key]

    @cached_property
    def tokens(self) -> dict[int, frozenset[int]]:
        """reads (0, 1, 2) -> the comparisons of two streams with that many sides read at a place."""
        found: dict[int, frozenset[int]] = {}
        for reads in (0, 1, 2):
            found[reads] = frozenset(
                c for c in (found[reads - 1] if reads else self.cmps) if self.two_streams(c, reads)
            )
        return found

    def inside(self, loop: int, outer: int) -> bool:
        while loop >= 0:
            if loop == outer:
                return True
            loop = self.flow.loops[loop].parent
        return False

    def top_reads(self, value: Value) -> list[int]:
        """The reads that a value is made of, not those that said where to read."""
        if value in self._reads:
            return self._reads[value]
        found: list[int] = self._reads.setdefault(value, [])
        seen: set[int] = set()
        todo = list(value)
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            node = self.nodes[number]
            if node.kind in ("affine", "len"):
                continue
            if node.kind in ("read", "window", "iter"):
                found.append(number)
                if node.kind == "read" and not node.name.startswith("."):
                    todo += [t for t, how in node.edges if how == D and self.nodes[t].kind in ("read", "call", "sel")]
            elif node.kind == "cmp":
                todo += [t for t, how in node.edges if how == C]
            else:
                todo += [t for t, how in node.edges if how == D]
        return found

    def tops(self, value: Value) -> frozenset[str]:
        """Tables and plain inputs that a value is made of."""
        if value not in self._tops:
            reads = self.top_reads(value)
            names = {self.nodes[r].name for r in reads}
            seen: set[int] = set()
            todo = list(value)
            while todo:
                number = todo.pop()
                if number in seen:
                    continue
                seen.add(number)
                node = self.nodes[number]
                if node.kind in ("root", "param"):
                    if node.name not in ("self", "cls"):
                        names.add(node.name)
                elif node.kind not in ("read", "window", "iter", "affine", "len"):
                    todo += [t for t, how in node.edges if how == D]
            self._tops[value] = frozenset(names)
        return self._tops[value]

    def made_of(self, value: Value) -> list[int]:
        """What a value is computed from in this round: not what an earlier round, a container or a place in memory
        held."""
        found: list[int] = []
        seen: set[int] = set()
        todo = list(value)
        while todo:
            number = todo.pop()
            if number in seen or self.nodes[number].kind in ("phi", "upd", "affine"):
                continue
            seen.add(number)
            found.append(number)
            if self.nodes[number].kind not in ("read", "iter"):
                todo += [t for t, how in self.nodes[number].edges if how == D]
        return found

    def is_random(self, value: Value) -> bool:
        return any(self.nodes[i].kind == "call" and "rand" in self.nodes[i].name for i in self.made_of(value))

    def two_streams(self, cmp: int, reads: int = 1) -> bool:
        """The comparison sets something read from one table against something read from another. Attributes of an
        object alone are no
        stream; an order between two numbers is an acceptance only if one of them is random or a ratio. ``reads``:
        how many sides
        must be read at a place (the others may be whole vectors)."""
        node = self.nodes[cmp]
        left, right = (
            frozenset(t for t in self.tops(side) if not t.startswith(".")) for side in (node.left, node.right)
        )
        if node.name not in _EQ:
            if not self.accepts_ratio(cmp):
                return False
            if self.is_random(node.left) or self.is_random(node.right):
                return len(left | right) >= 1
        if not left or not right or not (left - right or right - left):
            return False
        at = sum(
            any(not self.nodes[r].name.startswith(".") for r in self.top_reads(side))
            for side in (node.left, node.right)
        )
        return at >= reads

    def accepts_ratio(self, cmp: int) -> bool:
        """The comparison is between a random number, a ratio of two things read, or logarithms."""
        node = self.nodes[cmp]
        for number in self.made_of(node.left | node.right):
            part = self.nodes[number]
            if part.kind == "call" and ("rand" in part.name or part.name in ("log", "log2")):
                return True
            if part.kind == "bin" and part.name == "/" and self.top_reads(part.left) and self.top_reads(part.right):
                return True
        return False

    def written(self, loop: int) -> set[str]:
        return {w.root for w in self.flow.writes if w.how in ("store", "append", "aug") and self.inside(w.loop, loop)}

    def components(self, loop: int) -> list[set[int]]:
        """Strongly connected parts (over data and index edges) that hold a phi of this loop: values that one round
        hands to the next."""
        if self._scc is None:
            self._scc = _cycles(self.flow)
        found: dict[int, set[int]] = {}
        for phi in self.flow.loops[loop].phis.values():
            part = self._scc.get(phi)
            if part is not None:
                found[id(part)] = part
        return list(found.values())


def leads_elsewhere(flow: Flow) -> bool:
    """A value that one round hands to the next goes through a function of another file: whether it is a walk shows
    only with that file."""
    look = Judge(flow)
    for call in flow.foreign:
        loop = flow.nodes[call].loop
        made = look.below([call], _DI)
        while loop >= 0:
            if any(phi in made and call in look.below([phi], _DI) for phi in flow.loops[loop].phis.values()):
                return True
            loop = flow.loops[loop].parent
    return False


def near(flow: Flow) -> str:
    """Why a function that follows links is no walk: "written" or "one-stream"; "" when it follows none."""
    look = Judge(flow)
    for loop, here in enumerate(flow.loops):
        if not flow.lines[0] <= here.line <= flow.lines[1]:
            continue
        for part in look.components(loop):
            links = [a for a in part for b, how in flow.nodes[a].edges if how == I and b in part]
            tables = {flow.nodes[a].name for a in links if flow.nodes[a].kind == "read"}
            asked = any(look.inside(flow.nodes[c].loop, loop) and flow.nodes[c].name in _EQ for c in look.cmps)
            if tables and (asked or any(not t.startswith(".") for t in tables)):
                return "written" if tables <= look.written(loop) else "one-stream"
    return ""


def _cycles(flow: Flow) -> dict[int, set[int]]:
    """node -> its strongly connected part over D and I edges, for parts that have a cycle (Tarjan, without
    recursion)."""
    nodes = flow.nodes

    def targets(number: int) -> list[int]:
        node = nodes[number]
        if node.kind == "len" or (node.kind == "call" and node.name not in _HANDS_ON):
            return []
        return [t for t, how in node.edges if how in _DI]

    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on: set[int] = set()
    stack: list[int] = []
    parts: dict[int, set[int]] = {}
    for start in (p for loop in flow.loops for p in loop.phis.values()):
        if start in index:
            continue
        work = [(start, iter(targets(start)))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on.add(start)
        while work:
            number, edges = work[-1]
            for target in edges:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on.add(target)
                    work.append((target, iter(targets(target))))
                    break
                if target in on:
                    low[number] = min(low[number], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[number])
                if low[number] == index[number]:
                    part: set[int] = set()
                    while True:
                        top = stack.pop()
                        on.discard(top)
                        part.add(top)
                        if top == number:
                            break
                    if len(part) > 1 or any(t == number for t, how in nodes[number].edges if how in _DI):
                        for member in part:
                            parts[member] = part
    return parts


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
        walks += _chase(look, loop)
    if not look.tokens[0]:
        return walks
    for loop in own:
        walks += _search(look, loop)
        walks += _parents(look, loop)
    walks += _by_hand(look)
    walks += _jumps(look)
    walks += _paths(look)
    walks += _path_loops(look)
    walks += _ancestors(look) or _ancestor_bits(look)
    by_place: dict[tuple[str, int], Walk] = {}
    for walk in walks:
        by_place.setdefault((walk.shape, walk.verdict), walk)
    walks = list(by_place.values())
    if not any(not w.weak for w in walks):
        walks += _chains(look)
    return walks


# ---- F1: the chase


def _chase(look: Judge, loop: int) -> list[Walk]:
    flow, nodes = look.flow, look.nodes
    here = flow.loops[loop]
    if here.kind == "comp":
        return []
    found: list[Walk] = []
    if here.end - here.line > _LONGEST:
        return []
    for part in look.components(loop):
        written = look.written(loop)
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
            found.append(_walk(look, "chase", here.line, here.end, cmp, tables | _both(look, cmp), weak=not strong))
        elif keyed is not None:
            found.append(
                Walk("chase", here.line, here.end, nodes[keyed].line, tuple(sorted(tables)), accepts=("greedy",))
            )
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
        if node.name not in _EQ:  # p[x, token[c]]: the token stream stands in the index
            for reads, names in ((left_at, names_left), (right_at, names_right)):
                index = frozenset(t for r in reads for t, how in nodes[r].edges if how == I)
                names |= {nodes[r].name for r in _direct_reads(look, index) if _depends(look, r, part)}
        random = look.is_random(node.left) or look.is_random(node.right)
        attributes = sum(any(not n.startswith(".") for n in names) for names in (names_left, names_right))
        if node.name not in _EQ and not look.accepts_ratio(cmp):
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
    return not part.isdisjoint(look.below(starts, _DI)) if starts else False


def _keyed(look: Judge, part: set[int], links: list[tuple[int, int]], written: set[str]) -> Iterable[int]:
    """A lookup that is itself the comparison: the next place is read under the token that another table holds at
    this place."""
    nodes = look.nodes
    phis = {n for n in part if nodes[n].kind == "phi"}
    for link, _ in links:
        if nodes[link].kind != "read":
            continue
        index = frozenset(t for t, how in nodes[link].edges if how == I)
        for read in _direct_reads(look, index):
            if (
                read == link
                or nodes[read].name in written
                or nodes[read].name == nodes[link].name
                or nodes[read].name.startswith(".")
            ):
                continue
            if _depends(look, read, part) and not phis.isdisjoint(look.below([read], _DI)):
                others = look.below((t for t, how in nodes[link].edges if how in (D, I) and t != read), _DI)
                if not phis.isdisjoint(others) and nodes[read].kind == "read":
                    yield link


def _direct_reads(look: Judge, value: Value) -> list[int]:
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


def _both(look: Judge, cmp: int) -> set[str]:
    node = look.nodes[cmp]
    return set(look.tops(node.left) | look.tops(node.right))


def _walk(look: Judge, shape: str, line: int, end: int, cmp: int, tables: Iterable[str], weak: bool = False) -> Walk:
    return Walk(shape, line, end, look.nodes[cmp].line, tuple(sorted(set(tables) - {""})), weak, (_accepts(look, cmp),))


def _accepts(look: Judge, cmp: int) -> str:
    node = look.nodes[cmp]
    if node.name in _EQ:
        return "greedy"
    below = {
        look.nodes[i].name for i in look.below(node.left | node.right, _D) if look.nodes[i].kind in ("bin", "call")
    }
    if below & {"/", "log", "exp", "*", "+", "-"}:
        return "ratio"
    return "other"


def _by_hand(look: Judge) -> list[Walk]:
    """F1 without a loop: the next place read from the same table at the place before, again and again, and the same
    two tables
    compared at one place after the other."""
    nodes = look.nodes
    if len(look.tokens[2]) < 2:
        return []
    chain: set[int] = set()
    for read, node in enumerate(nodes):
        if node.kind == "read" and not node.name.startswith("."):
            index = frozenset(t for t, how in node.edges if how == I)
            before = {
                r for r in _direct_reads(look, index) if nodes[r].name == node.name and nodes[r].line != node.line
            }
            if before:
                chain |= before | {read}
    hits: dict[tuple[frozenset[str], frozenset[str]], list[int]] = {}
    for cmp in sorted(look.tokens[2]) if chain else ():
        node = nodes[cmp]
        reads = [r for r in (*look.top_reads(node.left), *look.top_reads(node.right)) if r not in chain]
        if any(
            not chain.isdisjoint(_direct_reads(look, frozenset(t for t, how in nodes[r].edges if how == I)))
            for r in reads
        ):
            hits.setdefault((look.tops(node.left), look.tops(node.right)), []).append(cmp)
    for same in hits.values():
        lines = {nodes[c].line for c in same}
        if len(lines) >= 2:
            return [
                _walk(
                    look,
                    "chase",
                    min(lines),
                    max(lines),
                    same[0],
                    {nodes[r].name for r in chain} | _both(look, same[0]),
                )
            ]
    return []


def _at(look: Judge, read: int, places: set[int]) -> bool:
    index = [t for t, how in look.nodes[read].edges if how == I]
    return not places.isdisjoint(look.below(index, _DI))


# ---- W3: the search


def _search(look: Judge, loop: int) -> list[Walk]:
    flow, nodes = look.flow, look.nodes
    here = flow.loops[loop]
    if here.kind == "comp":
        return []
    found: list[Walk] = []
    for name, phi in here.phis.items():
        finders = []
        for cmp in look.cmps:
            node = nodes[cmp]
            if node.name not in ("Eq", "NotEq", "In", "NotIn") or not look.inside(node.loop, loop):
                continue
            for mine, other in ((node.left, node.right), (node.right, node.left)):
                plain = _plain(look, mine)
                if phi in plain and not _plain(look, other) & {phi} and look.tops(other) - {name}:
                    finders.append(cmp)
        if not finders:
            continue
        ends = [t for t, how in nodes[phi].edges if how in (D, P)]
        decided = look.below(ends, _ALL)
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
            finder_tables = set().union(*(_both(look, f) for f in finders))
            at = [r for r in reads if _at(look, r, {phi})]
            if at and _together(look, cmp, finders, phi) and not _both(look, cmp) <= finder_tables:
                found.append(_walk(look, "search", here.line, here.end, cmp, _both(look, cmp) | finder_tables))
                break
    return found


def _plain(look: Judge, value: Value) -> set[int]:
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


def _together(look: Judge, cmp: int, finders: list[int], phi: int) -> bool:
    """Both comparisons decide the same choice of the next place."""
    for node in look.nodes:
        if node.kind in ("sel", "upd", "call", "bin", "phi", "read"):
            kinds = _ALL if node.kind in ("sel", "upd", "phi") else frozenset({D, C})
            direct = look.below([t for t, how in node.edges if how in kinds], frozenset({D, P}))
            if cmp in direct and any(f in direct for f in finders):
                return True
    return False


# ---- F2, W5: parents


def _parents(look: Judge, loop: int) -> list[Walk]:
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
            if phi not in look.below(base, _D) or not index:
                continue
            links = {
                nodes[r].name
                for r in look.top_reads(frozenset(index))
                if nodes[r].name not in written
                and not _is_of(look, r, phi)
                and look.inside(nodes[r].loop, loop)
                and _steps(look, r, loop)
            }
            if not links:
                continue
            back = look.below([t for t, how in nodes[phi].edges], frozenset({D, P, C}))
            if read not in back:
                continue
            cmp = _token_verdict(look, links, written, loop, back)
            if cmp is not None:
                found.append(_walk(look, "parents", here.line, here.end, cmp, links | _both(look, cmp)))
                return found
    return found


def _is_of(look: Judge, read: int, phi: int) -> bool:
    return phi in look.below([t for t, how in look.nodes[read].edges if how == D], _D)


def _token_verdict(look: Judge, links: set[str], written: set[str], loop: int, back: frozenset[int]) -> int | None:
    """A comparison of two streams that decides what the round writes; one side read under the parent table, here or
    before the loop."""
    nodes = look.nodes
    for cmp in look.cmps:
        node = nodes[cmp]
        if (
            node.name in ("In", "NotIn")
            or (node.name not in _EQ and not look.is_random(node.left | node.right))
            or cmp not in back
            or cmp not in look.tokens[2]
        ):
            continue
        if _both(look, cmp) & written - links:
            continue
        for side in (node.left, node.right):
            for read in look.top_reads(side):
                index = look.below([t for t, how in nodes[read].edges if how == I], _DI)
                names = {nodes[i].name for i in index if nodes[i].kind in ("read", "root", "param", "iter")}
                if names & links and nodes[read].name not in links:
                    return cmp
    return None


def _jumps(look: Judge) -> list[Walk]:
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
            verdicts = [c for c in look.tokens[1] if c in made_of and nodes[c].name in _EQ]
            if not verdicts or not index:
                continue
            at = look.below(index, _DI)
            affine = all(
                nodes[i].kind in ("affine", "phi", "fresh") or (nodes[i].kind == "bin" and nodes[i].name in "+-")
                for i in at
            )
            other = look.below([t for t, how in node.edges if how == D and t != read], _D)
            if affine or not any(c in other for c in look.cmps):
                continue
            links = {nodes[i].name for i in at if nodes[i].kind in ("root", "param", "read")}
            for cmp in verdicts:
                for side in (nodes[cmp].left, nodes[cmp].right):
                    for r in look.top_reads(side):
                        below = look.below([t for t, how in nodes[r].edges if how == I], _DI)
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
                                    _walk(look, "parents", nodes[cmp].line, node.line, cmp, links | _both(look, cmp))
                                )
    return found


# ---- F3, W4: paths


def _paths(look: Judge) -> list[Walk]:
    nodes = look.nodes
    for best in nodes:
        if best.kind != "call" or best.name not in _BEST - {"amax"}:
            continue
        below = look.below([t for t, how in best.edges if how == D], _D)
        counts = [i for i in below if nodes[i].kind == "call" and nodes[i].name in ("sum", "count_nonzero")]
        for count in counts:
            under = look.below([count], _D)
            prefix = [i for i in under if nodes[i].kind == "call" and nodes[i].name in _PREFIX]
            for first in prefix:
                verdicts = sorted(look.tokens[0] & look.below([first], _D))
                if verdicts and (best.name in ("argmax", "argsort", "topk") or _used_as_index(look, best)):
                    return [
                        _walk(look, "paths", nodes[verdicts[0]].line, best.line, verdicts[0], _both(look, verdicts[0]))
                    ]
    return []


def _used_as_index(look: Judge, best: object) -> bool:
    number = next(i for i, n in enumerate(look.nodes) if n is best)
    return any(number in look.below([t for t, how in n.edges if how == I], _D) for n in look.nodes if n.kind == "read")


def _path_loops(look: Judge) -> list[Walk]:
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
            return [_walk(look, "paths", loop.line, loop.end, cmp, _both(look, cmp))]
    return []


def _along_a_path(look: Judge, read: int, inner: int, outer: int) -> bool:
    """The place is an element of the outer loop's row: read (or iterated) at the inner position, out of what the
    outer loop chose."""
    nodes, loops = look.nodes, look.flow.loops
    index = look.below([t for t, how in nodes[read].edges if how == I], _DI)
    for step in index:
        node = nodes[step]
        if node.kind not in ("read", "iter") or not look.inside(node.loop, inner):
            continue
        below = look.below([t for t, _ in node.edges], _DI)
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
            if phi not in _plain(look, node.left | node.right):
                continue
            for chosen in nodes:
                if chosen.kind == "sel" and (cmp, P) in chosen.edges and chosen.loop == outer:
                    return True
    for best in nodes:
        if best.kind == "call" and best.name in _BEST:
            below = look.below([t for t, how in best.edges if how == D], _ALL)
            if verdict in below and not look.inside(best.loop, outer):
                return True
    return False


# ---- F4: ancestors


def _ancestors(look: Judge) -> list[Walk]:
    nodes = look.nodes
    tokens = frozenset(c for c in look.tokens[0] if nodes[c].name in _EQ)
    if not tokens:
        return []
    for chosen in nodes:
        if chosen.kind != "call" or chosen.name not in _BEST | {"nonzero"}:
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
                verdicts = sorted(tokens & look.below(verdict_side, _D))
                if not verdicts:
                    continue
                matrix = look.below(frozenset().union(*(s for s in sides if s is not verdict_side)), _D)
                if not tokens.isdisjoint(matrix):
                    continue
                cmp = verdicts[0]
                tables = {nodes[i].name for i in matrix if nodes[i].kind in ("root", "param", "read")}
                if tables - _both(look, cmp) and _reduced(look, below, number):
                    gathered = cmp in look.tokens[1]
                    return [
                        _walk(
                            look,
                            "ancestors",
                            nodes[cmp].line,
                            chosen.line,
                            cmp,
                            tables | _both(look, cmp),
                            weak=not gathered,
                        )
                    ]
    return []


def _ancestor_bits(look: Judge) -> list[Walk]:
    """F4 in integers: mismatches are gathered into one word (or set), and a node is out if any of its ancestors is
    in it."""
    nodes = look.nodes
    if not look.tokens[2]:
        return []
    gathered = {c for c in look.tokens[2] if nodes[c].name in _EQ and _read_under_a_table(look, c)}
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
                    _walk(
                        look,
                        "ancestors",
                        nodes[verdicts[0]].line,
                        mix.line,
                        verdicts[0],
                        tables | _both(look, verdicts[0]),
                    )
                ]
    return []


def _read_under_a_table(look: Judge, cmp: int) -> bool:
    node = look.nodes[cmp]
    for read in (*look.top_reads(node.left), *look.top_reads(node.right)):
        index = frozenset(t for t, how in look.nodes[read].edges if how == I)
        if _direct_reads(look, index):
            return True
    return False


def _reduced(look: Judge, below: frozenset[int], mix: int) -> bool:
    """Between the masking and the choice, a reduction over ancestors: all, any, a product, or a matrix product set
    against a number."""
    nodes = look.nodes
    for number in below:
        node = nodes[number]
        if node.kind == "call" and node.name in _REDUCE and mix in look.below([number], _D):
            return True
        if nodes[mix].name == "@" and node.kind == "cmp" and mix in look.below([number], frozenset({D, C})):
            return True
    return False


# ---- chains


def _chains(look: Judge) -> list[Walk]:
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
            if _both(look, cmp) & changed:
                continue
            reads = [r for s in (node.left, node.right) for r in look.top_reads(s)]
            at = [r for r in reads if _steps(look, r, loop) and _scalar(look, r)]
            random = look.is_random(node.left) or look.is_random(node.right)
            if len({nodes[r].name for r in at if not nodes[r].name.startswith(".")}) >= 2 or (at and random):
                deciders.append(cmp)
        if not deciders:
            continue
        kept = [c for c in deciders if _stops(look, loop, c)]
        if kept and _sinks(look, loop, kept):
            accepts = tuple(dict.fromkeys(_chain_accepts(look, c) for c in kept))
            first = kept[0]
            tables = set().union(*(_both(look, c) for c in kept))
            found.append(Walk("chain", here.line, here.end, nodes[first].line, tuple(sorted(tables)), accepts=accepts))
    if not found:
        found += _chain_vectors(look)
    return found[:1]


def _chain_accepts(look: Judge, cmp: int) -> str:
    node = look.nodes[cmp]
    if node.name in _EQ:
        return "greedy"
    below = {
        look.nodes[i].name for i in look.below(node.left | node.right, _D) if look.nodes[i].kind in ("bin", "call")
    }
    return (
        "ratio" if below & {"/", "log", "exp"} else "synthetic" if look.is_random(node.left | node.right) else "other"
    )


def _steps(look: Judge, read: int, loop: int) -> bool:
    """Read at the loop's own position, or an element that the loop itself hands out."""
    nodes, here = look.nodes, look.flow.loops[loop]
    if read in here.var:
        return True
    index = look.below([t for t, how in nodes[read].edges if how == I], _DI)
    if not here.var.isdisjoint(index):
        return True
    counters = {p for p in here.phis.values() if _counts(look, p)}
    return not counters.isdisjoint(index)


def _counts(look: Judge, phi: int) -> bool:
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
        and not here.var.isdisjoint(_plain(look, frozenset(t for t, how in n.edges if how == D)))
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
    compared = set().union(*(_both(look, c) for c in kept))
    for write in flow.writes:
        if not look.inside(write.loop, loop) or write.how == "attr":
            continue
        if write.root in compared and write.mask:
            return True
        if any(
            nodes[r].kind in ("read", "iter") and _steps(look, r, loop) and _scalar(look, r)
            for r in look.made_of(write.value)
        ):
            return True
    returned = look.below(flow.returned, _D)
    return any(_counts(look, phi) and phi in returned for phi in flow.loops[loop].phis.values())


def _scalar(look: Judge, read: int) -> bool:
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


def _chain_vectors(look: Judge) -> list[Walk]:
    nodes = look.nodes
    for number, node in enumerate(nodes):
        if node.kind != "call" or node.name not in _PREFIX | _FIRST:
            continue
        below = look.below([t for t, how in node.edges if how == D], _D)
        verdicts = sorted(look.tokens[0].intersection(below))
        if not verdicts:
            continue
        if node.name in _PREFIX:
            summed = any(
                n.kind == "call"
                and n.name in ("sum", "argmin", "all", "count_nonzero")
                and number in look.below([i], _D)
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
                tuple(sorted(_both(look, cmp))),
                accepts=(_chain_accepts(look, cmp),),
            )
        ]
    return []


def _finds_mismatch(look: Judge, finder: str, cmp: int) -> bool:
    """The finder gives the first place where the comparison says no: the first False of "same", the first True of
    "differs"."""
    node = look.nodes[cmp]
    if node.name not in _EQ:
        return look.is_random(node.left | node.right)
    return (finder == "argmin") == (node.name in ("Eq", "In"))


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
                for r in _direct_reads(look, index)
                if nodes[r].name not in stores and _steps(look, r, loop) and _scalar(look, r)
            ]
            if tables:
                return node.line, stores[node.name]
    return None
