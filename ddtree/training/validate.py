"""Pre-flight: what would silently cost acceptance is refused by name before GPU time is spent.

Output stays correct whatever is wrong with a drafter; only tau drops. So every assumption that training makes about the
target, its template, the mask token and the data is checked here against the target itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ddtree.training.curate import eval_grams, overlaps
from ddtree.training.errors import DataError, PreflightError, PromptError
from ddtree.training.files import require_space
from ddtree.training.prompts import Prompt
from ddtree.training.target import Target
from ddtree.training.template import Tokenizer, render, template_hash, tokenizer_hash
from ddtree.training.textsig import normalise_words
from ddtree.training.tokens import TokenSet

_LIVE_WORDS = ("think", "tool", "im_start", "im_end", "eot", "assistant", "user", "system")


def check_prompts(prompts: Sequence[Prompt], evals: Sequence[Path] = ()) -> None:
    """Refuse empty, duplicated, or evaluation prompts.

    Raises:
        PromptError: ``no-prompts``, ``empty-prompt``, ``duplicate-prompts``, ``eval-overlap``.
    """
    if not prompts:
        raise PromptError("no-prompts", "there are no prompts")
    words = [normalise_words(p.text) for p in prompts]
    empty = [p.id for p, w in zip(prompts, words, strict=True) if not w]
    if empty:
        raise PromptError("empty-prompt", f"{len(empty)} of {len(prompts)} prompts hold no word, first {empty[0]!r}",
                          "run curate")  # fmt: skip
    seen: dict[str, str] = {}
    doubles = [(p.id, seen[p.sha]) for p in prompts if seen.setdefault(p.sha, p.id) != p.id]
    if doubles or len({p.id for p in prompts}) < len(prompts):
        named = f"first {doubles[0][0]!r} repeats {doubles[0][1]!r}" if doubles else "two rows share an id"
        raise PromptError("duplicate-prompts", f"{len(doubles)} of {len(prompts)} prompts are duplicates, {named}",
                          "run curate")  # fmt: skip
    if evals:
        hit = np.flatnonzero(overlaps(words, eval_grams(evals)))
        if len(hit):
            raise PromptError("eval-overlap", f"{len(hit)} prompts share 13 words with an evaluation set, first "
                              f"{prompts[hit[0]].id!r}", "run curate --decontaminate")  # fmt: skip


def data_identity(
    target: Mapping[str, Any], tokenizer: Tokenizer, template_kwargs: Mapping[str, Any], vocab: int
) -> dict[str, Any]:
    """What token shards record of the target that wrote them."""
    return {
        "target": dict(target), "tokenizer": tokenizer_hash(tokenizer), "vocab": vocab,
        "template": template_hash(tokenizer, template_kwargs), "template_kwargs": dict(template_kwargs),
    }  # fmt: skip


def check_identity(
    tokens: TokenSet, target: Mapping[str, Any], tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None
) -> None:
    """The shards were written by this target, tokenizer and template; thinking is the same in data and in serving.

    Args:
        template_kwargs: as serving will pass them; None takes the data's word.
    Raises:
        PreflightError: ``tokenizer-mismatch``, ``target-mismatch``, ``thinking-mismatch``, ``template-mismatch``.
    """
    known = tokens.identity
    if known["tokenizer"] != tokenizer_hash(tokenizer):
        raise PreflightError("tokenizer-mismatch", f"{tokens.folders[0]} was tokenised with another vocabulary",
                             "generate with this target's tokenizer")  # fmt: skip
    if known["target"].get("weights") != target.get("weights"):
        names = f"{known['target'].get('name')}, not of {target.get('name')}"
        raise PreflightError("target-mismatch", f"{tokens.folders[0]} holds responses of {names}: weights differ")
    kwargs = dict(known["template_kwargs"] if template_kwargs is None else template_kwargs)
    changed = {k: (known["template_kwargs"].get(k), kwargs.get(k)) for k in {*known["template_kwargs"], *kwargs}
               if known["template_kwargs"].get(k) != kwargs.get(k)}  # fmt: skip
    if any("think" in k for k in changed):
        raise PreflightError("thinking-mismatch", f"data and serving disagree: {changed}",
                             "a drafter of one mode is poor in the other: generate in the served mode")  # fmt: skip
    if known["template"] != template_hash(tokenizer, kwargs):
        raise PreflightError("template-mismatch", f"chat template or its arguments changed since generation: {changed}")


def check_rows(tokens: TokenSet, prompts: Mapping[str, Prompt], tokenizer: Tokenizer, sample: int = 64) -> None:
    """Recorded prompts still render to the recorded ids, so the first supervised token is the first generated one.

    Raises:
        PreflightError: ``template-round-trip``.
    """
    rows = np.linspace(0, len(tokens) - 1, min(sample, len(tokens))).astype(int)
    for number in rows.tolist():
        row = tokens.row(number)
        prompt = prompts.get(str(row.meta.get("prompt")))
        if prompt is None:
            continue
        again = render(tokenizer, prompt.messages, row.meta.get("template_kwargs"), prompt.tools)
        if again != row.ids[: row.prompt].tolist():
            raise PreflightError("template-round-trip", f"row {number} ({prompt.id!r}) renders to other tokens now")


def check_data(tokens: TokenSet, vocab: int, width: int) -> None:
    """Ids are in range, and enough of what is prefilled is learnt from.

    Raises:
        PreflightError: ``token-id-range``, ``supervised-fraction``.
    """
    top = int(tokens.flat.max())
    if top >= vocab or int(tokens.flat.min()) < 0:
        raise PreflightError("token-id-range", f"token id {top} on an embedding of {vocab} rows")
    total = np.minimum(tokens.index["total"], width)
    share = float(np.maximum(total - tokens.index["prompt"], 0).sum() / total.sum())
    if share < 0.05:
        raise PreflightError(
            "supervised-fraction", f"{share:.1%} of the tokens are responses", "prompts crowd them out"
        )


def live_ids(tokenizer: Any, eos: Sequence[int] = ()) -> dict[int, str]:
    """Ids that occur in served text by design: special roles and template words."""
    live = dict.fromkeys(eos, "end of text")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            live[value] = name
    added = getattr(tokenizer, "added_tokens_decoder", {})
    live |= {int(i): str(t) for i, t in added.items() if any(w in str(t) for w in _LIVE_WORDS)}
    return live


def check_mask_id(
    mask: int, embedding: torch.Tensor, tokens: TokenSet, tokenizer: Any, eos: Sequence[int] = ()
) -> None:
    """The mask token is a row of the embedding that no text uses.

    Raises:
        PreflightError: ``mask-id-range``, ``mask-id-live``, ``mask-id-in-data``, ``mask-row-dead``.
    """
    if not 0 <= mask < len(embedding):
        raise PreflightError("mask-id-range", f"mask token {mask} on an embedding of {len(embedding)} rows")
    live = live_ids(tokenizer, eos)
    if mask in live:
        raise PreflightError("mask-id-live", f"mask token {mask} is {live[mask]}: it occurs in served text",
                             f"an unused one here is {suggest_mask(embedding, tokens, tokenizer, eos)}")  # fmt: skip
    count = int((tokens.flat == mask).sum())
    if count:
        raise PreflightError("mask-id-in-data", f"mask token {mask} occurs {count} times in the data",
                             f"an unused one here is {suggest_mask(embedding, tokens, tokenizer, eos)}")  # fmt: skip
    norm = float(embedding[mask].float().norm())
    if not 0 < norm < float("inf"):
        raise PreflightError("mask-row-dead", f"the embedding of mask token {mask} has norm {norm}")


def suggest_mask(embedding: torch.Tensor, tokens: TokenSet, tokenizer: Any, eos: Sequence[int] = ()) -> int:
    """An id that text does not use: an added token that is not live, else a row past the tokenizer, else a word
    that the data does not use; -1 when there is none."""
    used = set(np.unique(tokens.flat).tolist()) | set(live_ids(tokenizer, eos))
    norms = embedding.float().norm(dim=-1)
    known = len(tokenizer.get_vocab())
    order = [*sorted(getattr(tokenizer, "added_tokens_decoder", {})), *range(known, len(embedding)),
             *range(known - 1, -1, -1)]  # fmt: skip
    return next((int(i) for i in order if i not in used and i < len(embedding) and norms[i] > 0), -1)


def check_capture(
    target: Target, tokens: TokenSet, rows: Sequence[int] = (0, 1, 2, 3), tolerance: float = 2e-2
) -> None:
    """Captured states are HF's ``hidden_states[i + 1]`` and differ from the neighbouring layers' by more than rounding.

    Raises:
        PreflightError: ``hidden-states-off-by-one``, ``hidden-states-mismatch``, ``hidden-states-not-finite``.
    """
    H = int(target.config.hidden_size)
    for row in [r for r in rows if r < len(tokens)]:
        ids = torch.from_numpy(tokens.ids(row)[:512].astype(np.int64))[None].to(target.device)
        got = target.capture(ids)[0].float()
        with torch.no_grad():
            states = target.base(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        if not bool(torch.isfinite(got).all()):
            raise PreflightError("hidden-states-not-finite", f"row {row}: captured states hold inf or nan")
        for slot, layer in enumerate(target.layer_ids):
            mine = got[:, slot * H : (slot + 1) * H]
            errors = {
                k: _relative(mine, states[k][0].float()) for k in (layer, layer + 1, layer + 2) if k < len(states)
            }
            if layer + 1 == len(states) - 1:
                errors.pop(layer + 1)  # HF normalises the last layer's entry: only neighbours can be told apart
                errors[layer + 1] = tolerance / 2
            if errors[layer + 1] > tolerance:
                closest = min(errors, key=lambda k: errors[k])
                code = "hidden-states-off-by-one" if errors[closest] <= tolerance else "hidden-states-mismatch"
                raise PreflightError(
                    code, f"layer id {layer} should be hidden_states[{layer + 1}] (relative error "
                    f"{errors[layer + 1]:.2g}), closest is hidden_states[{closest}] ({errors[closest]:.2g})",
                    "z-lab's id i is the output of layer i; vLLM's and speculators' ids are one higher",
                )  # fmt: skip


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def check_head(target: Target, tokens: TokenSet, rows: Sequence[int], needed: float = 0.99) -> float:
    """argmax(head(norm(last layer))) reproduces greedy records: catches a random or wrongly tied head, a missing norm,
    caps and scales. Returns the share that agrees.

    Args:
        rows: greedy rows.
    Raises:
        PreflightError: ``lm-head-mismatch``.
    """
    hit = total = 0
    for row in rows:
        ids, prompt = tokens.ids(row), int(tokens.index["prompt"][row])
        hidden = target.hidden(torch.from_numpy(ids.astype(np.int64))[None].to(target.device))[0, prompt - 1 : -1]
        best = F.linear(hidden.float(), target.head.float()).argmax(-1).cpu().numpy()
        hit += int((best == ids[prompt:]).sum())
        total += len(best)
    share = hit / max(total, 1)
    if share < needed:
        raise PreflightError(
            "lm-head-mismatch", f"the target's head reproduces {share:.1%} of its greedy tokens, not {needed:.0%}",
            "a head that was tied or initialised wrongly, or other weights than those that generated",
        )  # fmt: skip
    return share


def greedy_rows(tokens: TokenSet, count: int = 8) -> list[int]:
    """The first rows of folders that were sampled at temperature 0."""
    out: list[int] = []
    at = 0
    for manifest in tokens.manifests:
        if (manifest["identity"].get("sampler") or {}).get("temperature") == 0.0:
            out += list(range(at, min(at + count - len(out), at + manifest["rows"])))
        at += manifest["rows"]
    return out


def check_run_space(folder: Path, parameters: int, keep: int, cache: int = 0) -> None:
    """Room for checkpoints (float32 weights and two moments) and a disk cache.

    Raises:
        DiskError: ``disk-would-fill``.
    """
    each = parameters * 12
    require_space(folder, each * (keep + 1) + parameters * 2 + cache,
                  f"{keep + 1} checkpoints of {parameters / 1e6:,.1f} M parameters x 12 B, the best x 2 B"
                  + (f", {cache / 1e9:.1f} GB of states" if cache else ""))  # fmt: skip


def check_overlap(train: TokenSet, held_out: TokenSet) -> None:
    """No held-out prompt was trained on.

    Raises:
        DataError: ``held-out-overlap``.
    """
    both = {m.get("sha") for m in train.meta} & {m.get("sha") for m in held_out.meta}
    if both - {None}:
        raise DataError("held-out-overlap", f"{len(both)} held-out prompts are in the training data")
