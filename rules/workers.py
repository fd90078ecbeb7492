"""Worker processes that make facts, and what happens when a file kills one or never ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rules.extraction import Unit, extract_one, units_of
from rules.loading import load_rules

Batch = list[tuple[str, str, list[str], bytes]]  # (sha256, path, ids of the units that miss it, source)
Result = list[tuple[str, str, Any]]  # (sha256, unit id, facts)
_STALLED = 120.0  # seconds without any batch done: a worker hangs where no timer reaches it
_ONE_FILE = 60.0

_worker_units: dict[str, Unit] = {}


def work(batch: Batch, units: dict[str, Unit]) -> Result:
    """The facts of a batch, file by file: units that ask for the same file share its tree."""
    return [
        (sha, name, extract_one(units[name], path, source)) for sha, path, missing, source in batch for name in missing
    ]


def in_pool(batches: Iterator[Batch], extra: Sequence[Path], python: str) -> Iterator[tuple[Result, int]]:
    """The batches' results as they come. When a worker dies, the files that were in flight are done one by one, the one
    that kills it again is a failed file, and the rest goes on as before."""
    while True:
        suspects = yield from _until_broken(batches, extra)
        if not suspects:
            return
        yield from _one_by_one(suspects, extra, python)


def _until_broken(batches: Iterator[Batch], extra: Sequence[Path]) -> Generator[tuple[Result, int], None, list[Batch]]:
    """Runs batches in as many workers as there are cores; gives back those in flight when a worker died."""
    workers = min(os.cpu_count() or 1, 8)
    running: dict[Future[Result], Batch] = {}
    with _pool(workers, extra) as pool:
        for batch in batches:
            try:
                running[pool.submit(_work_in_worker, batch)] = batch
            except BrokenProcessPool:
                return [*running.values(), batch]
            while len(running) >= 2 * workers:
                if not (yield from _finished(pool, running)):
                    return list(running.values())
        while running:
            if not (yield from _finished(pool, running)):
                return list(running.values())
    return []


def _finished(
    pool: ProcessPoolExecutor, running: dict[Future[Result], Batch]
) -> Generator[tuple[Result, int], None, bool]:
    """What is done by now, at least one batch; False when a worker died or hangs."""
    done = wait(running, timeout=_STALLED, return_when=FIRST_COMPLETED).done
    if not done:
        _kill(pool)
        return False
    for future in done:
        try:
            result = future.result()
        except BrokenProcessPool:
            return False
        yield result, len(running.pop(future))
    return True


def _one_by_one(batches: list[Batch], extra: Sequence[Path], python: str) -> Iterator[tuple[Result, int]]:
    pool: ProcessPoolExecutor | None = None
    for item in (item for batch in batches for item in batch):
        pool = pool or _pool(1, extra)
        try:
            yield pool.submit(_work_in_worker, [item]).result(timeout=_ONE_FILE), 1
        except (BrokenProcessPool, TimeoutError) as error:
            died = isinstance(error, BrokenProcessPool)
            why = "the parser crashed on it" if died else f"took more than {_ONE_FILE:.0f} s"
            _kill(pool)
            pool = None
            yield [(item[0], name, {"failed": why, "py": python}) for name in item[2]], 1
    if pool is not None:
        pool.shutdown()


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(extra: Sequence[Path]) -> None:
    gc.disable()  # trees of one batch are freed by reference counts; a quarter of the time goes otherwise
    _worker_units.update({u.id: u for u in units_of(load_rules(extra))})
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()


def _leave_with_parent(parent: int) -> None:
    """A scan that is killed leaves no workers behind: they would wait for their queue for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work_in_worker(batch: Batch) -> Result:
    result = work(batch, _worker_units)
    gc.collect()
    return result


def _pool(workers: int, extra: Sequence[Path]) -> ProcessPoolExecutor:
    # Not fork: a scan of several targets runs threads.
    return ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(tuple(extra),)
    )
