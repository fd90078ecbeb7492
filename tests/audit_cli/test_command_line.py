"""The contract of the command line: what goes where, exit codes, JSON, speed of --help."""

from __future__ import annotations

import ast
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomllib

import audit_cli
from audit_cli.disk import in_words
from reports.markdown import render
from reports.model import VERDICT_IDS, audit_from_json
from tests.audit_cli.installs import REPO, audit_of, ddaudit, write


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    script = (
        "import sys, resource, contextlib, io\n"
        "from audit_cli.main import run\n"
        "with contextlib.redirect_stdout(io.StringIO()): run(['--help'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = {'libcst', 'paramiko', 'yaml', 'torch', 'rich', 'rules.engine'}\n"
        "print(sorted(set(sys.modules) & heavy), used.ru_utime + used.ru_stime)\n"
    )
    seconds = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, check=True)
        heavy, used = done.stdout.rsplit(" ", 1)
        assert heavy == "[]"
        seconds.append(float(used))
    assert min(seconds) <= 0.3  # processor time: the wall clock of a busy machine says nothing


def test_version_is_the_packages_own() -> None:
    assert ddaudit("--version").stdout == f"ddaudit {audit_cli.__version__}\n"
    assert tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"] == audit_cli.__version__


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["scan"], 2),
        (["scan", "no/such/target"], 2),
        (["scan", "dir:/nonexistent"], 3),
        (["scan", "wheel:/nonexistent.whl"], 3),
        (["scan", "pypi:vllm==0.33.0", "--venv", "/x"], 2),
        (["scan", "pypi:not a name"], 2),
        (["scan", "dir:/", "--fail-on", "tree-walk"], 2),
        (["scan", "dir:/", "--fail-on", "no-such-id=no"], 2),
        (["scan", "host:99999"], 2),
        (["scan", "foo:bar"], 2),
        (["scan", "dir:/", "--out", "/nope/x.md"], 2),
        (["scan", "a@localhost", "-i", "/nope"], 2),
        (["scan", "a@localhost", "-F", "/nope"], 2),
        (["scan", "dir:/", "--ssh-backend", "foo"], 2),
        (["scan", "dir:/", "--json", "--sarif"], 2),
        (["cache", "warm", "foo"], 2),
        (["cache", "warm"], 2),
        (["rules", "new", "tree-walk"], 2),
        (["report", "no-such-audit"], 2),
        (["recheck", "last"], 2),
        (["nonsense"], 2),
    ],
)  # fmt: skip
def test_errors_have_three_lines_a_code_and_a_json_form(home: Path, arguments: list[str], code: int) -> None:
    done = ddaudit(*arguments)
    assert done.returncode == code
    assert done.stdout == "" or "--json" in arguments
    what, why, hint = done.stderr.splitlines()
    assert what.startswith("error: ") and why.startswith("  why: ") and hint.startswith("  try: ")
    assert not hint.startswith("  try: try")
    if arguments[0] in ("scan", "report", "recheck"):
        said = ddaudit(*arguments, "--json")
        assert said.returncode == code
        error = json.loads(said.stdout)["error"]
        assert set(error) == {"code", "message", "hint"} and error["code"] and error["message"]


def test_flags_that_do_not_parse_are_shown_with_the_place(home: Path) -> None:
    done = ddaudit("lint", "--serve-args", '-tp 2 --speculative-config {"method":"dflash"}')
    assert done.returncode == 2
    _, why, flags, caret, hint = done.stderr.splitlines()
    assert "--speculative-config is not JSON" in why and "quotes" in why
    assert flags[caret.index("^")] == '"' and hint.startswith("  try: ")


def test_a_path_gets_the_prefix_that_it_needs(home: Path, tmp_path: Path) -> None:
    assert f"did you mean dir:{tmp_path}?" in ddaudit("scan", str(tmp_path)).stderr


def test_json_is_one_object_that_renders_to_the_same_report(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    done = ddaudit("scan", f"dir:{install}", "--json")
    assert done.returncode == 0, done.stderr
    audit = audit_of(done)
    assert list(audit)[:3] == ["schema_version", "ddaudit", "target"]
    assert audit["target"]["kind"] == "dir" and audit["install"]["record"]["status"] == "clean"
    assert {verdict["id"] for verdict in audit["verdicts"]} == set(VERDICT_IDS)
    (tmp_path / "audit.json").write_text(done.stdout)
    again = ddaudit("report", str(tmp_path / "audit.json"))
    assert again.stdout == render(audit_from_json(audit)) == ddaudit("report", "last").stdout


def test_kept_audits_are_for_their_owner_alone(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    for _ in range(2):  # within one second: the second must not replace the first
        ddaudit("scan", f"dir:{install}")
    kept = list((home / "state" / "audits").glob("*.json"))
    assert len(kept) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_out_writes_the_report_and_leaves_stdout_empty(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    done = ddaudit("scan", f"dir:{install}", "--out", str(tmp_path / "report.md"))
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "report.md").read_text().startswith("#")
    assert done.stderr.rstrip().endswith(f"report: {tmp_path / 'report.md'}")
    assert "\x1b" not in done.stderr


def test_a_state_folder_that_cannot_be_written_does_not_cost_the_answer(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a folder below a file can't be made, not even by root
    install = write(tmp_path / "site")
    done = ddaudit("scan", f"dir:{install}", "--json", env={"DDAUDIT_STATE_DIR": str(tmp_path / "file" / "state")})
    assert done.returncode == 0 and audit_of(done)["verdicts"]
    assert "warning: the audit is not kept" in done.stderr


def test_a_full_standard_output_is_named_and_the_audit_is_kept(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "audit_cli"]
        done, listed = (
            subprocess.run([*command, *rest], stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPO, check=False)
            for rest in (["scan", f"dir:{install}"], ["rules", "list"])
        )
    assert done.returncode == 3 and "error: standard output can't be written\n" in done.stderr
    assert "DDAUDIT_CACHE_DIR" not in done.stderr and "the audit is kept" in done.stderr
    assert ddaudit("report", "last").returncode == 0
    assert listed.returncode == 3 and listed.stderr.startswith("error: standard output can't be written\n")


def test_an_out_file_that_cannot_be_written_is_named(home: Path, tmp_path: Path) -> None:
    done = ddaudit("scan", f"dir:{write(tmp_path / 'site')}", "--out", "/dev/full/x.md")
    assert done.returncode != 0 and "/dev/full" in done.stderr and ".new-" not in done.stderr


def test_a_full_folder_is_named_with_the_variable_that_moves_it(home: Path) -> None:
    for folder, variable in (("cache", "DDAUDIT_CACHE_DIR"), ("state", "DDAUDIT_STATE_DIR")):
        for number, code in ((errno.ENOSPC, "disk-full"), (errno.EROFS, "no-write")):
            said = in_words(OSError(number, os.strerror(number), str(home / folder / "x" / "y")))
            assert said.code == code and variable in said.hint and f"the {folder} folder" in said.what
    assert "DDAUDIT" not in in_words(OSError(errno.ENOSPC, "full", "/else/where.md")).hint


def test_redact_leaves_paths_out(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "secret-customer" / "site")
    done = ddaudit("scan", f"dir:{install}", "--redact", "--json")
    assert "secret-customer" not in done.stdout


def test_fail_on_turns_an_answer_into_exit_1(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    assert ddaudit("scan", f"dir:{install}", "--fail-on", "record-integrity=yes").returncode == 1
    assert ddaudit("scan", f"dir:{install}", "--fail-on", "record-integrity=no").returncode == 0


def test_interrupt_is_130(home: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (slow / "ssh").chmod(0o755)
    environment["PATH"] = f"{slow}:{environment['PATH']}"
    child = subprocess.Popen(
        [sys.executable, "-m", "audit_cli", "scan", "somewhere", "--venv", "/x", "--ssh-backend", "openssh"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "interrupted" in said and "Traceback" not in said


def test_another_distributions_rules_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "__init__.py").write_text("")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPO)!r}]; from audit_cli.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not ddaudit's" in done.stderr and "environment of its own" in done.stderr


MAY_IMPORT = {
    "audit_cli": {"rules", "reports", "probes"},
    "rules": {"reports"},
    "reports": set[str](),
    "probes": set[str](),
    "ddtree": set[str](),
}


def test_imports_go_downward_only() -> None:
    wrong = []
    for package, allowed in MAY_IMPORT.items():
        for path in (REPO / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                for name in names:
                    top = name.split(".")[0]
                    foreign = top in MAY_IMPORT and top != package and top not in allowed
                    beyond = package == "rules" and top == "reports" and name != "reports.model"
                    if foreign or beyond:
                        wrong.append(f"{path.relative_to(REPO)}:{node.lineno} imports {name}")  # type: ignore[attr-defined]
    assert wrong == []
