"""Random trees for the kernel tests: any shape, in a random topological order, batched and padded."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree import Tree, ancestor_words


def chain(n: int, gen: torch.Generator) -> list[int]:
    return [-1, *range(n - 1)]


def star(n: int, gen: torch.Generator) -> list[int]:
    return [-1] + [0] * (n - 1)


def random(n: int, gen: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(0, i, (1,), generator=gen)) for i in range(1, n)]


def spine(n: int, gen: torch.Generator, depth: int = 15) -> list[int]:
    """What a DDTree looks like: a spine of at most `depth` nodes with leaves and short branches along it."""
    parents, level = [-1], [0]
    while len(parents) < n:
        at = int(torch.randint(max(0, len(parents) - 12), len(parents), (1,), generator=gen))
        at = at if level[at] < depth else 0
        parents.append(at)
        level.append(level[at] + 1)
    return parents


SHAPES = {"chain": chain, "star": star, "random": random, "spine": spine}


def shuffled(parents: list[int], gen: torch.Generator) -> list[int]:
    """The same tree in a random topological order."""
    children: list[list[int]] = [[] for _ in parents]
    for i, p in enumerate(parents):
        if p >= 0:
            children[p].append(i)
    ready, order = [0], []
    while ready:
        node = ready.pop(int(torch.randint(0, len(ready), (1,), generator=gen)))
        order.append(node)
        ready += children[node]
    new = {old: i for i, old in enumerate(order)}
    return [-1 if parents[old] < 0 else new[parents[old]] for old in order]


def make_tree(lists: list[list[int]], size: int, gen: torch.Generator, vocabulary: int = 1000) -> Tree:
    """Batch parent lists into a Tree of `size` slots; short trees are padded as `build_tree` pads (parent -1, depth
    0)."""
    parents = torch.full((len(lists), size), -1, dtype=torch.int32)
    depth = torch.zeros(len(lists), size, dtype=torch.int32)
    for r, one in enumerate(lists):
        for i, p in enumerate(one):
            parents[r, i] = p
            depth[r, i] = 0 if p < 0 else depth[r, p] + 1
    deepest = int(depth.max())
    return Tree(
        tokens=torch.randperm(vocabulary, generator=gen)[:size].expand(len(lists), -1).contiguous(),
        parents=parents,
        depth=depth,
        words=ancestor_words(parents, max(deepest, 1)),
        scores=torch.zeros(len(lists), size),
        n_nodes=torch.tensor([len(one) - 1 for one in lists], dtype=torch.int32),
        max_depth=max(deepest, 1),
    )


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute error over the largest absolute value (NaN if either has one)."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))
