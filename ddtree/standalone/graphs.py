"""CUDA graphs of whole rounds: one replay per round, captured per budget and sampling before prompts are run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.standalone.model import Target
from ddtree.standalone.rounds import Parts, Sampling, State, run_round


def why_no_graphs(target: Target) -> str:
    """The reason why this target's rounds cannot be captured; empty if they can."""
    if target.home.type != "cuda":
        return "no CUDA device"
    if len(set(target.placement)) > 1:
        return f"layers are split over {len(set(target.placement))} devices"
    if target.config.experts is not None:
        return "experts are chosen on the host"
    return ""


@dataclass
class Graphs:
    """Captured rounds over one State. Where a round cannot be captured, ``reason`` says why and rounds run eagerly."""

    parts: Parts
    state: State
    reason: str
    captured: dict[tuple[int, Sampling], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = field(default_factory=dict)

    def prepare(self, budget: int, sampling: Sampling) -> None:
        """Capture a round unless that has been done. Runs rounds on the state: call before prompts are run."""
        if self.reason or (budget, sampling) in self.captured:
            return
        state = self.state
        state.lengths.fill_(1)
        state.roots.zero_()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile kernels and fill caches of index tables outside the capture
                run_round(self.parts, state, budget, sampling)
                state.lengths.fill_(1)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, logits = run_round(self.parts, state, budget, sampling)
        self.captured[budget, sampling] = (graph, out, logits)

    def run(self, budget: int, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """A round: replayed if captured, else run eagerly."""
        if generator is None and (budget, sampling) in self.captured:
            graph, out, logits = self.captured[budget, sampling]
            graph.replay()
            return out, logits
        return run_round(self.parts, self.state, budget, sampling, generator)
