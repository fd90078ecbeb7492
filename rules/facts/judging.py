"""What the families of acceptance ask of a graph: what is compared, where it was read, what decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rules.facts.cycles import cycles
from rules.facts.flow import Flow
from rules.facts.values import C, D, I, Value, reaches

EQUALITY = frozenset({"Eq", "NotEq", "In", "NotIn", "Is", "IsNot"})
BEST = frozenset({"argmax", "argsort", "topk", "sort", "sorted", "max", "nanargmax", "amax"})
PREFIX = frozenset({"cumprod", "cummin", "logcumsumexp", "cumulative_and", "cummin_", "cumprod_", "accumulate"})
REDUCE = frozenset({"all", "any", "amin", "prod", "min", "sum", "amax", "count_nonzero", "reduce_and"})


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
        if node.name not in EQUALITY:
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
        return self._scaled(node.left, node.right) or self._scaled(node.right, node.left)

    def _scaled(self, product: Value, other: Value) -> bool:
        """p[node, token] against u * q: three tables, the first read under a token."""
        tables: set[str] = set()
        for number in product:
            part = self.nodes[number]
            if part.kind == "bin" and part.name == "*" and part.left and part.right:
                sides = [{self.nodes[r].name for r in self.top_reads(side)} for side in (part.left, part.right)]
                if all(sides) and sides[0].isdisjoint(sides[1]):
                    tables = sides[0] | sides[1]
        reads = [r for r in self.top_reads(other) if self.nodes[r].name not in tables] if tables else []
        index = [frozenset(t for t, how in self.nodes[r].edges if how == I) for r in reads]
        return any(self.nodes[r].kind == "read" for i in index for r in self.top_reads(i))

    def written(self, loop: int) -> set[str]:
        return {w.root for w in self.flow.writes if w.how in ("store", "append", "aug") and self.inside(w.loop, loop)}

    def components(self, loop: int) -> list[set[int]]:
        """Strongly connected parts (over data and index edges) that hold a phi of this loop: values that one round
        hands to the next."""
        if self._scc is None:
            self._scc = cycles(self.flow)
        found: dict[int, set[int]] = {}
        for phi in self.flow.loops[loop].phis.values():
            part = self._scc.get(phi)
            if part is not None:
                found[id(part)] = part
        return list(found.values())
