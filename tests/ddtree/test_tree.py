"""The tree against a heap, its invariants, and the walk against a walk in plain Python."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch

from ddtree.errors import BudgetError
from ddtree.tree import Tree, build_tree, chain_tree, dense_mask, top_logprobs
from ddtree.walk import commit_rows, committed_lengths, filter_logits, sample_target, walk_greedy


def heap_scores(values: torch.Tensor, budget: int) -> list[float]:
    """Scores of the budget best prefixes, found one by one. values [K, T] sorted descending, float64."""
    rows = [[x for x in row if x > float("-inf")] for row in values.tolist()]
    order = itertools.count()
    heap = [(-rows[0][0], next(order), 0, 0, 0.0)] if rows[0] else []
    found: list[float] = []
    while heap and len(found) < budget:
        negative, _, d, rank, above = heapq.heappop(heap)
        found.append(-negative)
        if rank + 1 < len(rows[d]):
            heapq.heappush(heap, (-(above + rows[d][rank + 1]), next(order), d, rank + 1, above))
        if d + 1 < len(rows) and rows[d + 1]:
            heapq.heappush(heap, (negative - rows[d + 1][0], next(order), d + 1, 0, -negative))
    return found


def random_logprobs(R: int, K: int, V: int, spread: float, seed: int, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(R, K, V, generator=torch.Generator().manual_seed(seed)) * spread
    return torch.log_softmax((logits * 2).round() / 2 if ties else logits, -1)


SHAPES = [
    (15, 2000, 16),
    (15, 2000, 64),
    (15, 500, 200),
    (15, 8, 64),
    (3, 4, 200),
    (1, 50, 32),
    (15, 300, 1),
    (2, 2, 6),
]


@pytest.mark.parametrize(("K", "V", "budget"), SHAPES)
@pytest.mark.parametrize(("spread", "ties"), [(0.3, False), (1.0, True), (3.0, False)])
def test_scores_equal_best_first_search(K: int, V: int, budget: int, spread: float, ties: bool) -> None:
    logprobs = random_logprobs(4, K, V, spread, seed=K * V + budget, ties=ties)
    tree = build_tree(logprobs, torch.arange(4), budget)
    ranked = logprobs.double().sort(-1, descending=True).values[..., :budget]
    for r in range(4):
        expected = torch.tensor(heap_scores(ranked[r], budget), dtype=torch.float64)
        n = int(tree.n_nodes[r])
        assert n == len(expected)
        torch.testing.assert_close(tree.scores[r, 1 : n + 1].double(), expected, rtol=2e-6, atol=2e-6)
    check_invariants(tree, logprobs)


def check_invariants(tree: Tree, logprobs: torch.Tensor) -> None:
    for r in range(tree.tokens.shape[0]):
        n = int(tree.n_nodes[r])
        seen, ancestors = set(), [{0}]
        for i in range(1, n + 1):
            p, d, t = int(tree.parents[r, i]), int(tree.depth[r, i]), int(tree.tokens[r, i])
            assert 0 <= p < i and d == int(tree.depth[r, p]) + 1
            assert (p, t) not in seen
            seen.add((p, t))
            ancestors.append(ancestors[p] | {i})
            gain = float(tree.scores[r, i] - tree.scores[r, p])
            assert gain == pytest.approx(min(0.0, float(logprobs[r, d - 1, t])), abs=2e-5)
        ancestors += [{i} for i in range(n + 1, tree.size)]
        mask = dense_mask(tree.words)[r]
        assert [set(row.nonzero()[:, 0].tolist()) for row in mask] == ancestors
        assert (tree.parents[r, n + 1 :] == -1).all() and (tree.depth[r, n + 1 :] == 0).all()


def test_equal_scores_follow_the_stated_order() -> None:
    tree = build_tree(torch.zeros(1, 3, 2), torch.tensor([7]), 9)
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 2, 2, 3, 3, 3]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3, 3, 4]]


def test_impossible_tokens_and_nan_become_padding() -> None:
    logits = torch.full((1, 4, 6), float("-inf"))
    logits[0, :, :2] = 0.0
    logits[0, 1, 1] = float("nan")
    tree = build_tree(top_logprobs(logits, 64), torch.tensor([3]), 64)
    assert tree.n_nodes.tolist() == [2 + 2 + 4 + 8]
    assert set(tree.tokens[0, 1:17].tolist()) <= {0, 1}
    check_invariants(tree, torch.log_softmax(logits.nan_to_num(nan=float("-inf")), -1))


@pytest.mark.parametrize("budget", [0, -3, 4096])
def test_budget_is_checked(budget: int) -> None:
    with pytest.raises(BudgetError, match="budget-too"):
        build_tree(torch.zeros(1, 3, 2), torch.tensor([7]), budget)


def python_walk(tree: Tree, chosen: torch.Tensor, r: int) -> list[int]:
    nodes = [0]
    while True:
        wanted = int(chosen[r, nodes[-1]])
        children = [i for i in range(tree.size) if tree.parents[r, i] == nodes[-1] and int(tree.tokens[r, i]) == wanted]
        if not children:
            return nodes
        nodes += children


@pytest.mark.parametrize("budget", [1, 16, 64, 130])
def test_walk_equals_python_walk(budget: int) -> None:
    gen = torch.Generator().manual_seed(budget)
    R = 12
    tree = build_tree(random_logprobs(R, 7, 40, 6.0, seed=budget), torch.zeros(R, dtype=torch.long), budget)
    chosen = torch.full((R, tree.size), 41)
    for r, i in itertools.product(range(R), range(tree.size)):
        children = (tree.parents[r] == i).nonzero()[:, 0]
        if len(children) and torch.rand(1, generator=gen) < 0.85:
            chosen[r, i] = tree.tokens[r, children[torch.randint(len(children), (1,), generator=gen)]]
    path = walk_greedy(tree, chosen)
    assert path.count.max() >= (1 if budget == 1 else 3)
    for r in range(R):
        nodes = python_walk(tree, chosen, r)
        n = len(nodes)
        assert path.nodes[r].tolist() == nodes + [-1] * (8 - n)
        assert path.count[r] == n - 1 and path.last[r] == nodes[-1]
        assert path.bonus[r] == chosen[r, nodes[-1]]
        tokens = [int(tree.tokens[r, i]) for i in nodes[1:]] + [int(path.bonus[r])]
        assert path.tokens[r].tolist() == tokens + [-1] * (8 - n)


def test_padding_is_never_walked() -> None:
    tree = build_tree((torch.zeros(1, 2, 1), torch.tensor([[[5], [0]]])), torch.tensor([9]), 8)
    path = walk_greedy(tree, torch.zeros(1, 9, dtype=torch.long))  # padding slots carry token 0, too
    assert tree.n_nodes.tolist() == [2] and path.count.tolist() == [0]


def test_chain_is_a_tree() -> None:
    tree = chain_tree(torch.tensor([[4, 5, 6], [1, 2, 3]]), torch.tensor([3, 0]))
    path = walk_greedy(tree, torch.tensor([[4, 5, 9, 9], [8, 8, 8, 8]]))
    assert path.tokens.tolist() == [[4, 5, 9, -1], [8, -1, -1, -1]]
    source, destination = commit_rows(path, torch.tensor([10, 20]))
    assert source.tolist() == destination.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert committed_lengths(path, torch.tensor([10, 20])).tolist() == [13, 21]


def test_filter_logits_keeps_the_nucleus() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -9.0]])
    assert torch.isfinite(filter_logits(logits, 1.0, top_k=2)).tolist() == [[True, True, False, False, False]]
    # softmax = .644 .237 .087 .032: two tokens reach 0.7, one reaches 0.6.
    assert torch.isfinite(filter_logits(logits, 1.0, top_p=0.7)).tolist() == [[True, True, False, False, False]]
    assert torch.isfinite(filter_logits(logits, 1.0, top_p=0.6)).tolist() == [[True, False, False, False, False]]
    assert torch.isfinite(filter_logits(logits, 1.0, top_p=1e-9)).sum() == 1


def test_sample_target_follows_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).expand(200_000, 4)
    draws = sample_target(logits, 0.7, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(draws, minlength=4) / len(draws)
    assert (share - (logits[0] / 0.7).softmax(-1)).abs().max() < 0.005
    assert sample_target(logits[:3], 0.0).tolist() == [3, 3, 3]
