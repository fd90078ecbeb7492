"""``ddaudit diff`` as it is typed: two kept audits, Markdown or JSON, and what it says of a name that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from audit_cli import kept
from tests.reports.samples import audit, verdict


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "audits"
    old = kept.keep(audit(verdicts=(verdict("gdn-gate-gather", "no"),)), folder)
    new = kept.keep(audit(verdicts=(verdict("gdn-gate-gather", "yes"),)), folder)
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    return tmp_path


def ddaudit(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DDAUDIT_STATE_DIR": str(state), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "audit_cli", "diff", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


def test_markdown_json_and_file(state: Path, tmp_path: Path) -> None:
    first = sorted(path.stem for path in (state / "audits").glob("*.json"))[0]
    shown = ddaudit(state, first)
    assert shown.returncode == 0 and "**gdn-gate-gather**: no → yes" in shown.stdout, shown.stderr
    assert "gpu1.example.com" in shown.stdout and "gpu1" not in ddaudit(state, first, "--redact").stdout
    data = json.loads(ddaudit(state, first, "last", "--json").stdout)
    assert data["schema_version"] == 1 and data["moved"][0]["direction"] == "better"
    assert ddaudit(state, first, "--out", str(tmp_path / "d.md")).stdout == ""
    assert (tmp_path / "d.md").read_text() == shown.stdout


def test_a_name_that_is_none(state: Path) -> None:
    failed = ddaudit(state, "nothing-like-it")
    assert failed.returncode == 2 and "no audit nothing-like-it" in failed.stderr
