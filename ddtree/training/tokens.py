"""Token shards: recorded responses as flat token ids, with an index, provenance, checksums and a manifest.

``shard-00000.ids`` holds uint32 token ids end to end; ``shard-00000.rows.npy`` one record a row (offset, total length,
prompt length, flags); ``shard-00000.meta.jsonl`` one JSON object a row (prompt id and hash, sampler, finish reason,
...). A row is one prompt and one response: ids[prompt:total] are supervised. Conversations become one row per
assistant turn (see template.py), so no row needs more than one supervised run. A shard is listed in the manifest
when it is whole, and never changes afterwards: resuming is listing shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.training.errors import DataError
from ddtree.training.files import MANIFEST, atomic, file_digest, read_json, read_manifest, write_manifest

INDEX = np.dtype([("offset", "<i8"), ("total", "<i4"), ("prompt", "<i4"), ("flags", "<u4")])
FINISHED, LOOPING = 1, 2  # flags: the response ended by itself; the response repeats itself


@dataclass(frozen=True)
class Row:
    """One recorded response: int32 ids of prompt and response, the length of the prompt, provenance."""

    ids: NDArray[np.int32]
    prompt: int
    flags: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """False for a response that was cut at the token limit: its end is no end."""
        return bool(self.flags & FINISHED)


def is_looping(response: Sequence[int] | NDArray[np.int32], period: int = 48, repeats: int = 3) -> bool:
    """True when the response ends in ``repeats`` copies of the same stretch of at most ``period`` tokens (24 at
    least in all): greedy small models do, and a copying drafter then looks better than it is."""
    tail = np.asarray(response)
    most = min(period, len(tail) // repeats, len(tail) - 1)
    if most < 1:
        return False
    same = np.flatnonzero(tail[-1 - most : -1] == tail[-1])  # a period repeats the last token, among others
    for p in (most - same[::-1]).tolist():
        n = max(p * repeats, 24)
        if len(tail) >= n and bool((tail[-n + p :] == tail[-n:-p]).all()):
            return True
    return False


class TokenWriter:
    """Append rows; every ``shard_rows`` of them become a whole shard. ``identity`` says what target wrote them."""

    def __init__(self, folder: Path, identity: dict[str, Any], shard_rows: int = 8192) -> None:
        self.folder, self.identity, self.shard_rows = folder, identity, shard_rows
        self.pending: list[Row] = []
        self.shards: list[dict[str, Any]] = []
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder, "tokens")
            if manifest["identity"] != identity:
                changed = sorted(k for k in {*identity, *manifest["identity"]}
                                 if manifest["identity"].get(k) != identity.get(k))  # fmt: skip
                raise DataError("tokens-other-target", f"{folder} was begun with another {', '.join(changed)}",
                                "use another --out")  # fmt: skip
            self.shards = manifest["shards"]

    def add(self, row: Row) -> None:
        """Append; writes a shard when enough rows are waiting."""
        self.pending.append(row)
        if len(self.pending) >= self.shard_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting as a shard (of any size), and the manifest."""
        if self.pending:
            name = f"shard-{len(self.shards):05d}"
            index = np.zeros(len(self.pending), INDEX)
            index["total"] = [len(r.ids) for r in self.pending]
            index["offset"] = np.concatenate([[0], np.cumsum(index["total"])[:-1]])
            index["prompt"] = [r.prompt for r in self.pending]
            index["flags"] = [r.flags for r in self.pending]
            with atomic(self.folder / f"{name}.ids") as tmp:
                tmp.write_bytes(np.concatenate([r.ids for r in self.pending]).astype("<u4").tobytes())
            with atomic(self.folder / f"{name}.rows.npy") as tmp, tmp.open("wb") as handle:
                np.save(handle, index)
            with atomic(self.folder / f"{name}.meta.jsonl") as tmp:
                tmp.write_text("".join(json.dumps(r.meta, ensure_ascii=False) + "\n" for r in self.pending))
            self.shards.append({
                "name": name, "rows": len(index), "tokens": int(index["total"].sum()),
                "supervised": int((index["total"] - index["prompt"]).sum()),
                "digests": {s: file_digest(self.folder / f"{name}.{s}") for s in ("ids", "rows.npy", "meta.jsonl")},
            })  # fmt: skip
            self.pending = []
        totals = {k: sum(s[k] for s in self.shards) for k in ("rows", "tokens", "supervised")}
        write_manifest(self.folder, "tokens", {"identity": self.identity, **totals, "shards": self.shards})


class TokenSet:
    """Read-only view of token folders (of one target); row numbers run over all shards.

    Raises:
        DataError: no manifest, a missing shard, folders of different targets, or (with ``verify``) content that
            does not match its checksum.
    """

    def __init__(self, *folders: Path, verify: bool = True) -> None:
        self.folders = folders
        self.manifests = [read_manifest(folder, "tokens") for folder in folders]
        identities = [
            {k: v for k, v in m["identity"].items() if k not in ("sampler", "engine")} for m in self.manifests
        ]
        self.identity: dict[str, Any] = identities[0]
        for folder, other in zip(folders, identities, strict=True):
            if other != self.identity:
                raise DataError("tokens-other-target", f"{folder} and {folders[0]} come from different targets")
        parts, flats, base = [], [], 0
        for folder, shard in self._shards():
            for suffix, expected in shard["digests"].items():
                file = folder / f"{shard['name']}.{suffix}"
                if not file.exists():
                    raise DataError("shard-missing", f"{file} is listed in the manifest but absent")
                if verify and file_digest(file) != expected:
                    raise DataError("shard-corrupt", f"{file} does not match its checksum", "generate it again")
            index = np.load(folder / f"{shard['name']}.rows.npy")
            index["offset"] += base
            ids = np.fromfile(folder / f"{shard['name']}.ids", dtype="<u4")
            base += len(ids)
            parts.append(index)
            flats.append(ids)
        if not parts:
            raise DataError("tokens-empty", f"{folders[0]} holds no rows")
        self.index = np.concatenate(parts)
        self.flat: NDArray[np.int32] = np.concatenate(flats).astype(np.int32)
        self._meta: list[dict[str, Any]] | None = None

    def _shards(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            yield from ((folder, shard) for shard in manifest["shards"])

    def __len__(self) -> int:
        return len(self.index)

    @property
    def meta(self) -> list[dict[str, Any]]:
        """Provenance of every row (read on first use)."""
        if self._meta is None:
            self._meta = [
                json.loads(line)
                for folder, shard in self._shards()
                for line in (folder / f"{shard['name']}.meta.jsonl").read_text().splitlines()
            ]
        return self._meta

    def ids(self, row: int) -> NDArray[np.int32]:
        """Token ids int32 [total] of a row."""
        r = self.index[row]
        return self.flat[r["offset"] : r["offset"] + r["total"]]

    def row(self, number: int) -> Row:
        """A row with its provenance."""
        r = self.index[number]
        return Row(self.ids(number), int(r["prompt"]), int(r["flags"]), self.meta[number])

    def rows(self) -> Iterator[Row]:
        """All rows in order."""
        return (self.row(i) for i in range(len(self)))


def failed_path(folder: Path) -> Path:
    """Where rows that failed are kept: one JSON object a line with the prompt's id and the reason."""
    return folder / "failed.jsonl"


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest as it is, whatever its kind."""
    return dict(read_json(folder / MANIFEST))
