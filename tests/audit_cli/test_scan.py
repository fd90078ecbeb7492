"""Scans that meet trouble: files that can't be read or parsed, a full disk, another scan at the same time; and what
is cached."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit_cli.installs import CHAIN, FILES, REPO, audit_of, ddaudit, listing, wheel, write

VERIFIER = "vllm/v1/sample/rejection_sampler.py"


def _venv(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return next(folder.glob("lib/python3*/site-packages"))


def test_a_local_environment_is_scanned_and_left_as_it_was(home: Path, tmp_path: Path) -> None:
    write(_venv(tmp_path / "env"))
    before = listing(tmp_path / "env")
    done = ddaudit("scan", "local", "--venv", str(tmp_path / "env"), "--json")
    assert done.returncode == 0, done.stderr
    audit = audit_of(done)
    assert audit["target"]["kind"] == "local" and audit["install"]["record"]["status"] == "clean"
    assert {probe["id"] for probe in audit["probes"]} >= {"host", "environment"}
    assert listing(tmp_path / "env") == before
    assert audit_of(ddaudit("scan", "local", "--venv", str(tmp_path / "env"), "--json", "--no-probe"))["probes"] == []


def test_the_active_environment_is_the_default(home: Path, tmp_path: Path) -> None:
    write(_venv(tmp_path / "env"))
    done = ddaudit("scan", "local", "--no-probe", "--json", env={"VIRTUAL_ENV": str(tmp_path / "env")})
    assert audit_of(done)["target"]["python"] == str(tmp_path / "env" / "bin" / "python")


def test_plugins_startup_code_and_pythonpath_are_part_of_the_install(home: Path, tmp_path: Path) -> None:
    site = write(_venv(tmp_path / "env"))
    write(
        site,
        {"tree_plugin/__init__.py": "def register(): ...\n"},
        "tree-plugin",
        "1.2",
        "[vllm.general_plugins]\nt = tree_plugin:register\n",
    )
    (site / "patch.pth").write_text("import patcher\n")
    (site / "patcher.py").write_text("import sys\n")
    extra = tmp_path / "extra"
    (extra / "helper").mkdir(parents=True)
    (extra / "helper" / "__init__.py").write_text("y = 1\n")
    done = ddaudit(
        "scan",
        "local",
        "--venv",
        str(tmp_path / "env"),
        "--pythonpath",
        str(extra),
        "--json",
        "--no-probe",
        "--no-probe",
    )
    assert done.returncode == 0, done.stderr
    from audit_cli.console import Console
    from audit_cli.opening import Options, open_target
    from audit_cli.targets import parse

    opened = open_target(
        parse("local"), Options(home / "cache", str(tmp_path / "env"), (str(extra),)), Console(quiet=True)
    )
    origins = {(found.origin, found.path) for found in opened.inventory.files}
    assert ("plugin:tree-plugin", "tree_plugin/__init__.py") in origins
    assert ("plugin:patcher", "patcher.py") in origins
    assert ("pythonpath:0", "helper/__init__.py") in origins
    assert [(p.group, p.distribution, p.version) for p in opened.inventory.entry_points] == [
        ("vllm.general_plugins", "tree-plugin", "1.2")
    ]
    assert "patch.pth: import patcher" in opened.inventory.injected


def test_a_vllm_on_pythonpath_is_the_one_in_force(home: Path, tmp_path: Path) -> None:
    write(_venv(tmp_path / "env"))
    fork = write(tmp_path / "fork", {**FILES, "vllm/mine.py": ""}, version="0.98.0+mine")
    done = ddaudit("scan", "local", "--venv", str(tmp_path / "env"), "--pythonpath", str(fork), "--json", "--no-probe")
    audit = audit_of(done)
    assert audit["install"]["vllm_version"] == "0.98.0+mine" and audit["target"]["site_packages"] == str(fork)
    assert any(error["code"] == "copies" for error in audit["errors"])
    assert done.returncode == 0


def test_an_editable_install_is_followed(home: Path, tmp_path: Path) -> None:
    site = _venv(tmp_path / "env")
    source = tmp_path / "src"
    for path, text in FILES.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    info = site / "vllm-0.97.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.97\n")
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{source}", "dir_info": {"editable": True}}))
    (info / "RECORD").write_text("__editable__.vllm-0.97.pth,,\n")
    (site / "__editable__.vllm-0.97.pth").write_text(f"{source}\n")
    audit = audit_of(ddaudit("scan", "local", "--venv", str(tmp_path / "env"), "--json", "--no-probe"))
    assert audit["install"]["vllm_version"] == "0.97" and audit["target"]["site_packages"] == str(source)
    assert audit["install"]["record"]["status"] == "unknown"


@pytest.mark.parametrize("text", ["def broken(:\n", "x = " + "(" * 3000 + ")" * 3000 + "\n"])
def test_a_file_that_no_parser_takes_makes_the_scan_incomplete(home: Path, tmp_path: Path, text: str) -> None:
    install = write(tmp_path / "site", {**FILES, VERIFIER: CHAIN + text})
    done = ddaudit("scan", f"dir:{install}", "--json")
    assert done.returncode == 4, done.stderr
    audit = audit_of(done)
    assert any(VERIFIER in error["message"] for error in audit["errors"])
    verdict = next(v for v in audit["verdicts"] if v["id"] == "tree-walk")
    assert verdict["outcome"] == "unknown" and [f["file"] for f in verdict["scope"]["files_failed"]] == [VERIFIER]


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads everything")
def test_an_unreadable_file_makes_the_scan_incomplete(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    (install / VERIFIER).chmod(0)
    command = [sys.executable, "-m", "audit_cli", "scan", f"dir:{install}", "--json"]
    if os.geteuid() == 0:  # give up the right to read what one may not
        command = [
            "setpriv",
            "--bounding-set=-dac_override,-dac_read_search",
            "--inh-caps=-dac_override,-dac_read_search",
            *command,
        ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPO)}, check=False
    )
    assert done.returncode == 4, done.stderr
    assert any("Permission denied" in error["message"] for error in json.loads(done.stdout)["errors"])


def test_bytes_that_are_no_text_are_survived(home: Path, tmp_path: Path) -> None:
    odd = {
        "vllm/nul.py": b"x = 1\0\n",
        "vllm/latin.py": b"# caf\xe9\n",
        "vllm/crlf.py": b"x = 1\r\n",
        "vllm/bom.py": b"\xef\xbb\xbfx = 1\n",
    }
    done = ddaudit("scan", f"dir:{write(tmp_path / 'site', {**FILES, **odd})}", "--json")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 4)
    assert audit_of(done)["install"]["record"]["files"] == len(FILES) + 4


def test_a_full_disk_is_named_and_leaves_no_half_files(home: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the system refuses to write on, as it does on a full one."""
    big = {f"vllm/big{n}.py": f"x = '{os.urandom(40_000).hex()}'\n" for n in range(3)}
    file = wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", write(tmp_path / "site", {**FILES, **big}))
    with_limit = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600)); import sys; sys.path.insert(0, {str(REPO)!r}); sys.argv[1:] = ['scan', 'wheel:{file}', '--json']; from audit_cli.__main__ import main; main()"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", with_limit], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "disk-full"
    assert not list((home / "cache").rglob(".new-*"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert ddaudit("scan", f"wheel:{file}").returncode == 0


def test_two_scans_share_a_cache(home: Path, tmp_path: Path) -> None:
    (home / "cache" / "facts").unlink()  # a facts cache of their own, empty
    install = write(
        tmp_path / "site", {**FILES, **{f"vllm/m{n}.py": f"def f{n}(x):\n    return x + {n}\n" for n in range(200)}}
    )
    file = wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", install)
    command = [sys.executable, "-m", "audit_cli", "scan", f"wheel:{file}", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    audits = []
    for child in both:
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        audits.append(json.loads(out))
        audits[-1].pop("made")
    assert audits[0] == audits[1]
    third = audit_of(ddaudit("scan", f"wheel:{file}", "--json"))
    assert third["made"]["facts"] == "known" and third["made"]["files_parsed_now"] == 0


def test_an_unchanged_folder_is_not_read_again_and_a_changed_file_is(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    for path in install.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    first = audit_of(ddaudit("scan", f"dir:{install}", "--json"))
    (install / VERIFIER).write_text(CHAIN.replace("rejected", "stopped!")[: len(CHAIN)])
    os.utime(
        install / VERIFIER, (1_000_000_000, 1_000_000_000)
    )  # size and time as before: the inode's change time tells
    second = audit_of(ddaudit("scan", f"dir:{install}", "--json"))
    assert first["install"]["record"]["changed"] == [] and second["install"]["record"]["changed"] == [VERIFIER]


def test_cache_info_and_clear(home: Path, tmp_path: Path) -> None:
    file = wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", write(tmp_path / "site"))
    assert ddaudit("cache", "warm", f"wheel:{file}").returncode == 0
    info = json.loads(ddaudit("cache", "info", "--json").stdout)
    assert info["parts"]["indexes"]["files"] == 1
    assert ddaudit("cache", "clear").returncode == 0
    assert json.loads(ddaudit("cache", "info", "--json").stdout)["parts"]["indexes"]["files"] == 0
    assert ddaudit("cache", "warm", "local").returncode == 2


def test_recheck_says_what_still_holds(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    assert ddaudit("scan", f"dir:{install}").returncode == 0
    same = ddaudit("recheck", "last", "--fail-on", "changed")
    assert same.returncode == 0 and "the one audited, file for file" in same.stdout, same.stdout
    evidence = [e["file"] for v in audit_of(ddaudit("report", "last", "--json"))["verdicts"] for e in v["evidence"]]
    (install / evidence[0]).write_text((install / evidence[0]).read_text() + "# mine\n")
    changed = ddaudit("recheck", "last", "--fail-on", "changed", "--json")
    outcome = json.loads(changed.stdout)
    assert not outcome["same"] and changed.returncode == 1
    touched = [check for check in outcome["checks"] if check["what"] == evidence[0]]
    assert touched and all(check["state"] == "changed" for check in touched)
    (install / evidence[0]).unlink()
    said = ddaudit("recheck", "last").stdout
    assert said.startswith("The install is not the one audited: ") and evidence[0] in said.splitlines()[0]
    assert "gone" in said and "answers that need a new look" in said


def test_commands_of_a_foreign_audit_are_run_only_when_asked(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    audit = audit_of(ddaudit("scan", f"dir:{install}", "--json"))
    audit["verdicts"][0]["recheck"] = f"touch {tmp_path}/ran"
    (tmp_path / "foreign.json").write_text(json.dumps(audit))
    assert ddaudit("recheck", str(tmp_path / "foreign.json")).returncode == 0
    assert not (tmp_path / "ran").exists()
    ddaudit("recheck", str(tmp_path / "foreign.json"), "--run")
    assert (tmp_path / "ran").exists()


@pytest.mark.wheel
def test_every_recheck_command_of_a_0_33_0_report_prints_what_the_report_says(
    home: Path, wheel_tree: Callable[[str], Path]
) -> None:
    folder = wheel_tree("0.33.0")
    done = ddaudit("scan", f"dir:{folder}", "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(ddaudit("recheck", "last", "--json").stdout)
    commands = {v["id"]: v["recheck"] for v in audit_of(done)["verdicts"] if v["recheck"]}
    assert len(commands) >= 15
    broken = [check for check in outcome["checks"] if check["state"] in ("changed", "gone")]
    assert broken == []
    assert sum(check["state"] == "holds" and check["what"] in commands.values() for check in outcome["checks"]) >= 10
