"""``ddaudit diff`` and ``ddaudit report --sarif`` as they are typed, and what they say of a name that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from audit_cli import kept
from audit_cli.errors import DdauditError
from audit_cli.output import output_form
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
    command = [sys.executable, "-m", "audit_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


def test_markdown_json_and_file(state: Path, tmp_path: Path) -> None:
    first = sorted(path.stem for path in (state / "audits").glob("*.json"))[0]
    shown = ddaudit(state, "diff", first)
    assert shown.returncode == 0 and "**gdn-gate-gather**: no → yes" in shown.stdout, shown.stderr
    assert "gpu1.example.com" in shown.stdout and "gpu1" not in ddaudit(state, "diff", first, "--redact").stdout
    data = json.loads(ddaudit(state, "diff", first, "last", "--json").stdout)
    assert data["schema_version"] == 1 and data["moved"][0]["direction"] == "better"
    assert ddaudit(state, "diff", first, "--out", str(tmp_path / "d.md")).stdout == ""
    assert (tmp_path / "d.md").read_text() == shown.stdout


def test_a_name_that_is_none(state: Path) -> None:
    failed = ddaudit(state, "diff", "nothing-like-it")
    assert failed.returncode == 2 and "no audit nothing-like-it" in failed.stderr


def test_sarif(state: Path, tmp_path: Path) -> None:
    log = json.loads(ddaudit(state, "report", "--sarif").stdout)
    assert log["version"] == "2.1.0" and log["runs"][0]["results"][0]["ruleId"] == "gdn-gate-gather"
    assert ddaudit(state, "report", "--sarif", "--out", str(tmp_path / "a.sarif"), "--redact").returncode == 0
    assert "gpu1" not in (tmp_path / "a.sarif").read_text()


def test_sarif_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sarif_pydantic", None)
    with pytest.raises(DdauditError) as caught:
        output_form(as_json=False, sarif=True)
    assert caught.value.exit_code == 2 and "[sarif]" in caught.value.hint
