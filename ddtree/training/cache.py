"""Hidden states on disk, within a budget: for targets whose prefill costs more than reading them back.

A shard is one flat file of [tokens, width] states and is listed in the manifest, with its checksum, once it is
whole; it never changes. What is not in a whole shard does not exist: after a kill it is computed again. Rows are
those of one token set and one choice of layers: the manifest names both, and another is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.training.errors import DataError
from ddtree.training.features import FeatureSource
from ddtree.training.files import (
    MANIFEST,
    atomic,
    file_digest,
    human_bytes,
    read_manifest,
    require_space,
    write_manifest,
)

_BITS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


class StateStore:
    """Shards of hidden states in a folder.

    Args:
        width: m * H values a token. budget: bytes that all shards may take.
        identity: of target, layer ids and token set; the folder refuses another.
    Raises:
        DiskError: ``disk-would-fill`` when the disk has no room for the budget.
        DataError: ``states-other-run``, ``shard-missing``, ``shard-corrupt``.
    """

    def __init__(
        self, folder: Path, width: int, dtype: torch.dtype, budget: int, identity: dict[str, Any],
        shard_bytes: int = 2 << 30, verify: bool = True,
    ) -> None:  # fmt: skip
        self.folder, self.width, self.dtype, self.budget = folder, width, dtype, budget
        self.shard_bytes = min(shard_bytes, max(budget // 4, 1))
        self.identity = {**identity, "width": width, "dtype": str(dtype)}
        self.shards: list[dict[str, Any]] = []
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder, "states")
            if manifest["identity"] != self.identity:
                raise DataError("states-other-run", f"{folder} is of another target, layer choice or token set",
                                "use another folder")  # fmt: skip
            self.shards = manifest["shards"]
        self.used = sum(int(s["bytes"]) for s in self.shards)
        require_space(folder, max(0, budget - self.used), f"a state budget of {human_bytes(budget)}, "
                      f"{human_bytes(self.used)} of it there already")  # fmt: skip
        self.at: dict[int, tuple[NDArray[Any], int, int]] = {}  # row -> (shard, first token, tokens)
        for shard in self.shards:
            self._open(shard, verify)
        self.pending: dict[int, Tensor] = {}
        self.pending_bytes = 0

    def _open(self, shard: dict[str, Any], verify: bool) -> None:
        file = self.folder / shard["name"]
        if not file.exists():
            raise DataError("shard-missing", f"{file} is listed in the manifest but absent")
        if verify and file_digest(file) != shard["digest"]:
            raise DataError("shard-corrupt", f"{file} does not match its checksum", "delete the folder: it is a cache")
        kind = np.int16 if self.dtype.itemsize == 2 else np.int32
        data = np.memmap(file, kind, "r").reshape(-1, self.width)
        first = 0
        for row, tokens in shard["rows"]:
            self.at[int(row)] = (data, first, int(tokens))
            first += int(tokens)

    def get(self, row: int, tokens: int) -> Tensor | None:
        """The first ``tokens`` states of a row, [tokens, width] on the CPU; None when they are not kept."""
        if row in self.pending and len(self.pending[row]) >= tokens:
            return self.pending[row][:tokens]
        data, first, count = self.at.get(row, (None, 0, -1))
        if data is None or count < tokens:
            return None
        return torch.from_numpy(np.array(data[first : first + tokens])).view(self.dtype)

    def put(self, row: int, states: Tensor) -> bool:
        """Keep a row's states [tokens, width]; False when the budget has no room for them."""
        size = states.numel() * self.dtype.itemsize
        if row in self.at or row in self.pending or self.used + self.pending_bytes + size > self.budget:
            return False
        self.pending[row] = states.detach().to("cpu", self.dtype).contiguous()
        self.pending_bytes += size
        if self.pending_bytes >= self.shard_bytes:
            self.flush()
        return True

    def flush(self) -> None:
        """Write what is waiting as a shard, and the manifest."""
        if not self.pending:
            return
        file = self.folder / f"shard-{len(self.shards):05d}.bin"
        with atomic(file) as tmp, tmp.open("wb") as handle:
            for states in self.pending.values():
                handle.write(states.view(_BITS[self.dtype]).numpy().tobytes())
        shard = {
            "name": file.name, "bytes": self.pending_bytes, "digest": file_digest(file),
            "rows": [[row, len(states)] for row, states in self.pending.items()],
        }  # fmt: skip
        self.shards.append(shard)
        write_manifest(self.folder, "states", {"identity": self.identity, "shards": self.shards})
        self.used += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0
        self._open(shard, verify=False)


class DiskCached:
    """Another source's features, read back from a StateStore where it has them."""

    def __init__(self, inner: FeatureSource, store: StateStore, device: str) -> None:
        self.inner, self.store, self.device = inner, store, device

    def features(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """See FeatureSource."""
        found = [self.store.get(r, n) for r, n in zip(rows, lengths, strict=True)]
        missing = [i for i, states in enumerate(found) if states is None]
        if missing:
            flat = self.inner.features([rows[i] for i in missing], [lengths[i] for i in missing])
            for i, states in zip(missing, torch.split(flat, [lengths[i] for i in missing]), strict=True):
                self.store.put(rows[i], states)
                found[i] = states
        return torch.cat([states.to(self.device, non_blocking=True) for states in found if states is not None])
