"""``make bench-scan``: how long a scan takes and how much memory, written to docs/results/scan.md. Times mean little
on a busy machine: it says so.

Three cases, each in a process of its own: a wheel whose facts nobody has (cold), one whose facts are known but was
never read here (known), and the same again (warm). Over SSH, a repeat and a second host are tests, not times.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from audit_cli.paths import cache_dir
from audit_cli.wheels import wheel_for

VERSIONS = ("0.20.2", "0.23.0", "0.33.0")
LIMITS = {"cold": 15.0, "known": 1.5, "warm": 0.4}
_MAX_MB = 400
_RESULTS = Path("docs/results/scan.md")


@dataclass(frozen=True)
class Run:
    """Seconds of wall clock and of processor (children included), peak memory in MB of the largest process, first
    provisional answer."""

    case: str
    wall: float
    processor: float
    memory: float
    provisional: float | None


def measure(case: str, wheel: Path, cache: Path) -> Run:
    """One scan of a wheel in a process of its own, with this cache."""
    folders = {"DDAUDIT_CACHE_DIR": str(cache), "DDAUDIT_STATE_DIR": str(cache / "state")}
    # An installed ddaudit has its byte code; a checkout may be told to write none.
    environment = {**os.environ, **folders, "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "ddaudit-bench")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "audit_cli", "scan", f"wheel:{wheel}", "--out", str(cache / "report.md")]
    before = os.times()
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.monotonic() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if child.returncode:
        raise SystemExit(f"the scan failed:\n{text}")
    found = re.search(r"after ([0-9.]+) s: Provisional", text)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(case, wall, processor, usage.ru_maxrss / 1024, float(found[1]) if found else None)


def run(version: str, wheel: Path) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        cold = measure("cold", wheel, cache)
        known = cache / "known"
        known.mkdir()
        (cache / "facts").rename(known / "facts")
        _forget_judgements(known / "facts")
        return [cold, measure("known", wheel, known), measure("warm", wheel, known)]


def _forget_judgements(facts: Path) -> None:
    """Keep the facts of the files and drop the answers, as on a machine that has scanned other installs of this
    version."""
    import sqlite3

    with sqlite3.connect(facts / "facts.sqlite") as database:
        database.execute("DELETE FROM judgements")


def table(rows: list[tuple[str, Run]]) -> str:
    head = "| vLLM | case | wall s | floor s | processor s | peak MB | first provisional answer s |\n"
    body = "|---|---|---|---|---|---|---|\n"
    for version, run in rows:
        first = "" if run.provisional is None else f"{run.provisional:.1f}"
        numbers = f"{run.wall:.2f} | {LIMITS[run.case]} | {run.processor:.2f} | {run.memory:.0f} | {first}"
        body += f"| {version} | {run.case} | {numbers} |\n"
    return head + body


def main() -> None:
    """Measure, print, and write the page."""
    load = os.getloadavg()[0]
    rows: list[tuple[str, Run]] = []
    for version in sys.argv[1:] or VERSIONS:
        for result in run(version, wheel_for(f"vllm=={version}", cache_dir() / "wheels")):
            rows.append((version, result))
            print(version, result, flush=True)
    busy = " (a busy machine: the wall clock is an upper bound, look at the processor time)" if load > 0.5 else ""
    page = f"""# How long a scan takes

`make bench-scan`, {datetime.now(timezone.utc):%Y-%m-%d}: Python {platform.python_version()},
{os.cpu_count()} processors, {platform.machine()}, load average {load:.1f} before the start{busy}.

*cold*: nothing is known about the wheel. *known*: the facts of its files are known, this file was never read.
*warm*: the same again. Memory is that of the largest process; at most {_MAX_MB} MB is wanted. A provisional answer is
due within 3 s.

{table(rows)}"""
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    _RESULTS.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
