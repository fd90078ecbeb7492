"""Mode auto on simulated clocks: it finds the best budget, and costs next to nothing when nothing is accepted."""

from __future__ import annotations

import random

import pytest

from ddtree.measure import CHAIN
from ddtree.standalone.auto import Auto
from ddtree.standalone.rounds import PLAIN_DECODE, RoundResult

TREES = (8, 16, 32, 64, 128)
GPU = {PLAIN_DECODE: 1.0, CHAIN: 1.25, 8: 1.25, 16: 1.28, 32: 1.31, 64: 1.38, 128: 1.6}
CPU = {PLAIN_DECODE: 1.0, CHAIN: 2.0, 8: 1.6, 16: 2.1, 32: 3.0, 64: 4.6, 128: 8.5}


def simulate(cost: dict[int, float], depth: dict[int, float], tokens: int, seed: int) -> tuple[float, dict[int, int]]:
    """Seconds that ``tokens`` tokens took, and rounds by budget. depth: accepted drafts a budget has on average."""
    auto, rng, seconds, done, used = Auto(TREES), random.Random(seed), 0.0, 0, dict.fromkeys(cost, 0)
    while done < tokens:
        budget = auto.choose()
        luck = rng.random() * 2

        def accepted(b: int, luck: float = luck) -> int:
            return min(int(depth.get(b, 0.0) * luck + rng.random()), 15)

        count = 0 if budget == PLAIN_DECODE else accepted(budget)
        # Nodes: as many within a smaller budget as that budget would have accepted.
        nodes: list[int] = []
        for b in TREES:
            if b <= budget:
                nodes += [b] * max(min(accepted(b), count) - len(nodes), 0)
        nodes += [max(budget, 1)] * (count - len(nodes))
        took = cost[budget] * rng.uniform(0.98, 1.02)
        auto.learn(budget, took, [RoundResult(count, [0] * (count + 1), nodes[:count], min(accepted(CHAIN), count))])
        seconds, done, used[budget] = seconds + took, done + count + 1, used[budget] + 1
    return seconds, used


@pytest.mark.parametrize("cost", [GPU, CPU], ids=["gpu", "cpu"])
def test_a_useless_drafter_costs_less_than_three_percent(cost: dict[int, float]) -> None:
    for seed in range(20):
        seconds, _ = simulate(cost, {}, 512, seed)
        assert 512 * cost[PLAIN_DECODE] / seconds >= 0.97


@pytest.mark.parametrize(
    ("cost", "depth", "best"),
    [
        (GPU, {CHAIN: 1.4, 8: 1.7, 16: 2.0, 32: 2.3, 64: 2.5, 128: 2.6}, {32, 64}),
        (GPU, {CHAIN: 5.0, 8: 3.0, 16: 4.0, 32: 4.5, 64: 4.8, 128: 4.9}, {CHAIN}),
        (CPU, {CHAIN: 1.4, 8: 1.7, 16: 2.0, 32: 2.3, 64: 2.5, 128: 2.6}, {8}),
        (CPU, {CHAIN: 0.1, 8: 0.2, 16: 0.2, 32: 0.2, 64: 0.2, 128: 0.2}, {PLAIN_DECODE}),
    ],
)
def test_the_best_budget_is_found(cost: dict[int, float], depth: dict[int, float], best: set[int]) -> None:
    for seed in range(5):
        _, used = simulate(cost, depth, 6000, seed)
        assert sum(used[b] for b in best) > 0.8 * sum(used.values()), used
