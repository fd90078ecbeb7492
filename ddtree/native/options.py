"""The options of method "ddtree", checked before anything is loaded. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ddtree.errors import EngineError

# Keys of --speculative-config that belong to this plugin; the others go to vLLM's own "dflash" method.
KEYS = ("budget", "horizon", "top_k", "unproven")
MAX_BUDGET = 256  # a node's ancestors are a row of bits, its attention one small tile; a larger tree has never paid
CAPTURE_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CAPTURE_TOKENS = 2112


class OptionError(EngineError):
    """An option, or a feature of this server, that the native path cannot serve."""


@dataclass(frozen=True)
class Options:
    """budget: tree nodes besides the root, N. horizon: positions drafted a round, K. top_k: tokens tried a position."""

    budget: int
    horizon: int
    top_k: int
    unproven: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def split_options(speculative: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A speculative config with method "ddtree" as (vLLM's own config with method "dflash", the plugin's options).

    Raises:
        OptionError: budget and num_speculative_tokens contradict each other, or neither is there.
    """
    theirs = {k: v for k, v in speculative.items() if k not in KEYS}
    ours = {k: speculative[k] for k in KEYS if k in speculative}
    tokens, budget = theirs.get("num_speculative_tokens"), ours.get("budget")
    if tokens is None and budget is None:
        raise OptionError("ddtree-budget-missing", "no tree budget", 'give "num_speculative_tokens": 64')
    if tokens is not None and budget is not None and tokens != budget:
        raise OptionError(
            "ddtree-options-contradict",
            f'"budget" is {budget} and "num_speculative_tokens" is {tokens}',
            "they are the same thing: give one",
        )
    ours["budget"] = budget if budget is not None else tokens
    theirs.update(method="dflash", num_speculative_tokens=ours["budget"])
    return theirs, ours


def block_size_of(drafter: Mapping[str, Any]) -> int | None:
    """Block size of a DFlash drafter, from its config's top level or ``dflash_config``; None where it is not said."""
    size = drafter.get("block_size") or (drafter.get("dflash_config") or {}).get("block_size")
    return int(size) if size else None


def resolve(ours: Mapping[str, Any], block_size: int | None) -> Options:
    """Defaults filled in and checked.

    Args:
        ours: the plugin's options; unknown keys are refused. block_size: the drafter's, 1 + the longest horizon.
    Raises:
        OptionError
    """
    if unknown := sorted(set(ours) - set(KEYS)):
        raise OptionError("ddtree-option-unknown", f"unknown option {', '.join(unknown)}", f"known: {', '.join(KEYS)}")
    budget = ours.get("budget")
    if budget is None:
        raise OptionError("ddtree-budget-missing", "no tree budget", 'give "num_speculative_tokens": 64')
    _positive("budget", budget, MAX_BUDGET)
    longest = (block_size or 16) - 1
    horizon = ours.get("horizon", min(longest, budget))
    why = f"the drafter's block size {longest + 1} less the root" if block_size else ""
    _positive("horizon", horizon, longest, why)
    if horizon > budget:
        raise OptionError(
            "ddtree-horizon", f"horizon {horizon} is above the budget {budget}", "no path can be longer than the tree"
        )
    top_k = ours.get("top_k", min(16, budget))
    _positive("top_k", top_k, budget, "more tokens per position than nodes cannot be used")
    unproven = ours.get("unproven", False)
    if not isinstance(unproven, bool):
        raise OptionError("ddtree-option-type", f"unproven is {unproven!r}", "true or false")
    return Options(budget, horizon, top_k, unproven)


def _positive(name: str, value: Any, most: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError("ddtree-option-type", f"{name} is {value!r}", "a whole number is needed")
    if not 1 <= value <= most:
        raise OptionError("ddtree-option-range", f"{name} {value} is outside 1..{most}", why)


def check_scheduler(budget: int, max_num_batched_tokens: int, max_num_seqs: int) -> str | None:
    """A step must hold at least one whole tree; returns a warning where it cannot hold one per sequence.

    Raises:
        OptionError: with the arithmetic.
    """
    rows = budget + 1
    if max_num_batched_tokens < rows:
        raise OptionError(
            "ddtree-batched-tokens",
            f"a tree of {budget} nodes is {rows} rows, and max_num_batched_tokens is {max_num_batched_tokens}",
            f"raise --max-num-batched-tokens to at least {rows}, or lower the budget to {max_num_batched_tokens - 1}",
        )
    fit = max_num_batched_tokens // rows
    if fit < max_num_seqs:
        return (
            f"{max_num_batched_tokens} batched tokens hold {fit} trees of {rows} rows, and max_num_seqs is "
            f"{max_num_seqs}: the others wait for a step, or get smaller trees "
            f"({max_num_seqs} whole trees need {max_num_seqs * rows})"
        )
    return None


def capture_sizes(budget: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """CUDA graph sizes in tokens: whole trees for the usual batch sizes, so that none is rounded up to a wrong one."""
    rows = budget + 1
    most = min(max_num_seqs * rows, max_num_batched_tokens, max(CAPTURE_TOKENS, rows))
    return sorted({b * rows for b in CAPTURE_BATCHES if b * rows <= most}) or [rows]
