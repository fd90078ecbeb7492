"""What the verdict ids ask and what a ``yes`` means, in one line each; the glossary. The words of a report live here,
its layout elsewhere."""

from __future__ import annotations

from reports.model import LIST_IDS, Verdict

#: The four stages of tree verification, judged apart: id, the stage's name, its question.
STAGES = (
    ("tree-build", "build", "Does a drafter propose a tree (several candidates for one position)?"),
    ("tree-mask", "mask", "Does attention let a node see its ancestors only?"),
    ("tree-walk", "walk", "Does acceptance follow a tree, in a function that the runner reaches?"),
    ("tree-commit", "commit", "Are KV, recurrent state and hidden states of the accepted path kept by index?"),
)
STAGE_IDS = frozenset(id for id, _, _ in STAGES)

#: id -> what ``yes`` means (for a list: what is listed).
MEANING = {
    "record-integrity": "every file is what the release published, and there is no other",
    "plugins": "code of other packages that vLLM loads by itself",
    "opaque-code": "code on the path of acceptance that no static rule can read (`absent`: the library that should "
    "hold the op is not in what was scanned)",
    "runner-in-force": "the model runner that serves a dense and a hybrid target",
    "spec-methods": "the speculative methods that the configuration accepts",
    "verifiers": "every function that decides which draft tokens are accepted",
    "tree-build": "a drafter proposes a tree",
    "tree-mask": "the target's attention sees a node's ancestors only",
    "tree-walk": "acceptance follows a tree, reachable from the runner's sampler",
    "tree-commit": "the accepted path is kept by index, not by count",
    "hybrid-tree-state": "GDN or Mamba state can be read at a node's parent",
    "dflash-support": "method `dflash` is implemented",
    "aux-layer-offset": "`target_layer_ids` get their +1 before hidden states are captured; without it acceptance is "
    "lower, silently",
    "drafter-sliding-window": "the DFlash drafter honours `layer_types` and its window; without it acceptance falls "
    "in long contexts",
    "own-lm-head": "a drafter keeps its own `lm_head` when vocabularies differ; without it nothing is accepted",
    "eagle-block-drop": "the last prefix-cache block is dropped only for methods that need it; else hybrids get no "
    "cache hits",
    "gdn-gate-gather": "GDN gates are gathered for speculative tokens; without it hybrids produce wrong text",
    "uniform-decode-guard": "a decode graph is chosen by a prefill flag too; without it a prompt of 1+K tokens gives "
    "garbage",
    "mamba-drop-flag": "the Mamba cache manager uses its drop flag; without it a wrong state can be restored",
    "lossless-only": "no acceptance method that changes the output distribution can be selected",
    "native-adapter": "an adapter of ours fits this install",
}

GLOSSARY = (
    ("draft, target", "the small model that proposes tokens, the large one that decides"),
    ("verify", "one target forward over all drafted tokens, then a decision how many of them stand"),
    ("chain", "one candidate per position; acceptance stops at the first mismatch"),
    ("tree", "several candidates per position; a *tree walk* follows the branch that the target agrees with"),
    (
        "ancestor mask",
        "attention mask that lets a tree node see the nodes above it and no siblings; it does not accept anything",
    ),
    ("commit", "keeping KV cache and state of what was accepted: by *count* (chain) or by *index* (tree)"),
    ("tau", "mean tokens committed per round, bonus token included"),
    ("break-even", "a tree pays only if tau_tree / tau_chain > t_tree / t_chain (time per round, CUDA graphs on)"),
    (
        "slice",
        "the functions reachable from the sampler that the runner constructs; what is outside cannot accept a token",
    ),
    (
        "GDN, hybrid",
        "targets with recurrent layers (Gated DeltaNet, Mamba), whose state cannot be masked: it must be read at a "
        "parent",
    ),
)

#: How an outcome reads in a table.
MARK = {"yes": "✅ yes", "no": "❌ no", "partial": "🟡 partial", "unknown": "❔ unknown", "n/a": "➖ n/a"}


def meaning(verdict: Verdict) -> str:
    """What this verdict asks, in one line of prose; empty for a rule of the user's own that has none."""
    return MEANING.get(verdict.id, "")


def mark(verdict: Verdict) -> str:
    """The outcome with its sign. A list is neither good nor bad: its count is the answer."""
    if verdict.id in LIST_IDS and verdict.outcome == "yes":
        return f"{len(verdict.items)} listed"
    return MARK[verdict.outcome]
