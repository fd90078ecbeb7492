"""Real parts for the tests: published vLLM wheels, a real sshd, folders of their own for cache and state."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import pytest

from audit_cli.wheels import wheel_for

# Triton decides at its import whether it compiles or interprets, and one process imports all tests: without a GPU it
# interprets everywhere, and what has to compile does so in a process of its own (tests/kernels/test_compiled.py).
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell ignores ^C for what it starts in the background, and children inherit that: the tests of ^C need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

#: Kept between runs: what is downloaded once. Never the cache that a test's scans use.
SHARED = Path(os.environ.get("DDAUDIT_TEST_CACHE") or platformdirs.user_cache_dir("ddaudit", appauthor=False))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: pytest-xdist's workers share the downloads."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def wheel_file() -> Callable[[str], Path]:
    """The published wheel of a vLLM version, downloaded once."""

    def get(version: str) -> Path:
        with _locked(SHARED / "wheels" / f".{version}.lock"):
            return wheel_for(f"vllm=={version}", SHARED / "wheels")

    return get


@pytest.fixture(scope="session")
def wheel_tree(wheel_file: Callable[[str], Path]) -> Callable[[str], Path]:
    """A site-packages folder with the files of a version, without its binaries. Read only: copy it."""

    def get(version: str) -> Path:
        folder = SHARED / "trees-2" / version
        with _locked(SHARED / "trees-2" / f".{version}.lock"):
            if not folder.exists():
                scratch = folder.with_name(f".{version}-{os.getpid()}")
                with zipfile.ZipFile(wheel_file(version)) as archive:
                    small = [i for i in archive.infolist() if i.file_size < 8 << 20 and not i.filename.endswith(".so")]
                    archive.extractall(scratch, small)
                scratch.rename(folder)
        return folder

    return get


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a state folder of the test's own; published wheels and facts come from the shared cache."""
    folder = tmp_path / "home"
    (folder / "cache").mkdir(parents=True)
    for name in ("wheels", "facts"):  # facts are keyed by hashes of file and rules: sharing them changes no answer
        (SHARED / name).mkdir(parents=True, exist_ok=True)
        (folder / "cache" / name).symlink_to(SHARED / name)
    monkeypatch.setenv("DDAUDIT_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("DDAUDIT_STATE_DIR", str(folder / "state"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return folder


@dataclass
class Sshd:
    """A running OpenSSH server on 127.0.0.1. ``options`` are what ddaudit needs to reach it."""

    folder: Path
    port: int
    user: str = field(default_factory=getpass.getuser)
    process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"{self.user}@127.0.0.1:{self.port}"

    @property
    def key(self) -> Path:
        return self.folder / "user_key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def options(self) -> list[str]:
        return ["--ssh-config", str(self.config)]

    @property
    def fingerprint(self) -> str:
        shown = subprocess.run(
            ["ssh-keygen", "-lf", str(self.folder / "host_key.pub")], capture_output=True, text=True, check=True
        )
        return shown.stdout.split()[1]

    def start(self, *lines: str) -> None:
        """Start, or start again with these lines added to sshd_config."""
        self.stop()
        config = f"""
Port {self.port}
ListenAddress 127.0.0.1
HostKey {self.folder}/host_key
PidFile {self.folder}/pid
AuthorizedKeysFile {self.folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
MaxSessions 100
LogLevel VERBOSE
"""
        (self.folder / "sshd_config").write_text("\n".join((config, *lines)) + "\n")
        log = (self.folder / "sshd.log").open("ab")
        self.process = subprocess.Popen(
            [_sshd(), "-D", "-e", "-f", str(self.folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as link:
                if link.recv(4) == b"SSH-":
                    return
            time.sleep(0.05)
        raise RuntimeError((self.folder / "sshd.log").read_text())

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def knows(self, name: str = "") -> None:
        """Write known_hosts: the host's key under its own name, or under ``name``."""
        public = (self.folder / "host_key.pub").read_text().split()
        self.known_hosts.write_text(f"{name or f'[127.0.0.1]:{self.port}'} {public[0]} {public[1]}\n")


def _sshd() -> str:
    found = shutil.which("sshd", path=f"/usr/sbin:/usr/local/sbin:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.fail("these tests need OpenSSH's sshd: `make test` installs it, or apt-get install openssh-server")
    return found


def make_sshd(folder: Path) -> Sshd:
    """Keys, configuration and a free port; not started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)], check=True
        )
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    server = Sshd(folder, port)
    lines = [f"IdentityFile {server.key}", f"UserKnownHostsFile {server.known_hosts}", "GlobalKnownHostsFile none"]
    server.config.write_text("\n  ".join(["Host *", *lines, "IdentityAgent none"]) + "\n")
    server.knows()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd, as root, wants to chroot before login
    return server


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    server = make_sshd(folder)
    server.start()
    yield server
    server.stop()


def make_venv(folder: Path, tree: Path) -> Path:
    """A virtual environment with ``tree`` in its site-packages. Files are linked: change one by replacing it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site_packages = next(folder.glob("lib/python3*/site-packages"))
    for entry in tree.iterdir():
        if entry.is_dir():
            shutil.copytree(entry, site_packages / entry.name, copy_function=os.link)
    return folder


@pytest.fixture
def venv(tmp_path: Path, wheel_tree: Callable[[str], Path]) -> Path:
    """A virtual environment with vLLM 0.20.2 in it."""
    return make_venv(tmp_path / "ml-env", wheel_tree("0.20.2"))
