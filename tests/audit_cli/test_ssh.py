"""Over a real OpenSSH server: what the scan finds, what it leaves behind (nothing), and every way in which it may not
get there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.audit_cli.installs import CHAIN, REPO, audit_of, ddaudit, listing, write
from tests.conftest import Sshd


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A virtual environment with a small vLLM in it."""
    folder = tmp_path / "host" / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    write(next(folder.glob("lib/python3*/site-packages")))
    return folder


def _site(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages"))


@pytest.mark.wheel
@pytest.mark.parametrize("backend", ["paramiko", "openssh"])
def test_a_real_install_is_scanned_and_left_as_it_was(home: Path, sshd: Sshd, venv: Path, backend: str) -> None:
    before = listing(venv)
    done = ddaudit(
        "scan",
        sshd.target,
        *sshd.options,
        "--venv",
        str(venv),
        "--ssh-backend",
        backend,
        "--json",
        "--no-probe",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    audit = audit_of(done)
    assert audit["target"]["kind"] == "ssh" and audit["target"]["host"] == sshd.target
    assert audit["install"]["vllm_version"] == "0.20.2"
    record = audit["install"]["record"]  # the fixture leaves the large binaries out
    assert record["files"] == 1723 and not record["changed"] and not record["orphans"]
    assert all(path.endswith(".so") for path in record["missing"])
    assert listing(venv) == before


def test_a_repeat_fetches_nothing_and_moves_little(home: Path, sshd: Sshd, small: Path) -> None:
    arguments = ("scan", sshd.target, *sshd.options, "--venv", str(small), "--json", "--no-probe", "-v")
    first, second = ddaudit(*arguments), ddaudit(*arguments)
    assert first.returncode == second.returncode == 0, first.stderr
    assert (
        "4 of 4 different files were fetched" in first.stderr and "0 of 4 different files were fetched" in second.stderr
    )
    one, two = audit_of(first), audit_of(second)
    assert one.pop("made") != two.pop("made") and one == two


def test_a_second_host_with_the_same_files_ships_none(home: Path, sshd: Sshd, small: Path, tmp_path: Path) -> None:
    arguments = ("scan", sshd.target, *sshd.options, "--json", "--no-probe", "-v")
    ddaudit(*arguments, "--venv", str(small))
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    write(_site(other))
    assert "0 of 4 different files were fetched" in ddaudit(*arguments, "--venv", str(other)).stderr


@pytest.mark.wheel
def test_the_published_wheel_serves_a_host_that_runs_it(home: Path, sshd: Sshd, venv: Path, wheel_file: object) -> None:
    """Over the same link, without a stored file: the sources come from the wheel that was fetched for 0.20.2."""
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(venv), "--json", "--no-probe", "-v", timeout=900)
    assert re.search(r"\b0 of 1,[67]\d\d different files", done.stderr), done.stderr
    assert not (home / "cache" / "files").exists()


def test_changed_missing_and_added_files_are_named(home: Path, sshd: Sshd, small: Path) -> None:
    site = _site(small)
    (site / "vllm/version.py").write_text("__version__ = '0.99.0-mine'\n")
    (site / "vllm/v1/sample/extra.py").write_text(CHAIN)
    (site / "vllm/v1/sample/__init__.py").unlink()
    audit = audit_of(ddaudit("scan", sshd.target, *sshd.options, "--venv", str(small), "--json", "--no-probe"))
    assert audit["install"]["record"] == {
        "status": "changed", "changed": ["vllm/version.py"], "missing": ["vllm/v1/sample/__init__.py"],
        "orphans": ["vllm/v1/sample/extra.py"], "files": 5,
    }  # fmt: skip


def test_the_only_environment_is_found_and_several_are_listed(
    home: Path, sshd: Sshd, small: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "somebody"
    (folder / "x").mkdir(parents=True)
    shutil.copytree(small, folder / "ml-env", symlinks=True)
    sshd.start(f"SetEnv HOME={folder} VIRTUAL_ENV=/nonexistent")
    done = ddaudit("scan", sshd.target, *sshd.options, "--no-probe")
    assert done.returncode == 0, done.stderr
    assert f"using {folder}/ml-env (vLLM 0.99.0), the only one found" in done.stderr
    shutil.copytree(small, folder / "other-env", symlinks=True)
    done = ddaudit("scan", sshd.target, *sshd.options, "--no-probe")
    assert done.returncode == 3
    assert f"{folder}/ml-env (vLLM 0.99.0); {folder}/other-env (vLLM 0.99.0)" in done.stderr


def test_a_wrong_venv_is_named(home: Path, sshd: Sshd, tmp_path: Path) -> None:
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(tmp_path / "nothing"), "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "no-python"


def test_an_environment_without_vllm_is_named(home: Path, sshd: Sshd, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(tmp_path / "empty"), "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "no-vllm"


def test_an_unknown_host_key_is_refused_with_the_option_that_accepts_it(home: Path, sshd: Sshd, small: Path) -> None:
    sshd.known_hosts.write_text("")
    arguments = ("scan", sshd.target, *sshd.options, "--venv", str(small), "--no-probe")
    refused = ddaudit(*arguments)
    assert refused.returncode == 3
    assert f"--host-key {sshd.fingerprint}" in refused.stderr
    assert sshd.known_hosts.read_text() == ""  # never added by itself
    assert ddaudit(*arguments, "--host-key", sshd.fingerprint).returncode == 0
    assert sshd.known_hosts.read_text() == ""
    wrong = ddaudit(*arguments, "--host-key", "SHA256:" + "A" * 43)
    assert wrong.returncode == 3 and "another key than the one accepted" in wrong.stderr


def test_a_changed_and_a_revoked_host_key_are_refused(home: Path, sshd: Sshd, small: Path) -> None:
    arguments = ("scan", sshd.target, *sshd.options, "--venv", str(small), "--json", "--host-key", sshd.fingerprint)
    name = f"[127.0.0.1]:{sshd.port}"
    other = (sshd.folder / "other_key.pub").read_text().split()
    sshd.known_hosts.write_text(f"{name} {other[0]} {other[1]}\n")
    assert json.loads(ddaudit(*arguments).stdout)["error"]["code"] == "changed-key"
    mine = (sshd.folder / "host_key.pub").read_text().split()
    sshd.known_hosts.write_text(f"{name} {mine[0]} {mine[1]}\n@revoked {name} {mine[0]} {mine[1]}\n")
    assert json.loads(ddaudit(*arguments).stdout)["error"]["code"] == "revoked-key"


def test_hashed_known_hosts_with_broken_lines_are_read(home: Path, sshd: Sshd, small: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(sshd.known_hosts)], check=True, capture_output=True)
    hashed = sshd.known_hosts.read_text()
    assert hashed.startswith("|1|")
    sshd.known_hosts.write_text(f"@cert-authority * ssh-rsa AAAA\nbroken ssh-rsa not-base64!\n{hashed}")
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(small), "--no-probe")
    assert done.returncode == 0, done.stderr


def test_a_refused_key_is_named(home: Path, sshd: Sshd, small: Path) -> None:
    key = str(sshd.folder / "other_key")
    sshd.config.write_text(sshd.config.read_text().replace(str(sshd.key), "none"))
    done = ddaudit("scan", sshd.target, *sshd.options, "-i", key, "--venv", str(small))
    assert done.returncode == 3
    assert "does not let us in" in done.stderr and key in done.stderr


def test_the_systems_ssh_says_what_it_refused(home: Path, sshd: Sshd, small: Path) -> None:
    def code(*more: str) -> str:
        done = ddaudit("scan", sshd.target, *sshd.options, "--ssh-backend", "openssh", "--json", "--no-probe", *more)
        assert done.returncode == 3, done.stderr
        return str(json.loads(done.stdout)["error"]["code"])

    assert code("--venv", str(small), "--container", "engine-that-is-not-there:x") in ("no-container", "no-python")
    assert code("--container", "podman:x") == "no-container"
    known = sshd.known_hosts.read_text()
    sshd.known_hosts.write_text("")
    assert code("--venv", str(small)) == "unknown-host"
    name, kind, _ = known.split()
    sshd.known_hosts.write_text(f"{name} {kind} {(sshd.folder / 'other_key.pub').read_text().split()[1]}\n")
    assert code("--venv", str(small)) == "changed-key"
    sshd.known_hosts.write_text(known)
    (sshd.folder / "authorized_keys").write_text("")
    assert code("--venv", str(small)) == code() == "refused"


def test_nobody_listening_is_named(home: Path, sshd: Sshd) -> None:
    sshd.stop()
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", "/x")
    assert done.returncode == 3 and "Connection refused" in done.stderr


def test_an_alias_a_jump_host_and_a_host_key_alias_work(home: Path, sshd: Sshd, small: Path) -> None:
    sshd.config.write_text(
        f"Host inner\n  HostName 127.0.0.1\n  Port {sshd.port}\n  HostKeyAlias machine-room\n  ProxyJump jump\n"
        f"Host jump\n  HostName 127.0.0.1\n  Port {sshd.port}\n" + sshd.config.read_text()
    )
    sshd.knows(f"machine-room,[127.0.0.1]:{sshd.port}")
    for backend in ("paramiko", "openssh"):
        done = ddaudit(
            "scan", "inner", *sshd.options, "--venv", str(small), "--ssh-backend", backend, "--json", "--no-probe"
        )
        assert done.returncode == 0, done.stderr
    assert (sshd.folder / "sshd.log").read_text().count("Accepted publickey") >= 4


SHELLS = {
    "noise": "sh -c 'echo Welcome; seq 1 2000; exec sh -c \"$SSH_ORIGINAL_COMMAND\"'",
    "fish": 'exec fish -c "$SSH_ORIGINAL_COMMAND"',
    "csh": 'exec tcsh -c "$SSH_ORIGINAL_COMMAND"',
}


@pytest.mark.parametrize("shell", list(SHELLS))
def test_any_login_shell_will_do(home: Path, sshd: Sshd, small: Path, shell: str) -> None:
    if shell != "noise" and not shutil.which({"csh": "tcsh"}.get(shell, shell)):
        pytest.skip(f"{shell} is not installed")
    sshd.start(f"ForceCommand {SHELLS[shell]}")
    odd = small.with_name("odd 'name' $(x)")
    shutil.copytree(small, odd, symlinks=True)
    for venv in (small, odd):
        done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(venv), "--json", "--no-probe")
        assert done.returncode == 0, done.stderr
        assert audit_of(done)["install"]["record"]["files"] == 6


def test_endless_output_is_cut_off(home: Path, sshd: Sshd) -> None:
    sshd.start("ForceCommand yes")
    start = time.monotonic()
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", "/x", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["error"]["code"] == "too-much"
    assert time.monotonic() - start < 60


def test_an_old_python_says_so(home: Path, sshd: Sshd) -> None:
    old = [
        path
        for path in (Path.home() / ".pyenv/versions").glob("*/bin/python")
        if path.parts[-3].startswith(("2.7", "3.6", "3.7"))
    ]
    if not old:
        pytest.skip("no old Python here")
    for python in old:
        done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(python), "--json")
        assert json.loads(done.stdout)["error"]["code"] == "old-python", done.stdout


def test_every_python_from_3_8_on_can_be_asked(home: Path, sshd: Sshd, tmp_path: Path) -> None:
    fork = write(tmp_path / "fork")
    pythons = sorted((Path.home() / ".pyenv/versions").glob("3.*/bin/python"))
    for python in [path for path in pythons if int(path.parts[-3].split(".")[1]) >= 8] or [Path(sys.executable)]:
        how = ("--venv", str(python), "--pythonpath", str(fork), "--json", "--no-probe")
        done = ddaudit("scan", sshd.target, *sshd.options, *how)
        assert done.returncode == 0, done.stderr
        assert audit_of(done)["install"]["record"] == {
            "status": "clean", "changed": [], "missing": [], "orphans": [], "files": 6,
        }  # fmt: skip


def test_files_that_are_none_hang_nothing(home: Path, sshd: Sshd, small: Path) -> None:
    folder = _site(small) / "vllm"
    os.mkfifo(folder / "pipe.py")
    (folder / "loop").symlink_to(folder)
    (folder / "gone.py").symlink_to(folder / "nothing.py")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9\x1b[31m.py")).write_text("x = 1\n")
    done = ddaudit("scan", sshd.target, *sshd.options, "--venv", str(small), "--json", "--no-probe")
    audit = audit_of(done)
    assert "\x1b" not in done.stdout + done.stderr
    assert {"vllm/pipe.py", "vllm/gone.py"} <= {e["message"].split(":")[0] for e in audit["errors"]}
    assert any("caf\\xe9" in path for path in audit["install"]["record"]["orphans"])


def test_an_interrupt_leaves_nothing_running_on_the_host(home: Path, sshd: Sshd, small: Path) -> None:
    python = small / "bin" / "python"
    real = os.path.realpath(python)
    python.unlink()
    python.write_text(
        f"#!/bin/sh\necho $$ > {small}/pid\n"
        f"exec {real} -c 'import os, time; os.set_blocking(0, True)\nwhile os.read(0, 4096): pass'\n"
    )
    python.chmod(0o755)
    child = subprocess.Popen(
        [sys.executable, "-m", "audit_cli", "scan", sshd.target, *sshd.options, "--venv", str(small)],
        env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    pid = small / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode == 130
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid.read_text().strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_the_answer_of_the_real_script_ends_with_its_link(small: Path) -> None:
    """The inventory itself ends when its input closes, whatever it is doing."""
    from audit_cli.remote import _BOOT, script

    text = script("x", 600, ["inventory"], "time.sleep(600)").replace(b"import threading", b"import threading, time")
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", _BOOT, str(len(text))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin
    child.stdin.write(text)
    child.stdin.flush()
    time.sleep(1)
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(10) == 75


def test_a_link_that_breaks_keeps_what_arrived(home: Path, sshd: Sshd, small: Path) -> None:
    site = _site(small)
    noise = os.urandom(200_000).hex()
    for number in range(40):  # 16 MB that do not compress to nothing
        (site / "vllm" / f"big{number}.py").write_text(f"x{number} = '{noise[number:]}'\n")
    proxy = small / "proxy"
    # Bytes from the server pass until 6 MB have, then the link is cut.
    proxy.write_text(
        "#!/usr/bin/env python3\nimport socket, sys, threading, os\n"
        f"s = socket.create_connection(('127.0.0.1', {sshd.port}))\n"
        "def up():\n    while True:\n        b = os.read(0, 65536)\n"
        "        if not b: os._exit(0)\n        s.sendall(b)\n"
        "threading.Thread(target=up, daemon=True).start()\nleft = int(sys.argv[1])\n"
        "while left > 0:\n    b = s.recv(65536)\n    if not b: break\n    left -= len(b)\n    os.write(1, b)\n"
    )
    proxy.chmod(0o755)
    config = sshd.config.read_text()
    arguments = ("scan", sshd.target, *sshd.options, "--venv", str(small), "--json", "--no-probe", "-v")
    sshd.config.write_text(config + f"  ProxyCommand {sys.executable} {proxy} 4000000\n")
    broken = ddaudit(*arguments)
    assert broken.returncode == 3, broken.stderr
    assert json.loads(broken.stdout)["error"]["code"] in ("lost", "no-session"), broken.stdout
    kept = len([path for path in (home / "cache" / "files").rglob("*") if path.is_file()])
    assert 0 < kept < 44
    assert not list((home / "cache" / "files").rglob(".new-*"))
    sshd.config.write_text(config)
    again = ddaudit(*arguments)
    assert f"{44 - kept} of 44 different files were fetched" in again.stderr, again.stderr


def test_a_container_is_entered_through_its_engine(home: Path, sshd: Sshd, small: Path, tmp_path: Path) -> None:
    """A wrapper stands in for docker: it notes how it was called and runs the command."""
    engine = tmp_path / "podman"
    engine.write_text(f'#!/bin/sh\necho "$1 $2 $3" >> {tmp_path}/calls\nshift 3\nexec "$@"\n')
    engine.chmod(0o755)
    sshd.start(f"SetEnv PATH={tmp_path}:/usr/bin:/bin")
    how = ("--venv", str(small), "--container", "podman:vllm-server", "--json", "--no-probe")
    for target, options in ((sshd.target, sshd.options), ("local", [])):
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = ddaudit("scan", target, *options, *how, env=path)
        assert done.returncode == 0, done.stderr
        assert audit_of(done)["install"]["record"]["files"] == 6
    assert set((tmp_path / "calls").read_text().splitlines()) == {"exec -i vllm-server"}


def test_doctor_says_what_is_there_and_what_to_do(home: Path, sshd: Sshd, small: Path) -> None:
    good = ddaudit("doctor", sshd.target, *sshd.options, "--venv", str(small))
    assert good.returncode == 0, good.stdout
    assert f"✓ connection: {sshd.target}, host key {sshd.fingerprint}" in good.stdout
    assert f"✓ vllm: {_site(small)}/vllm" in good.stdout
    sshd.known_hosts.write_text("")
    bad = ddaudit("doctor", sshd.target, *sshd.options)
    assert bad.returncode == 3 and f"--host-key {sshd.fingerprint}" in bad.stdout
