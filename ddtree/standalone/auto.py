"""Mode ``auto``: run what commits most tokens per second, from measured step costs and the acceptance seen so far.

Nodes of a tree are sorted by score, so its first n nodes are the tree of budget n: one round with a large tree tells
what every smaller one would have accepted. A larger one is tried when the trend would pay for its cost. What trying
costs against plain decoding is booked and bounded: a drafter that accepts nothing must not cost 3% over 512 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddtree.measure import CHAIN
from ddtree.standalone.rounds import PLAIN_DECODE, RoundResult

MEMORY = 1 / 24  # weight of the newest round in a mean
TRIAL = 3  # rounds of a candidate before it is judged
ALLOWANCE = 6.0  # plain steps that trying may cost at first,
SHARE = 0.01  # and the share of all time it may cost later


@dataclass
class Mean:
    """An exponential mean that starts as a plain one."""

    value: float = 0.0
    seen: int = 0

    def add(self, x: float) -> None:
        self.seen += 1
        self.value += (x - self.value) * max(1 / self.seen, MEMORY)


@dataclass
class Auto:
    """Chooses a budget per round: PLAIN_DECODE, CHAIN, or one of ``trees`` (ascending)."""

    trees: tuple[int, ...]
    cost: dict[int, Mean] = field(default_factory=dict)  # seconds of a round
    tau: dict[int, Mean] = field(default_factory=dict)  # tokens of a round, bonus included
    trial: list[int] = field(default_factory=list)  # rounds still to run of a candidate on trial
    lost: float = 0.0  # seconds that speculation has cost against plain decoding, net
    spent: float = 0.0
    wait: int = 0  # plain rounds until speculation is tried again
    patience: int = 32

    def __post_init__(self) -> None:
        for b in (PLAIN_DECODE, CHAIN, *self.trees):
            self.cost[b], self.tau[b] = Mean(), Mean()
        self.tau[PLAIN_DECODE] = Mean(1.0, 1)

    def rate(self, budget: int) -> float:
        """Tokens per second as measured; 0 where nothing is known."""
        tau, cost = self.tau[budget], self.cost[budget]
        return tau.value / cost.value if tau.seen and cost.seen else 0.0

    def choose(self) -> int:
        """The budget of the next round."""
        if self.cost[PLAIN_DECODE].seen < 2:
            return PLAIN_DECODE
        if self.trial:
            return self.trial.pop()
        best = max((PLAIN_DECODE, CHAIN, *self.trees), key=self.rate)
        if self.affordable():
            candidate = self.candidate(best)
            if candidate is not None:
                self.trial = [candidate] * (TRIAL - 1)
                return candidate
        if best == PLAIN_DECODE:
            self.wait -= 1
        return best

    def affordable(self) -> bool:
        """Whether trying something may cost anything now."""
        return self.lost < ALLOWANCE * self.cost[PLAIN_DECODE].value + SHARE * self.spent

    def candidate(self, best: int) -> int | None:
        """A budget worth trying: the first tree and the chain once, a larger tree if the trend would pay for it."""
        for b in (self.trees[0], CHAIN):
            if self.cost[b].seen == 0:
                return b
        if best == PLAIN_DECODE:
            if self.wait > 0:
                return None
            self.wait, self.patience = self.patience, min(self.patience * 2, 4096)
            return max((CHAIN, *self.trees), key=self.rate)
        for small, b in zip((CHAIN, *self.trees), self.trees, strict=False):
            if self.cost[b].seen == 0:
                trend = self.tau[small].value * 1.12
                return b if trend / (self.cost[small].value * 1.03) > self.rate(best) else None
        return None

    def learn(self, budget: int, seconds: float, rounds: Sequence[RoundResult]) -> None:
        """Book a round of these requests: its cost, and what every smaller budget would have committed."""
        if not rounds:
            return
        self.cost[budget].add(min(seconds, 3 * self.cost[budget].value) if self.cost[budget].seen > 3 else seconds)
        committed = sum(r.count + 1 for r in rounds) / len(rounds)
        self.spent += seconds
        plain = self.cost[PLAIN_DECODE].value
        if budget != PLAIN_DECODE:
            self.lost = max(self.lost + seconds - committed * plain, 0.0)
            # A tree need not hold the whole chain, so a large tree's count of the chain is the only fair one.
            if budget == CHAIN or budget >= 32:
                self.tau[CHAIN].add(1 + sum(r.on_chain for r in rounds) / len(rounds))
            for b in self.trees:
                if b <= budget:
                    self.tau[b].add(1 + sum(r.within(b) for r in rounds) / len(rounds))
            if committed > 1:
                self.patience = 32
