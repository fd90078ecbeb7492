"""Values that one round of a loop hands to the next: the strongly connected parts of the graph."""

from __future__ import annotations

from rules.facts.flow import Flow
from rules.facts.values import DATA_INDEX

#: Calls that hand on what they get; a value that goes through any other call is no longer the place that was chased.
HANDS_ON = frozenset(
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


def cycles(flow: Flow) -> dict[int, set[int]]:
    """node -> its strongly connected part over D and I edges, for parts that have a cycle (Tarjan, without
    recursion)."""
    nodes = flow.nodes

    def targets(number: int) -> list[int]:
        node = nodes[number]
        if node.kind == "len" or (node.kind == "call" and node.name not in HANDS_ON):
            return []
        return [t for t, how in node.edges if how in DATA_INDEX]

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
                    if len(part) > 1 or any(t == number for t, how in nodes[number].edges if how in DATA_INDEX):
                        for member in part:
                            parts[member] = part
    return parts
