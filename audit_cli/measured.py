"""From the JSON of a bench run (``python -m ddtree.standalone bench --json``) to what the recommendation weighs. It
comes from a host: checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from audit_cli.recommend import Measured


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
