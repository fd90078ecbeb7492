"""What a bench run measured, as the recommendation weighs it; read from the JSON of ``python -m ddtree.standalone
bench``, which comes from a host and is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One measurement of the same target, prompts, batch size and verify width. Times are seconds per round, tau is
    tokens committed per round with the bonus token. None: not measured. ``t_plain`` is one decode step without
    speculation."""

    batch: int = 1
    graphs: bool = True  # with CUDA graphs; without them the tree's cost does not show
    real_prompts: bool = True  # random tokens say nothing about acceptance
    t_plain: float | None = None
    t_chain: float | None = None
    t_tree: float | None = None
    tau_chain: float | None = None
    tau_tree: float | None = None
    tau_mtp: float | None = None  # the target's own MTP head, where it has one
    t_mtp: float | None = None

    @property
    def usable(self) -> bool:
        """Whether it may decide: eager times and random prompts may not."""
        return self.graphs and self.real_prompts

    @property
    def tree_over_chain(self) -> float | None:
        """(tau_tree / tau_chain) / (t_tree / t_chain): above 1 the tree pays."""
        return _quotient(_rate(self.tau_tree, self.t_tree), _rate(self.tau_chain, self.t_chain))

    @property
    def chain_over_plain(self) -> float | None:
        """Speed of the chain against plain decoding, which commits one token per ``t_plain``."""
        return _quotient(_rate(self.tau_chain, self.t_chain), _rate(1.0, self.t_plain))

    @property
    def mtp_over_chain(self) -> float | None:
        return _quotient(_rate(self.tau_mtp, self.t_mtp), _rate(self.tau_chain, self.t_chain))

    @property
    def break_even(self) -> float | None:
        """The tau_tree / tau_chain at which the tree starts to pay."""
        return _quotient(self.t_tree, self.t_chain)


def from_bench(data: Mapping[str, Any]) -> Measured | None:
    """The measurement, with the best of the trees; None where plain decoding, the chain or a number is missing.

    Times are per round and request, from whole runs: tau / (tokens per second / batch). The run says what it was:
    ``batch`` (int), ``graphs`` (rounds were CUDA graphs) and ``prompts`` ("random" or what they were). What it does
    not say counts against it: the measurement is then shown but decides nothing.
    """
    runs = {str(run.get("mode")): run for run in data.get("results") or () if isinstance(run, Mapping) and _speed(run)}
    trees = [run for mode, run in runs.items() if mode.startswith("tree-")]
    plain, chain = runs.get("ar"), runs.get("chain")
    if plain is None or chain is None:
        return None
    tree = max(trees, key=_speed, default=None)
    batch = data.get("batch")
    prompts = data.get("prompts")
    count = batch if isinstance(batch, int) and batch > 0 else 1
    return Measured(
        batch=count,
        graphs=data.get("graphs") is True,
        real_prompts=isinstance(prompts, str) and prompts not in ("", "random"),
        t_plain=count * _tau(plain) / _speed(plain),
        t_chain=count * _tau(chain) / _speed(chain),
        tau_chain=_tau(chain),
        t_tree=count * _tau(tree) / _speed(tree) if tree else None,
        tau_tree=_tau(tree) if tree else None,
    )


def _speed(run: Mapping[str, Any]) -> float:
    """Tokens per second of all requests together; 0 where it is not a number."""
    tokens, seconds = _number(run.get("tokens")), _number(run.get("seconds"))
    return tokens / seconds if tokens and seconds and _tau(run) else 0.0


def _tau(run: Mapping[str, Any]) -> float:
    return _number(run.get("tau"))


def _number(value: Any) -> float:
    """A positive finite number, else 0."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if good else 0.0


def _rate(tau: float | None, seconds: float | None) -> float | None:
    return _quotient(tau, seconds)


def _quotient(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
