"""Live tau: decode with the standalone engine, and compare with the replay of the very responses it wrote.

Greedy decoding is lossless, so live and replayed rounds should agree but for rounding: a larger gap means that training
and serving see different hidden states, positions or masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.checkpoint import load_drafter, read_config
from ddtree.drafter import Drafter
from ddtree.measure import CHAIN, Acceptance, Document, replay
from ddtree.standalone.engine import Engine, Request
from ddtree.standalone.weights import from_transformers
from ddtree.training.pipeline import load_tokenizer, stop_ids, target_shape
from ddtree.training.target import Target, load_target
from ddtree.training.tokens import TokenSet


def live_and_replay(
    engine: Engine,
    drafter: Drafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    budget: int,
    max_new: int,
    stop: Sequence[int],
) -> tuple[Acceptance, Acceptance]:
    """Acceptance of greedy decoding of the prompts, and of the replay of its responses. Budget 0 is the chain.

    Both count the tokens after the first, which the prefill gives. ``drafter`` equals the engine's own.
    """
    drafts = drafter.config.drafts
    live = Acceptance((0,) * (drafts + 1), 0)
    documents = []
    for prompt in prompts:
        request = Request(tuple(int(t) for t in prompt), max_new, frozenset(stop))
        mode = "chain" if budget == CHAIN else "tree"
        [response] = engine.generate([request], mode=mode, budget=max(budget, 1))
        live = live + response.acceptance(drafts)
        ids = torch.tensor([*request.prompt, *response.tokens])
        features = target.capture(ids[None].to(target.device))[0]
        documents.append(Document(ids, len(request.prompt), features))
    return live, replay(drafter, target.embedding, target.head, documents, [budget])[budget]


def run_live(
    drafter_folder: Path, target_folder: Path, tokens: Sequence[Path], budgets: Sequence[int], count: int, dtype: str
) -> dict[str, Any]:
    """Live against replay for ``count`` recorded prompts, by rule."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, dtype)
    target = load_target(target_folder, read_config(drafter_folder).target_layer_ids, kind, device)
    drafter = load_drafter(drafter_folder, target_shape(target), device, kind)
    # the engine may take the modules that it is given apart, so it gets its own
    served = load_drafter(drafter_folder, target_shape(target), device, kind)
    engine = Engine(from_transformers(load_target(target_folder, target.layer_ids, kind, device).model), served)
    data = TokenSet(*tokens)
    rows = np.linspace(0, len(data) - 1, min(count, len(data))).astype(int).tolist()
    prompts = [data.ids(r)[: int(data.index["prompt"][r])].tolist() for r in rows]
    longest = int((data.index["total"] - data.index["prompt"])[rows].max())
    stop = stop_ids(target_folder, load_tokenizer(target_folder))
    out: dict[str, Any] = {}
    for budget in (CHAIN, *budgets):
        live, again = live_and_replay(engine, drafter, target, prompts, budget, longest, stop)
        out["chain" if budget == CHAIN else f"tree-{budget}"] = {
            "live": live.tau, "replay": again.tau, "difference": again.tau / live.tau - 1, "rounds": live.rounds,
        }  # fmt: skip
    return out
