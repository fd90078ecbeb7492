"""Which path fits: native, standalone, retrain, chain or none. One table, read from the top; the first row that applies
decides.

The prior that the reasons quote (trees at 0.68 to 1.00 of the chain's speed on datacentre GPUs, gains at batch 1 and on
slow devices) is from the measurements posted in vllm-project/vllm#42910, #40809 and #22752.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from audit_cli.measured import Measured
from reports.model import Outcome, Recommendation, Verdict

Path = Literal["native", "standalone", "retrain", "chain", "none"]


@dataclass(frozen=True)
class Known:
    """What the table asks. ``outcomes`` has "missing" for a verdict that the scan did not get to."""

    outcomes: Mapping[str, str]
    spec: str = "HOST"
    version: str = ""
    measured: Measured | None = None
    errors: tuple[str, ...] = ()  # summaries of lint findings with severity error
    drafter_misfit: tuple[str, ...] = ()  # lint findings that say: trained for another target, template or layout

    def is_(self, id: str, *outcomes: str) -> bool:
        return self.outcomes.get(id, "missing") in outcomes

    def ratio(self, name: str) -> float | None:
        """A ratio of the measurement, when there is one that may decide."""
        return getattr(self.measured, name) if self.measured is not None and self.measured.usable else None


@dataclass(frozen=True)
class Row:
    """One line of the table: when it applies, the path, and the first reason given for it (fields of ``_words`` are
    filled in)."""

    when: Callable[[Known], bool]
    path: Path
    reason: str


#: Errors of the lint that mean: this drafter was made for another target or layout. No flag repairs them.
MISFITS = frozenset(
    {
        "verifier-differs",
        "target-depth-differs",
        "hidden-size-differs",
        "vocabulary-differs",
        "layer-ids-out-of-range",
        "layer-ids-do-not-fit-weights",
        "mask-token-outside-embedding",
    }
)

_STAGES = ("tree-build", "tree-mask", "tree-walk", "tree-commit")

TABLE = (
    Row(
        lambda k: bool(k.drafter_misfit),
        "retrain",
        "the drafter was made for something else ({misfit}): take one made for this target, or train it",
    ),
    Row(
        lambda k: below(k.ratio("chain_over_plain")) and k.is_("aux-layer-offset", "no", "partial"),
        "none",
        "the chain runs at {chain_over_plain} of plain decoding, but this install captures the wrong hidden states "
        "for DFlash "
        "(aux-layer-offset): repair that and measure again before any training",
    ),
    Row(
        lambda k: above(k.ratio("mtp_over_chain"), max(1.0, k.ratio("tree_over_chain") or 1.0)),
        "chain",
        "the target's own MTP head runs at {mtp_over_chain} of the drafter's chain, faster than the tree too, and is "
        "free",
    ),
    Row(
        lambda k: below(k.ratio("chain_over_plain")),
        "retrain",
        "the drafter's chain runs at {chain_over_plain} of plain decoding: below break-even, and a tree of the same "
        "drafter starts from there",
    ),
    Row(
        lambda k: below(k.ratio("tree_over_chain")),
        "chain",
        "measured at batch {batch}: the tree runs at {tree_over_chain} of the chain (it would need tau_tree / "
        "tau_chain above {break_even})",
    ),
    Row(
        lambda k: (
            above(k.ratio("tree_over_chain"))
            and (k.is_("native-adapter", "yes") or all(k.is_(id, "yes") for id in _STAGES))
        ),
        "native",
        "measured at batch {batch}: the tree runs at {tree_over_chain} of the chain, and it can run inside this vLLM",
    ),
    Row(
        lambda k: above(k.ratio("tree_over_chain")),
        "standalone",
        "measured at batch {batch}: the tree runs at {tree_over_chain} of the chain, and no adapter fits this install "
        "(native-adapter: {native_adapter})",
    ),
    Row(
        lambda k: all(k.is_(id, "missing", "unknown") for id in _STAGES),
        "none",
        "nothing could be judged in this install: the audit is incomplete",
    ),
    Row(
        lambda k: all(k.is_(id, "yes") for id in _STAGES),
        "native",
        "all four stages of tree verification are in this install already; whether the tree pays is not measured yet",
    ),
    Row(
        lambda k: k.is_("native-adapter", "yes"),
        "standalone",
        "{stages}; a first measurement is wanted, and the standalone engine makes it without touching the server. "
        "An adapter for this vLLM ({version}) exists for afterwards",
    ),
    Row(
        lambda k: k.is_("native-adapter", "no"),
        "standalone",
        "{stages} and no adapter of ours fits it, so a tree can only run beside it: measure there first",
    ),
    Row(
        lambda k: True,
        "standalone",
        "{stages}, and whether an adapter fits it was not told (native-adapter: {native_adapter}): measure first",
    ),
)

#: (id, outcomes, what it means for whoever deploys): said as a reason against, whatever the path.
CAUTIONS: tuple[tuple[str, tuple[Outcome, ...], str], ...] = (
    (
        "record-integrity",
        ("no",),
        "the install is not what was released: what was measured elsewhere for this version may not hold here",
    ),
    ("opaque-code", ("unknown",), "code on the path of acceptance could not be read"),
    (
        "aux-layer-offset",
        ("no",),
        "DFlash gets the hidden states of the wrong layers here (aux-layer-offset): its acceptance is lower than it "
        "could be",
    ),
    (
        "drafter-sliding-window",
        ("no",),
        "a drafter with sliding-window layers runs with full attention here: acceptance falls in long contexts",
    ),
    ("own-lm-head", ("no",), "a drafter with a vocabulary of its own loses its lm_head here: nothing is accepted"),
    (
        "eagle-block-drop",
        ("no",),
        "with a hybrid target, prefix caching gives no hits while a drafter is on (eagle-block-drop): it can cost "
        "more than the drafter saves",
    ),
    ("gdn-gate-gather", ("no",), "with a GDN target, speculation can produce wrong text here (gdn-gate-gather)"),
    (
        "uniform-decode-guard",
        ("no",),
        "a prompt of exactly 1+K tokens can replay the wrong graph here (uniform-decode-guard)",
    ),
    (
        "mamba-drop-flag",
        ("no",),
        "with a hybrid target and prefix caching, a wrong state can be restored here (mamba-drop-flag): compare cold "
        "and warm output",
    ),
)

_PRIOR = (
    "independent measurements with CUDA graphs on datacentre GPUs find the tree at 0.68x to 1.00x of the chain with "
    "the same drafter; "
    "gains were seen at batch 1, on slow devices, and with trees of 8 nodes or fewer"
)
_TO_MEASURE = (
    "t_plain, t_chain and t_tree: seconds per round with CUDA graphs on, at the batch sizes in use",
    "tau_chain and tau_tree (bonus token included) on real prompts, never on random tokens: the tree pays only if "
    "tau_tree / tau_chain > t_tree / t_chain",
    "the baselines that cost nothing: the target's own MTP head where it has one (Qwen3.5 and 3.6 do), and n-gram "
    "prompt lookup",
    "greedy output with speculation on and off: it must be the same, token by token",
)


def recommend(
    verdicts: Iterable[Verdict],
    *,
    spec: str = "HOST",
    vllm_version: str = "",
    measured: Measured | None = None,
    findings: Iterable[Mapping[str, Any]] = (),
) -> Recommendation:
    """The path that fits, with what speaks for and against it, what is not known yet, and the next command.

    ``spec`` is the target as it was typed. ``findings`` are lint findings as plain data (id, severity, summary).
    Static facts alone never claim that a tree pays.
    """
    found = list(findings)
    known = Known(
        {v.id: v.outcome for v in verdicts},
        spec,
        vllm_version,
        measured,
        tuple(str(f.get("summary", "")) for f in found if f.get("severity") == "error"),
        tuple(str(f.get("summary", "")) for f in found if _is_misfit(f)),
    )
    row = next(row for row in TABLE if row.when(known))
    words = _words(known)
    return Recommendation(
        row.path,
        (row.reason.format(**words), *_more_reasons(known, row.path)),
        _against(known, row.path),
        _needs(known, row.path),
        _next(known, row.path),
    )


def _is_misfit(finding: Mapping[str, Any]) -> bool:
    return finding.get("severity") == "error" and finding.get("id") in MISFITS


def _more_reasons(known: Known, path: Path) -> tuple[str, ...]:
    reasons = []
    if known.is_("tree-walk", "no"):
        reasons.append("a tree given to this vLLM as it stands would be accepted as a chain at best")
    if known.is_("tree-walk", "partial"):
        reasons.append("a tree walk is in the code but not in use: see tree-walk for what would switch it on")
    if known.is_("dflash-support", "yes") and path in ("standalone", "chain"):
        reasons.append("plain DFlash (a chain) works in this vLLM today and is what the tree has to beat")
    if known.is_("dflash-support", "no") and path != "none":
        reasons.append("this vLLM has no DFlash method: the drafter runs only in the standalone engine")
    return tuple(reasons)


def _against(known: Known, path: Path) -> tuple[str, ...]:
    against = [_PRIOR] if known.ratio("tree_over_chain") is None and path in ("native", "standalone") else []
    if known.is_("hybrid-tree-state", "no") and path == "native":
        against.append(
            "with a hybrid (GDN, Mamba) target this vLLM cannot read state at a node's parent: only an adapter that "
            "brings its own state works"
        )
    if path == "standalone":
        against.append("the standalone engine serves one process of its own: no continuous batching across users")
    if known.measured is not None and not known.measured.usable:
        why = "without CUDA graphs" if not known.measured.graphs else "on random tokens"
        against.append(f"the measurement at hand was made {why}, so it decides nothing")
    against += [text for id, outcomes, text in CAUTIONS if known.is_(id, *outcomes)]
    against += [f"lint: {text}" for text in known.errors]
    return tuple(against)


def _needs(known: Known, path: Path) -> tuple[str, ...]:
    unknown = [
        f"{id}: it could not be told (see its verdict)"
        for id, outcome in known.outcomes.items()
        if outcome == "unknown"
    ]
    if path == "none" and known.measured is None:
        return tuple(unknown) or ("the verdicts that this scan did not get to",)
    if known.ratio("tree_over_chain") is not None and known.ratio("chain_over_plain") is not None:
        return tuple(unknown)
    return (*_TO_MEASURE, *unknown)


#: What to type next, on the host, in an environment that has ``ddaudit[engine]``; its JSON goes back into the report.
_BENCH = (
    "python -m ddtree.standalone bench --target TARGET_DIR --drafter DRAFTER_DIR --prompts human-eval --json bench.json"
)
_SERVE = (
    "python -m ddtree.native overlay DDTREE_DIR && PYTHONPATH=DDTREE_DIR vllm serve TARGET_DIR --speculative-config "
    """'{"method": "ddtree", "model": "DRAFTER_DIR", "num_speculative_tokens": 64}'"""
)


def _next(known: Known, path: Path) -> str:
    """The command that comes next. With no measurement that is the bench, whatever the path."""
    if path == "none":
        installed = known.spec.split(":", 1)[0] not in ("pypi", "wheel", "dir") and known.spec != "HOST"
        return f"ddaudit scan {known.spec if installed else 'user@host'}"
    if path == "retrain":
        return "python -m ddtree.training plan --target TARGET_DIR"
    if path == "native" and known.ratio("tree_over_chain") is not None:
        return _SERVE
    return _BENCH


def _words(known: Known) -> dict[str, str]:
    measured = known.measured
    ratios = {
        name: f"{value:.2f}x" if value is not None else "?"
        for name in ("tree_over_chain", "chain_over_plain", "mtp_over_chain", "break_even")
        for value in [known.ratio(name)]
    }
    stages = ", ".join(f"{id.removeprefix('tree-')} {known.outcomes.get(id, 'not judged')}" for id in _STAGES)
    return {
        **ratios,
        "batch": str(measured.batch) if measured else "?",
        "misfit": "; ".join(known.drafter_misfit),
        "stages": "this vLLM does not verify trees"
        if known.is_("tree-walk", "no")
        else f"tree verification is not complete in this vLLM ({stages})",
        "native_adapter": known.outcomes.get("native-adapter", "not judged"),
        "version": known.version or "unknown version",
    }


def below(ratio: float | None, limit: float = 1.0) -> bool:
    """Whether a measured ratio is at most ``limit``. False when it was not measured."""
    return ratio is not None and ratio <= limit


def above(ratio: float | None, limit: float = 1.0) -> bool:
    """Whether a measured ratio is above ``limit``. False when it was not measured."""
    return ratio is not None and ratio > limit
