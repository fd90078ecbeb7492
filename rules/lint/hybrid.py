"""Hybrid targets (Gated DeltaNet, Mamba): where speculation goes wrong without an error."""

from __future__ import annotations

from collections.abc import Iterator

from rules.lint.drafter import ISSUE
from rules.lint.model import Case, Finding


def _prefix_caching(case: Case) -> bool:
    """On by default in every release in question."""
    return case.serve is None or case.serve.flags.get("enable-prefix-caching") is not False


def _hybrid_with_drafter(case: Case) -> bool:
    return case.target is not None and case.target.hybrid and bool(case.method)


def prefix_cache(case: Case) -> Iterator[Finding]:
    if case.target is None or not _hybrid_with_drafter(case) or not _prefix_caching(case):
        return
    where = (f"{case.target.name}: hybrid layers", "prefix caching is on (the default)")
    disabled = bool(case.serve and case.serve.speculative.get("disable_eagle_block_drop"))
    if case.install.outcome("eagle-block-drop") == "no" and not disabled:
        yield Finding(
            "prefix-cache-inert",
            "warning",
            "the scheduler drops the last cached block for every drafter: on a hybrid target the prefix cache may"
            " never hit, without a warning",
            (*where, "verdict eagle-block-drop: no"),
            "Send one 20k-token prompt twice and compare time to first token. 0.33.0 limits the drop; 0.30.0 to"
            ' 0.32.0 have "disable_eagle_block_drop": true.',
            ISSUE + "54360",
        )
    if case.install.outcome("mamba-drop-flag") == "no":
        yield Finding(
            "prefix-cache-state",
            "warning",
            "the Mamba cache manager ignores its drop flag: a restored recurrent state may not be the one the drafter"
            " left",
            (*where, "verdict mamba-drop-flag: no"),
            "Compare greedy output cold and warm; until they agree, --no-enable-prefix-caching.",
            ISSUE + "48375",
        )


def gates(case: Case) -> Iterator[Finding]:
    if case.target is not None and _hybrid_with_drafter(case) and case.install.outcome("gdn-gate-gather") == "no":
        yield Finding(
            "gdn-gates-not-gathered",
            "error",
            "GDN gates are not gathered for speculative tokens in this install: greedy output differs with"
            " speculation on",
            (f"{case.target.name}: hybrid layers", "verdict gdn-gate-gather: no"),
            "Use 0.28.0 or newer; test with 8 greedy prompts, speculation on and off.",
            ISSUE + "51812",
        )


def uniform_decode(case: Case) -> Iterator[Finding]:
    k = case.draft_tokens
    if (
        case.target is not None
        and _hybrid_with_drafter(case)
        and case.install.outcome("uniform-decode-guard") == "no"
    ):
        length = f"exactly {k + 1}" if k is not None else "exactly 1 + K"
        yield Finding(
            "prompt-of-one-plus-k",
            "warning",
            f"a prompt of {length} tokens can be taken for a decode step, and answered with garbage",
            (f"{case.target.name}: hybrid layers", "verdict uniform-decode-guard: no"),
            "Send a prompt of that length with K and with K-1 and compare.",
            ISSUE + "53051",
        )


def ngram(case: Case) -> Iterator[Finding]:
    if case.target is not None and case.target.hybrid and case.method in ("ngram", "ngram_gpu", "suffix"):
        yield Finding(
            "ngram-on-hybrid",
            "warning",
            f"{case.method} with a hybrid target: stale recurrent state corrupted outputs in reported releases",
            (f"{case.target.name}: hybrid layers",),
            "Compare greedy output with speculation on and off.",
            ISSUE + "39273",
        )


def many_drafts(case: Case) -> Iterator[Finding]:
    """One recurrent state is kept per draft token, layer and sequence."""
    k = case.draft_tokens
    if case.target is None or k is None or not _hybrid_with_drafter(case):
        return
    state = state_bytes(case)
    if k > 4 and case.install.outcome("gdn-gate-gather") == "no":
        yield Finding(
            "many-drafts-on-old-gdn",
            "warning",
            f"{k} draft tokens on a GDN target: crashes above 4 were reported in old releases",
            (f"--speculative-config: num_speculative_tokens={k}",),
            "Try it at the concurrency you serve, or use K <= 4.",
            ISSUE + "37035",
        )
    if state and k >= 32:
        total = state * (k + 1)
        yield Finding(
            "states-per-draft-token",
            "warning",
            f"vLLM keeps a recurrent state per draft token: {total / 2**30:.1f} GiB a sequence at K={k}",
            (f"{state / 2**20:.0f} MiB of state a token over all recurrent layers",),
            "Lower K, or use a path that keeps only the root state.",
            ISSUE + "54080",
        )


def state_bytes(case: Case) -> int:
    """Bytes of recurrent state of one sequence (float32 delta-rule states; 0 when the config does not say)."""
    target = case.target
    if target is None:
        return 0
    heads, key, value = (
        target.number(name) for name in ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    )
    layers = sum("linear" in kind for kind in target.layer_types)
    if (
        not layers
        and (interval := target.number("full_attention_interval"))
        and (total := target.number("num_hidden_layers"))
    ):
        layers = total - total // interval
    return heads * key * value * 4 * layers if heads and key and value else 0


CHECKS = (prefix_cache, gates, uniform_decode, ngram, many_drafts)
