"""What dataflow is made of: values, what they depend on, loops and writes.

Nodes are values; edges point to what a value depends on:
  D  data       the value is made of it
  I  index      it says where the value was read
  C  compared   it is a side of the comparison
  L  length     only its size counts
  P  predicate  it decides whether this value or another is taken; control is not data, and that separates a chain
  from a tree
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

D, I, C, P, L = 0, 1, 2, 3, 4
DATA = frozenset({D})
DATA_INDEX = frozenset({D, I})
ALL_EDGES = frozenset({D, I, C, P, L})
Value = frozenset[int]
Env = dict[str, Value]
NONE: Value = frozenset()


class TooLarge(Exception):  # noqa: N818
    """The graph grew beyond its budget; what was made so far is judged."""


@dataclass(slots=True)
class Node:
    kind: str  # root const param phi read window iter affine cmp sel bin call len fresh upd
    name: str  # table of a read, operator, called name
    line: int
    loop: int  # innermost loop, -1 outside
    edges: list[tuple[int, int]] = field(default_factory=list)  # (node, edge kind)
    left: Value = NONE  # sides of a comparison or an operation
    right: Value = NONE


@dataclass(slots=True)
class Loop:
    parent: int
    line: int
    end: int
    kind: str  # for while comp rec
    guarded: bool = False  # inside a try that catches a missing key or index
    var: Value = NONE
    phis: dict[str, int] = field(default_factory=dict)
    exits: list[Value] = field(default_factory=list)  # what decides a break, a return or the while test
    continues: list[Env] = field(default_factory=list)
    breaks: list[Env] = field(default_factory=list)


@dataclass(slots=True)
class Write:
    root: str
    how: str  # store append aug
    line: int
    loop: int
    index: Value
    value: Value
    under: Value  # predicates in force
    mask: Value


def reaches(nodes: list[Node], start: Iterable[int], kinds: frozenset[int], limit: int = 4000) -> set[int]:
    """All nodes that ``start`` depends on through edges of these kinds, ``start`` included."""
    seen = set(start)
    todo = list(seen)
    while todo and len(seen) < limit:
        for target, how in nodes[todo.pop()].edges:
            if how in kinds and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen
