"""Several targets at once: reached side by side, one matrix, and a host that fails fails alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from audit_cli.errors import DdauditError
from audit_cli.fleet import read_inventory
from audit_cli.opening import Options
from tests.audit_cli.installs import audit_of, ddaudit, write
from tests.conftest import Sshd

_SLOW = """import os, socket, sys, threading, time
time.sleep(float(sys.argv[1]))
s = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
def up():
    while True:
        b = os.read(0, 65536)
        if not b:
            os._exit(0)
        s.sendall(b)
threading.Thread(target=up, daemon=True).start()
while True:
    b = s.recv(65536)
    if not b:
        break
    os.write(1, b)
"""


@pytest.fixture
def slow_hosts(sshd: Sshd, tmp_path: Path) -> Sshd:
    """Aliases host1 to host8 whose login takes 3 s, and ``hung``, which says nothing for a minute."""
    (tmp_path / "slow.py").write_text(_SLOW)
    hosts = ""
    for name, seconds in [*((f"host{n}", 3) for n in range(1, 9)), ("hung", 60)]:
        command = f"{sys.executable} {tmp_path}/slow.py {seconds} {sshd.port}"
        hosts += f"Host {name}\n  HostKeyAlias all\n  ProxyCommand {command}\n"
    sshd.config.write_text(hosts + sshd.config.read_text())
    sshd.knows("all")
    return sshd


def _venv(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    write(next(folder.glob("lib/python3*/site-packages")))
    return folder


def test_slow_hosts_are_reached_side_by_side_and_a_hung_one_fails_alone(
    home: Path, slow_hosts: Sshd, tmp_path: Path
) -> None:
    how = (*slow_hosts.options, "--venv", str(_venv(tmp_path / "env")), "--json", "--no-probe")
    assert ddaudit("scan", "host1", *how).returncode == 0  # facts and files are here from now on
    start = time.monotonic()
    one = ddaudit("scan", "host1", *how)
    alone = time.monotonic() - start
    assert one.returncode == 0, one.stderr
    start = time.monotonic()
    all_of_them = ddaudit("scan", *(f"host{n}" for n in range(1, 9)), *how)
    together = time.monotonic() - start
    assert all_of_them.returncode == 0, all_of_them.stderr
    assert len(audit_of(all_of_them)["audits"]) == 8
    assert together < 2 * alone  # eight times 3 s in a row would be five times as long and more
    both = ddaudit("scan", "hung", "host1", *how[:-2], "--no-probe")
    assert both.returncode == 3
    assert both.stderr.index("host1: vLLM 0.99.0") < both.stderr.index("hung: no SSH session")
    assert "`host1`" in both.stdout and "no SSH session" in both.stdout


def test_an_inventory_names_targets_with_options_of_their_own(home: Path, tmp_path: Path) -> None:
    install = write(tmp_path / "site")
    (tmp_path / "hosts.yaml").write_text(
        f"hosts:\n  - dir:{install}\n  - target: local\n    venv: {_venv(tmp_path / 'env')}\n  - dir:/nonexistent\n"
    )
    done = ddaudit("scan", "--inventory", str(tmp_path / "hosts.yaml"), "--json", "--no-probe")
    assert done.returncode == 3, done.stderr
    body = json.loads(done.stdout)
    assert [audit["target"]["kind"] for audit in body["audits"]] == ["dir", "local"]
    assert body["failed"] == [{"target": "dir:/nonexistent", "error": body["failed"][0]["error"]}]
    assert len(list((home / "state" / "audits").glob("*.json"))) == 2
    redacted = ddaudit("scan", "--inventory", str(tmp_path / "hosts.yaml"), "--no-probe", "--redact")
    assert str(tmp_path) not in redacted.stdout


@pytest.mark.parametrize(
    "text",
    ["", "hosts: []", "hosts: {a: 1}", "- {venv: /x}", "- {target: host, password: x}", "- a b c", "- ['", "\x00"],
)
def test_a_bad_inventory_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts.yaml").write_text(text)
    with pytest.raises(DdauditError) as caught:
        read_inventory(tmp_path / "hosts.yaml", Options(tmp_path))
    assert caught.value.exit_code == 2
