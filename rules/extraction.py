"""Facts of files: what is cached, what the shipped pack knows, what must be made now (in worker processes when it is
much)."""

from __future__ import annotations

import gc
import importlib
import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rules.base import Rule
from rules.cache import Cache, Row
from rules.limits import TookTooLongError, time_limit
from rules.loading import HERE, unit_sha
from rules.tree import InstallTree, SourceFile

PACK = HERE / "data" / "facts.pack"
_POOL_FROM = 1_500_000  # bytes to parse above which worker processes pay for their start
_BATCH = 400_000
_FIRST_BATCHES = 120_000  # of the hot folders: both workers busy from the start, and done early
_LARGEST = 8_000_000  # bytes; a larger file is generated, and its tree takes more memory than a scan may
#: Where acceptance lives in every known vLLM: looked at first, for the provisional verdict. Order only: nothing is
#: left out.
_HOT = (
    "vllm/v1/sample/",
    "vllm/v1/worker/",
    "vllm/v1/spec_decode/",
    "vllm/v1/attention/",
    "vllm/v1/core/",
    "vllm/config/",
    "vllm/envs.py",
)
_PY = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class Unit:
    """One extractor: a rule's own, or stage 1's."""

    id: str
    sha: str
    extract: Callable[[str, bytes], Any]
    needles: tuple[bytes, ...] = ()
    paths: tuple[str, ...] = ()

    def wants(self, path: str, source: bytes) -> bool:
        if self.paths and not any(fnmatch(path, pattern) for pattern in self.paths):
            return False
        return not self.needles or any(needle in source for needle in self.needles)


def units_of(rules: Sequence[Rule]) -> list[Unit]:
    """Stage 1 and the rules' own extractors."""
    shapes = importlib.import_module("rules.facts.shapes")
    units = [Unit("shapes", unit_sha(HERE / "facts" / "shapes.py"), shapes.extract)]
    return units + [Unit(r.id, r.source_sha256, r.extract, r.needles, r.paths) for r in rules if r.extract is not None]


def graph_unit() -> Unit:
    """Calls, classes and constants of one file: made only for the files that a slice visits."""
    graph = importlib.import_module("rules.facts.graph")
    return Unit("graph", unit_sha(HERE / "facts" / "graph.py"), graph.extract)


def failure(facts: Any) -> str:
    """Why a file could not be parsed, or "" (a unit's facts are a list, or {"failed": why, "py": minor version that
    failed})."""
    return str(facts["failed"]) if isinstance(facts, dict) else ""


def is_known(row: Row | None, unit: Unit) -> bool:
    """Whether the row holds this unit's facts. A failure holds only for the Python that failed: another minor may
    parse it."""
    if row is None or unit.id not in row or row[unit.id][0] != unit.sha:
        return False
    facts = row[unit.id][1]
    return not (failure(facts) and facts.get("py") != _PY)


def extract_one(unit: Unit, path: str, source: bytes) -> Any:
    if not unit.wants(path, source):
        return []
    if len(source) > _LARGEST:
        return {"failed": f"larger than {_LARGEST // 1_000_000} MB", "py": _PY}
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(max(depth, 4000))  # a sum of a thousand terms is a tree a thousand deep
    try:
        with time_limit():
            return unit.extract(path, source)
    except TookTooLongError as error:
        return {"failed": str(error), "py": _PY}
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:200], "py": _PY}
    except Exception as error:  # a rule's own bug must not cost the other rules their facts
        return {"failed": f"{unit.id}: {type(error).__name__}: {error}"[:200], "py": _PY, "bug": True}
    finally:
        sys.setrecursionlimit(depth)


def read_pack(units: Sequence[Unit], path: Path = PACK) -> dict[str, Row]:
    """Rows of the shipped pack (by the first 16 hex digits of the file's hash), for the units whose source is what
    it was made with."""
    try:
        pack = json.loads(lzma.decompress(path.read_bytes()))
        made_with, seen, known = pack["units"], pack["seen"], pack["facts"]
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError):
        return {}
    usable = {u.id: u.sha for u in units if made_with.get(u.id) == u.sha}
    everywhere = [
        name for name in usable if name != "graph"
    ]  # in the pack, no facts means: looked at, and nothing there
    rows: dict[str, Row] = {sha: {name: [usable[name], []] for name in everywhere} for sha in seen}
    for sha, facts in known.items():
        for name, found in facts.items():
            if name in usable:
                rows[sha][name] = [usable[name], found]
    return rows


def extract_all(
    tree: InstallTree,
    files: Sequence[SourceFile],
    units: Sequence[Unit],
    extra: Sequence[Path],
    rows: dict[str, Row],
    cache: Cache,
    progress: Callable[[int, int, bool], None],
) -> list[tuple[str, str]]:
    """Make what ``rows`` lacks and add it there and to the cache. Returns (path, why) of the files whose bytes could
    not be had.
    ``progress(done, total, hot)``: hot is True once, when the hot folders are through."""
    todo: list[tuple[str, str, list[str]]] = []
    seen: set[str] = set()
    for file in sorted(files, key=_heat):
        missing = [u.id for u in units if not is_known(rows.get(file.sha256), u)]
        if missing and file.sha256 not in seen:
            seen.add(file.sha256)
            todo.append((file.sha256, file.path, missing))
    if not todo:
        return []
    sizes = {file.sha256: file.size for file in files}
    hot = sum(path.startswith(_HOT) for _, path, _ in todo)
    unreadable: list[tuple[str, str]] = []
    fresh: dict[str, Row] = {}
    done = 0
    by_id = {u.id: u for u in units}

    def batches() -> Iterator[list[tuple[str, str, list[str], bytes]]]:
        batch: list[tuple[str, str, list[str], bytes]] = []
        size = 0
        for number, (sha, path, missing) in enumerate(todo):
            try:
                source = tree.read(sha)
            except OSError as error:
                unreadable.append((path, str(error)))
                continue
            batch.append((sha, path, missing, source))
            size += len(source)
            if size > (_BATCH if number >= hot else _FIRST_BATCHES) or number + 1 == hot:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def take(result: list[tuple[str, str, Any]], count: int) -> None:
        nonlocal done
        for sha, unit_id, facts in result:
            row = [by_id[unit_id].sha, facts]
            rows.setdefault(sha, {})[unit_id] = row
            fresh.setdefault(sha, {})[unit_id] = row
        was, done = done, done + count
        progress(done, len(todo), was < hot <= done)

    from rules.workers import in_pool, work

    total = sum(sizes[sha] for sha, _, _ in todo)
    if total < _POOL_FROM or (os.cpu_count() or 1) < 2:
        was_on = gc.isenabled()
        gc.disable()
        try:
            for batch in batches():
                take(work(batch, by_id), len(batch))
        finally:
            if was_on:
                gc.enable()
    else:
        for result, count in in_pool(batches(), extra, _PY):
            take(result, count)
    cache.put(fresh)
    return unreadable


def _heat(file: SourceFile) -> tuple[bool, bool, int]:
    return (file.origin == "vllm" and file.stock, not file.path.startswith(_HOT), -file.size)
