"""Replay evaluation: tau of a drafter on recorded responses, with the target out of the loop.

Speculative decoding is lossless, so the rounds over a recorded response are fixed by the record: draft at an
anchor, count the drafts that match, jump past them and the bonus. All anchors of a response are drafted in one
packed pass; the walk then needs only the accepted count at each position. For a tree, #{d : S_d >= theta} is the
depth that a best-first tree of that budget accepts (losses.tree_threshold; the identity is tested against
ddtree.tree). On greedy records this is the served tau; on sampled ones that of the sample-match rule. tau = tokens
committed per round, bonus included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ddtree.drafter import Drafter
from ddtree.measure import Acceptance
from ddtree.training.features import FeatureSource
from ddtree.training.losses import tree_threshold
from ddtree.training.packing import Shape, assemble
from ddtree.training.tokens import LOOPING, TokenSet

CHAIN = "chain"


@dataclass(frozen=True)
class Rounds:
    """Of one rule on a set of responses: tokens and rounds of each, and how many rounds accepted 0, 1, .. drafts."""

    tokens: NDArray[np.int64]
    rounds: NDArray[np.int64]
    accepted: NDArray[np.int64]  # histogram, [K+1]

    @property
    def acceptance(self) -> Acceptance:
        """The same, summed over responses, in the terms of ddtree.measure."""
        return Acceptance(tuple(self.accepted.tolist()), int(self.tokens.sum()))

    def tau(self, keep: NDArray[np.bool_] | None = None) -> float:
        """Micro: tokens over rounds; nan without rounds."""
        t, r = (self.tokens, self.rounds) if keep is None else (self.tokens[keep], self.rounds[keep])
        return float(t.sum() / r.sum()) if r.sum() else float("nan")

    def macro(self) -> float:
        """Mean over responses of tokens per round."""
        ok = self.rounds > 0
        return float((self.tokens[ok] / self.rounds[ok]).mean()) if ok.any() else float("nan")

    def interval(
        self, keep: NDArray[np.bool_] | None = None, samples: int = 1000, seed: int = 0
    ) -> tuple[float, float]:
        """95% bootstrap interval of the micro tau over responses."""
        t, r = (self.tokens, self.rounds) if keep is None else (self.tokens[keep], self.rounds[keep])
        if not r.sum():
            return float("nan"), float("nan")
        pick = np.random.default_rng(seed).integers(0, len(t), (samples, len(t)))
        low, high = np.percentile(t[pick].sum(1) / np.maximum(r[pick].sum(1), 1), [2.5, 97.5])
        return float(low), float(high)


def walk_rounds(accepted: Sequence[NDArray[np.int64]], drafts: int) -> Rounds:
    """Rounds of each response from its accepted counts.

    Args:
        accepted: per response, at each response position but the last: drafts accepted by a round anchored there (never
            past the record's end). The first token comes from the prefill, so len(accepted) tokens are drafted for.
    """
    histogram = np.zeros(drafts + 1, np.int64)
    tokens, rounds = [], []
    for counts in accepted:
        at, n, total = 0, 0, len(counts)
        steps = counts.tolist()
        while at < total:
            got = steps[at]
            histogram[got] += 1
            at, n = at + got + 1, n + 1
        tokens.append(total)
        rounds.append(n)
    return Rounds(np.array(tokens), np.array(rounds), histogram)


@torch.no_grad()
def accepted_counts(
    hidden: Tensor, head: Tensor, targets: Tensor, valid: Tensor, budgets: Sequence[int], chunk: int = 128
) -> Tensor:
    """Drafts accepted by the chain and by trees: hidden [M, D, H], targets, valid [M, D] -> int64 [1 + budgets, M].

    Logits are float32: bfloat16 logits tie, and ties are not drafts.
    """
    out = []
    for i in range(0, len(hidden), chunk):
        y, ok = targets[i : i + chunk], valid[i : i + chunk]
        logp = F.linear(hidden[i : i + chunk].float(), head.float()).log_softmax(-1)
        of_y = logp.gather(-1, y[..., None])[..., 0]
        hits = [(logp.argmax(-1) == y) & ok]
        if budgets:
            top = logp.topk(min(max(budgets), logp.shape[-1]), -1).values
            score = of_y.cumsum(-1)
            hits += [(score >= tree_threshold(top, b)[:, None] - 1e-5) & ok for b in budgets]
        out.append(torch.stack([h.long().cumprod(-1).sum(-1) for h in hits]))
    return torch.cat(out, 1)


@dataclass(frozen=True)
class Replay:
    """Results of a replay: rounds by rule (``chain``, ``tree-B``) over the rows of ``rows``."""

    rows: NDArray[np.int64]
    rules: dict[str, Rounds]
    looping: NDArray[np.bool_]
    categories: list[str]

    def table(self, samples: int = 1000) -> dict[str, dict[str, object]]:
        """JSON-ready: tau micro with interval, macro, without looping responses, by position and by category."""
        out: dict[str, dict[str, object]] = {}
        names = np.array(self.categories)
        for rule, r in self.rules.items():
            row: dict[str, object] = {
                "tau": r.tau(), "interval": r.interval(samples=samples), "macro": r.macro(),
                "tau_not_looping": r.tau(~self.looping), "interval_not_looping": r.interval(~self.looping, samples),
                "rounds": int(r.rounds.sum()), "tokens": int(r.tokens.sum()),
                "conditional": [round(x, 4) for x in r.acceptance.conditional],
            }  # fmt: skip
            row["by_category"] = {str(c): r.tau(names == c) for c in np.unique(names)}
            out[rule] = row
        return out


def _pieces(tokens: TokenSet, row: int, blocks: int) -> list[NDArray[np.int64]]:
    anchors = np.arange(int(tokens.index["prompt"][row]), int(tokens.index["total"][row]) - 1)
    return [anchors[i : i + blocks] for i in range(0, len(anchors), blocks)]


@torch.no_grad()
def replay(
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    tokens: TokenSet,
    source: FeatureSource,
    rows: Sequence[int] | None = None,
    budgets: Sequence[int] = (16, 64),
    dtype: torch.dtype | None = None,
    blocks: int = 1024,
    progress: bool = False,
) -> Replay:
    """Replay recorded responses.

    Args:
        rows: row numbers (default all). budgets: tree budgets; none evaluates the chain alone.
        dtype: of the drafter's activations; default that of the features.
        blocks: most blocks drafted at once.
    """
    chosen = [r for r in (range(len(tokens)) if rows is None else rows)
              if tokens.index["total"][r] - tokens.index["prompt"][r] >= 2]  # fmt: skip
    drafts = drafter.config.drafts
    rules = [CHAIN, *(f"tree-{b}" for b in budgets)]
    # Pieces of at most ``blocks`` anchors; pieces of similar size share a pass.
    pieces = [(row, piece) for row in chosen for piece in _pieces(tokens, row, blocks)]
    order = sorted(range(len(pieces)), key=lambda i: (len(pieces[i][1]), len(tokens.ids(pieces[i][0]))), reverse=True)
    sorted_index = list(order)
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(pieces)
    bar = tqdm(total=len(pieces), desc="replay", unit="row", disable=not progress, leave=False)
    while order:
        width = -(-len(pieces[order[0]][1]) // 32) * 32
        count = max(1, min(len(order), blocks // width))
        part, order = [pieces[i] for i in order[:count]], order[count:]
        group = [r for r, _ in part]
        ids = [tokens.ids(r) for r in group]
        shape = Shape(-(-max(map(len, ids)) // 64) * 64, count, width, blocks, 1.0)
        features = source.features(group, [len(x) for x in ids])
        batch = assemble([np.array([r]) for r in group], [[a] for _, a in part], [[x] for x in ids], shape, drafts + 1,
                         features.device)  # fmt: skip
        packed = features[batch.source]
        hidden = drafter(packed if dtype is None else packed.to(dtype), batch.anchor_tokens, batch.anchors, embedding)
        got = accepted_counts(hidden[:, :, 1:].flatten(0, 1), head, batch.targets.flatten(0, 1),
                              batch.valid.flatten(0, 1), budgets)  # fmt: skip
        done = len(pieces) - len(order) - count
        for i, values in enumerate(got.view(len(rules), count, width).cpu().numpy().transpose(1, 0, 2)):
            found[sorted_index[done + i]] = values[:, : len(part[i][1])]
        bar.update(count)
    bar.close()
    by_row: dict[int, list[NDArray[np.int64]]] = {}
    for (row, _), values in zip(pieces, found, strict=True):
        by_row.setdefault(row, []).append(values)
    whole = [np.concatenate(by_row[row], 1) for row in chosen]
    counts = [[w[i] for w in whole] for i in range(len(rules))]
    flags = tokens.index["flags"][chosen]
    meta = tokens.meta
    return Replay(
        np.array(chosen, np.int64),
        {name: walk_rounds(c, drafts) for name, c in zip(rules, counts, strict=True)},
        (flags & LOOPING) > 0,
        [str(meta[r].get("category", "other")) for r in chosen],
    )


def prompt_lookup(ids: NDArray[np.int32], prompt: int, drafts: int, most: int = 3, least: int = 2) -> NDArray[np.int64]:
    """Accepted counts of prompt lookup, the free baseline: draft what followed the latest earlier copy of the last
    ``most`` (else fewer, down to ``least``) tokens; the copy may run on into itself."""
    s = ids.tolist()
    n = len(s)
    # nearest[k][p]: latest end q < p with the same k tokens ending at q and at p
    nearest: dict[int, list[int]] = {}
    for k in range(least, most + 1):
        seen: dict[tuple[int, ...], int] = {}
        at = [-1] * n
        for p in range(k - 1, n):
            key = tuple(s[p - k + 1 : p + 1])
            at[p] = seen.get(key, -1)
            seen[key] = p
        nearest[k] = at
    out = []
    for p in range(prompt, n - 1):
        hit = next((nearest[k][p] for k in range(most, least - 1, -1) if nearest[k][p] >= 0), -1)
        got = 0
        # s[hit + 1 + got] beyond p is the copy's own continuation, equal to the record as long as it matched
        while hit >= 0 and got < min(drafts, n - 1 - p) and s[hit + 1 + got] == s[p + 1 + got]:
            got += 1
        out.append(got)
    return np.array(out, np.int64)


def lookup_rounds(tokens: TokenSet, rows: Sequence[int], drafts: int) -> Rounds:
    """Rounds of prompt lookup over the same responses: printed beside every tau."""
    return walk_rounds([prompt_lookup(tokens.ids(r), int(tokens.index["prompt"][r]), drafts) for r in rows], drafts)
