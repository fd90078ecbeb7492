"""What each step trains on: a plan that is a pure function of (lengths, seed, epoch), and anchors keyed by document.

Documents are packed into rows of a fixed width, at most ``anchors`` blocks a row, and rows into micro-batches:
shapes are static, so the drafter compiles once. A step is ``rows_per_step`` rows whatever the number of ranks, and
nothing here holds state, so a run goes on at step s, on any number of ranks, from s alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.training.errors import DataError
from ddtree.training.textsig import mix64

_WINDOW = 4096  # documents that are packed together; larger packs tighter, smaller keeps the order more random


def keyed_hash(seed: int, *keys: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """Counter-based random 64-bit numbers: one for each element of the (broadcast) keys."""
    h = np.asarray(mix64(np.array([seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
    for key in keys:
        h = mix64(h * np.uint64(0x9E3779B97F4A7C15) + np.asarray(key).astype(np.uint64) + np.uint64(1))
    return h


@dataclass(frozen=True)
class Shape:
    """Static shape of a micro-batch: ``rows`` packed rows of ``width`` tokens, ``anchors`` blocks each."""

    width: int = 2048
    rows: int = 1
    anchors: int = 512
    cap: int = 512  # most anchors of one document
    rate: float = 0.5  # anchors of a document = min(cap, ceil(rate * its possible anchors))

    def anchors_of(self, possible: int) -> int:
        """Anchors drawn from a document that has ``possible`` anchor positions."""
        return min(self.cap, self.anchors, math.ceil(self.rate * possible))


def possible_anchors(prompt: int, total: int, width: int) -> int:
    """Positions prompt .. min(total, width) - 2: the token there is a response token, and so is the one it predicts."""
    return max(0, min(total, width) - 1 - prompt)


def pack_epoch(
    prompts: NDArray[np.int64], totals: NDArray[np.int64], shape: Shape, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Documents of every packed row of an epoch, in the epoch's order.

    Best fit, in windows of shuffled documents: a document goes into the row where it leaves least room, if both its
    tokens and its anchors fit. Documents without a possible anchor (prompts as wide as a row) are left out.

    Args:
        prompts, totals: lengths of each document.
    Raises:
        DataError: no document fits.
    """
    order = np.argsort(keyed_hash(seed, epoch, np.arange(len(totals))), kind="stable")
    rows: list[list[int]] = []
    for at in range(0, len(order), _WINDOW):
        window = order[at : at + _WINDOW]
        window = window[np.argsort(-totals[window], kind="stable")]
        room: list[tuple[int, int, int]] = []  # (tokens left, anchors left, row), sorted
        for doc in window.tolist():
            length = min(int(totals[doc]), shape.width)
            blocks = shape.anchors_of(possible_anchors(int(prompts[doc]), int(totals[doc]), shape.width))
            if not blocks:
                continue
            found = next((i for i in range(bisect_left(room, (length,)), len(room)) if room[i][1] >= blocks), None)
            if found is None:
                rows.append([doc])
                left = (shape.width - length, shape.anchors - blocks, len(rows) - 1)
            else:
                tokens, anchors, row = room.pop(found)
                rows[row].append(doc)
                left = (tokens - length, anchors - blocks, row)
            if left[0] > 2 and left[1] > 0:
                insort(room, left)
    if not rows:
        raise DataError("nothing-to-train-on", f"none of {len(totals)} rows has a response within {shape.width} tokens",
                        "raise the row width")  # fmt: skip
    mix = np.argsort(keyed_hash(seed, epoch, np.arange(len(rows)), 1), kind="stable")
    return [np.array(rows[i], np.int64) for i in mix]


def draw_anchors(
    docs: NDArray[np.int64], prompts: NDArray[np.int64], totals: NDArray[np.int64], shape: Shape, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Anchor positions of each document, sorted, without replacement: a function of (seed, document, epoch) alone."""
    out = []
    for doc in docs.tolist():
        prompt = int(prompts[doc])
        possible = possible_anchors(prompt, int(totals[doc]), shape.width)
        count = shape.anchors_of(possible)
        ranks = keyed_hash(seed, epoch, doc, np.arange(possible))
        out.append(prompt + np.sort(np.argpartition(ranks, count - 1)[:count]) if count else np.zeros(0, np.int64))
    return out


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device. ``source`` maps packed slots to the flat features of ``docs``, end to end.

    Padding blocks have anchor 0, an empty context and no valid target.
    """

    docs: list[int]
    lengths: list[int]  # tokens used of each document
    source: Tensor  # int64 [rows, width], index into the documents' tokens laid end to end
    ids: Tensor  # int64 [rows, width]
    positions: Tensor  # int64 [rows, width], rope positions: restart at every document
    anchors: Tensor  # int64 [rows, n], packed index
    starts: Tensor  # int64 [rows, n], packed index of the document's first token
    anchor_tokens: Tensor  # int64 [rows, n]
    targets: Tensor  # int64 [rows, n, B-1]
    valid: Tensor  # bool [rows, n, B-1]; stops at the document's end

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)


def assemble(
    rows: Sequence[NDArray[np.int64]],
    anchors: Sequence[Sequence[NDArray[np.int64]]],
    ids_of: Sequence[Sequence[NDArray[np.int32]]],
    shape: Shape,
    block: int,
    device: torch.device | str = "cpu",
) -> Batch:
    """Lay documents and anchors out in packed rows. ``ids_of`` are the documents' token ids, cut at the row width."""
    R, S, n = shape.rows, shape.width, shape.anchors
    source, ids, positions = (np.zeros((R, S), np.int64) for _ in range(3))
    at_anchor, start = np.zeros((R, n), np.int64), np.zeros((R, n), np.int64)
    token, target = np.zeros((R, n), np.int64), np.zeros((R, n, block - 1), np.int64)
    valid = np.zeros((R, n, block - 1), bool)
    docs, lengths, flat = [], [], 0
    steps = np.arange(1, block)
    for r, row in enumerate(rows):
        col = used = 0
        for doc, own, tokens in zip(row.tolist(), anchors[r], ids_of[r], strict=True):
            size, count = len(tokens), len(own)
            source[r, col : col + size] = flat + np.arange(size)
            ids[r, col : col + size] = tokens
            positions[r, col : col + size] = np.arange(size)
            block_at = slice(used, used + count)
            at_anchor[r, block_at], start[r, block_at], token[r, block_at] = col + own, col, tokens[own]
            ahead = own[:, None] + steps
            valid[r, block_at] = ahead < size
            target[r, block_at] = tokens[np.minimum(ahead, size - 1)]
            docs.append(doc)
            lengths.append(size)
            col, used, flat = col + size, used + count, flat + size
    arrays = (source, ids, positions, at_anchor, start, token, target, valid)
    tensors = [torch.from_numpy(a) for a in arrays]
    if torch.device(device).type == "cuda":
        tensors = [t.pin_memory().to(device, non_blocking=True) for t in tensors]
    return Batch(docs, lengths, *tensors)


class Plan:
    """Micro-batches of a run over a token set, by step number.

    Args:
        prompts, totals: lengths of the documents. rows_per_step: packed rows of an optimiser step, over all ranks.
    Raises:
        DataError: rows_per_step is no multiple of shape.rows, or fewer rows than one step needs.
    """

    def __init__(
        self, prompts: NDArray[np.int64], totals: NDArray[np.int64], shape: Shape, rows_per_step: int, seed: int
    ) -> None:
        if rows_per_step % shape.rows:
            raise DataError(
                "rows-per-step", f"{rows_per_step} rows a step is no multiple of {shape.rows} a micro-batch"
            )
        self.prompts, self.totals, self.shape, self.seed = prompts, totals, shape, seed
        self.micro = rows_per_step // shape.rows
        self.rows_per_step = rows_per_step
        self._epochs: dict[int, list[NDArray[np.int64]]] = {}
        if len(self._epoch(0)) < rows_per_step:
            raise DataError("too-little-data", f"{len(self._epoch(0))} packed rows, a step takes {rows_per_step}",
                            "fewer rows per step, or more data")  # fmt: skip

    def _epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        if epoch not in self._epochs:
            self._epochs = {k: v for k, v in self._epochs.items() if k >= epoch - 1}
            self._epochs[epoch] = pack_epoch(self.prompts, self.totals, self.shape, self.seed, epoch)
        return self._epochs[epoch]

    def steps_per_epoch(self) -> int:
        """Whole steps of the first epoch (later ones may differ by a few)."""
        return len(self._epoch(0)) // self.rows_per_step

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it). An epoch's last rows that fill no step are left out; the next epoch reshuffles."""
        epoch = 0
        while step >= (here := len(self._epoch(epoch)) // self.rows_per_step):
            step, epoch = step - here, epoch + 1
        return epoch, step

    def rows(self, step: int, micro: int) -> tuple[int, list[NDArray[np.int64]]]:
        """(epoch, documents of each row) of micro-batch ``micro`` (0 .. self.micro - 1) of a step."""
        epoch, within = self.locate(step)
        first = within * self.rows_per_step + micro * self.shape.rows
        return epoch, self._epoch(epoch)[first : first + self.shape.rows]
