"""Where the drafter's input comes from: the target in process, a budgeted cache, saved states, or a formula.

A source maps row numbers to the flat features of those rows' tokens, end to end: [sum of lengths, m * H] on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ddtree.training.errors import DataError
from ddtree.training.files import human_bytes
from ddtree.training.target import Target
from ddtree.training.tokens import TokenSet


class FeatureSource(Protocol):
    """features(rows, lengths): the first ``lengths[i]`` tokens of each row, end to end."""

    def features(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor: ...


class InProcess:
    """Prefill by the target on the spot: similar lengths together, right-padded, one document a row."""

    def __init__(self, target: Target, tokens: TokenSet, max_tokens: int = 16384) -> None:
        self.target, self.tokens, self.max_tokens = target, tokens, max_tokens

    def features(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """See FeatureSource."""
        sizes = np.asarray(lengths)
        out: list[Tensor | None] = [None] * len(rows)
        todo = np.argsort(sizes, kind="stable").tolist()
        while todo:
            longest = int(sizes[todo[-1]])
            count = max(1, min(len(todo), self.max_tokens // longest))
            part, todo = todo[-count:], todo[:-count]
            ids = np.zeros((count, -(-longest // 16) * 16), np.int64)
            for i, k in enumerate(part):
                ids[i, : sizes[k]] = self.tokens.ids(rows[k])[: sizes[k]]
            states = self.target.capture(torch.from_numpy(ids).to(self.target.device))
            for i, k in enumerate(part):
                out[k] = states[i, : sizes[k]]
        return torch.cat([t for t in out if t is not None])


class Cached:
    """Keep what another source computed, up to a budget of bytes, in one flat tensor; the rest is computed each time.

    On the GPU it turns every epoch but the first into a gather.
    """

    def __init__(self, inner: FeatureSource, budget: int, width: int, dtype: torch.dtype, device: str) -> None:
        self.inner = inner
        capacity = budget // (width * dtype.itemsize)
        if capacity < 1:
            raise DataError("state-budget", f"a budget of {human_bytes(budget)} holds not one token")
        self.store = torch.empty(capacity, width, dtype=dtype, device=device)
        self.used = 0
        self.at: dict[int, tuple[int, int]] = {}  # row -> (offset, tokens)

    def fill(self, lengths: NDArray[np.int64], batch_tokens: int = 65536) -> int:
        """Compute rows ahead, by length and in large batches, until the budget is used; returns how many are kept.

        Args:
            lengths: tokens to keep of each row, by row number.
        """
        order = np.argsort(lengths, kind="stable")
        ends = np.cumsum(lengths[order])
        at = 0
        with tqdm(total=int(lengths.sum()), desc="capture", unit="tok", unit_scale=True, leave=False) as bar:
            while at < len(order) and self.used < len(self.store):
                stop = max(at + 1, int(np.searchsorted(ends, (ends[at - 1] if at else 0) + batch_tokens, "right")))
                part = order[at:stop]
                flat = self.inner.features(part.tolist(), lengths[part].tolist())
                room = len(self.store) - self.used
                for row, states in zip(part.tolist(), torch.split(flat, lengths[part].tolist()), strict=True):
                    if len(states) <= room:
                        self.store[self.used : self.used + len(states)] = states
                        self.at[row] = (self.used, len(states))
                        self.used, room = self.used + len(states), room - len(states)
                bar.update(len(flat))
                at = stop
                if room < int(lengths[order[at]] if at < len(order) else 0):
                    break
        return len(self.at)

    def features(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """See FeatureSource."""
        missing = [i for i, r in enumerate(rows) if self.at.get(r, (0, -1))[1] < lengths[i]]
        computed: dict[int, Tensor] = {}
        if missing:
            flat = self.inner.features([rows[i] for i in missing], [lengths[i] for i in missing])
            for i, part in zip(missing, torch.split(flat, [lengths[i] for i in missing]), strict=True):
                if rows[i] not in self.at and self.used + len(part) <= len(self.store):
                    self.store[self.used : self.used + len(part)] = part
                    self.at[rows[i]] = (self.used, len(part))
                    self.used += len(part)
                else:
                    computed[i] = part
        if not computed:
            starts = np.array([self.at[r][0] for r in rows])
            return self.store[torch.from_numpy(_ranges(starts, np.asarray(lengths))).to(self.store.device)]
        parts = []
        for i, r in enumerate(rows):
            offset = self.at[r][0] if i not in computed else 0
            parts.append(computed[i] if i in computed else self.store[offset : offset + lengths[i]])
        return torch.cat(parts)


def _ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """start .. start + size - 1 of each, end to end."""
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes), np.int64)


class VllmStates:
    """Reads what vLLM's ``extract_hidden_states`` saved: safetensors {hidden_states [S, n, H], token_ids [S]} a
    request.

    vLLM's auxiliary layer k is the output of layer k - 1. Files are matched by their token ids, so their names do not
    matter.

    Raises:
        DataError: a row without states, or states of another width.
    """

    def __init__(self, folder: Path, tokens: TokenSet, width: int, device: str) -> None:
        from safetensors import safe_open

        self.tokens, self.width, self.device = tokens, width, device
        self.files: dict[bytes, Path] = {}
        for file in sorted(folder.rglob("*.safetensors")):
            with safe_open(file, framework="np") as handle:
                self.files[handle.get_tensor("token_ids").astype(np.int32).tobytes()] = file
        if not self.files:
            raise DataError("states-empty", f"{folder} holds no saved hidden states")

    def features(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """See FeatureSource. States may lack a row's last token: nothing is drafted after it."""
        from safetensors.torch import load_file

        out = []
        for row, length in zip(rows, lengths, strict=True):
            ids = self.tokens.ids(row)
            file = self.files.get(ids.tobytes()) or self.files.get(ids[:-1].tobytes())
            if file is None:
                raise DataError("states-missing", f"row {row} has no saved hidden states")
            states = load_file(file)["hidden_states"].flatten(1)[:length]
            if states.shape[1] != self.width:
                raise DataError("states-width", f"{file.name}: {states.shape[1]} values a token, expected {self.width}")
            if len(states) < length:
                states = torch.cat([states, states.new_zeros(length - len(states), self.width)])
            out.append(states)
        return torch.cat(out).to(self.device)


class Synthetic:
    """Features that are a fixed random function of token ids and positions: for benchmarks and tests of shape."""

    def __init__(
        self, tokens: TokenSet, width: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.tokens, self.table = tokens, torch.randn(vocab, width, generator=g).to(device, dtype)

    def features(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """See FeatureSource."""
        ids = np.concatenate([self.tokens.ids(r)[:n] for r, n in zip(rows, lengths, strict=True)])
        return self.table[torch.from_numpy(ids).long().to(self.table.device)]
