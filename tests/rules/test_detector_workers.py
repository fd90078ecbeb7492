"""Files that hang a parser, crash a worker or are far too large: the scan goes on and says which."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from rules.extraction import extract_one, units_of
from rules.limits import TookTooLongError, time_limit
from rules.workers import Batch, in_pool

CRASHES = textwrap.dedent('''
    """Ends the process on some files."""
    import os
    import signal

    ID = "crashes"
    QUESTION = "?"
    CHANGES_IF = ""
    VALID = INVALID = ()


    def extract(path, source):
        if b"crash" in source:
            os.kill(os.getpid(), signal.SIGSEGV)
        return [{"k": path}]


    def judge(ctx):
        raise NotImplementedError
''')


def test_a_file_that_crashes_its_worker_costs_itself_only(tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    items = [(f"{n:064x}", f"f{n}.py", ["crashes"], b"crash" if n == 3 else b"pass") for n in range(8)]
    batches: list[Batch] = [items[:2], items[2:5], items[5:]]
    found = {sha: facts for result, _ in in_pool(iter(batches), [tmp_path], "3") for sha, _, facts in result}
    assert {sha for sha, facts in found.items() if isinstance(facts, dict)} == {items[3][0]}
    assert "crashed" in found[items[3][0]]["failed"]
    assert len(found) == 8


def test_what_takes_too_long_is_stopped() -> None:
    start = time.process_time()
    with pytest.raises(TookTooLongError), time_limit(0.1):
        while True:
            pass
    assert time.process_time() - start < 5


def test_a_block_in_time_is_left_alone() -> None:
    with time_limit(5):
        assert sum(range(10)) == 45


def test_a_file_of_many_megabytes_is_named() -> None:
    facts = extract_one(units_of([])[0], "generated.py", b"x = 1\n" * 3_500_000)
    assert "larger than" in facts["failed"]
