"""SSH with paramiko: the host key checked before anything is sent, one channel per command, both outputs drained
within deadlines."""

from __future__ import annotations

import contextlib
import getpass
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko

from audit_cli.errors import DdauditError, host
from audit_cli.transport import knownhosts
from audit_cli.transport.base import LOST, MAX_ERR, Limits, Result, Sink
from audit_cli.transport.sshconfig import Settings, settings

if TYPE_CHECKING:
    from audit_cli.console import Console
    from audit_cli.opening import Options
    from audit_cli.targets import Spec

CONNECT, BANNER, AUTH, CHANNEL = 10.0, 15.0, 30.0, 15.0
_WINDOW = 16 << 20
_JUMPS = 8


class Ssh:
    """A connection. ``host_key`` is the fingerprint that was accepted and why."""

    def __init__(self, spec: Spec, options: Options, console: Console) -> None:
        import logging

        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # its errors reach the user as ours
        self._options, self._console = options, console
        self._links: list[Any] = []
        wanted = settings(spec.host, spec.user, spec.port, options.ssh_config, options.identity)
        self.name = spec.text
        self.host_key = ""
        try:
            self._transport = self._connect(wanted, 0)
        except BaseException:
            self.close()
            raise

    def _connect(self, wanted: Settings, depth: int) -> paramiko.Transport:
        console, name = self._console, f"{wanted.user}@{wanted.host}:{wanted.port}"
        console.phase(f"Connecting to {wanted.host}")
        sock = self._socket(wanted, depth)
        try:
            transport = paramiko.Transport(sock, default_window_size=_WINDOW)
            self._links.append(transport)
            entries = knownhosts.read(wanted.known_hosts)
            key_name = wanted.key_name or knownhosts.lookup_name(wanted.host, wanted.port)
            _prefer(transport, knownhosts.kinds(entries, key_name))
            transport.banner_timeout, transport.auth_timeout, transport.channel_timeout = BANNER, AUTH, CHANNEL
            transport.start_client(timeout=BANNER)
            key = transport.get_remote_server_key()  # start_client returns without one when its time is up
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise _no_session(name, error) from None
        self._check_key(entries, key_name, key, wanted)
        try:
            self._authenticate(transport, wanted)
        except (OSError, EOFError) as error:
            raise host("lost", f"{name} hung up during login", str(error) or "no reason given", "try again") from None
        transport.set_keepalive(15)
        return transport

    def _socket(self, wanted: Settings, depth: int) -> Any:
        if depth > _JUMPS:
            raise host("ssh-config", "too many jump hosts", f"more than {_JUMPS}", "does ProxyJump lead in a circle?")
        if wanted.proxy_jump:
            return self._through(wanted, depth)
        if wanted.proxy_command:
            link = paramiko.ProxyCommand(wanted.proxy_command)
            self._links.append(link)
            return link
        try:
            sock = socket.create_connection((wanted.host, wanted.port), CONNECT)
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            hint = "check the name, the port and that sshd runs there: `ssh -v` shows each step"
            raise host("no-connection", f"can't connect to {wanted.host} port {wanted.port}", why, hint) from None
        self._links.append(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _through(self, wanted: Settings, depth: int) -> Any:
        first, _, last = wanted.proxy_jump.rpartition(",")
        user, _, place = last.removeprefix("ssh://").rpartition("@")
        name, _, port = place.partition(":") if place.count(":") == 1 else (place.strip("[]"), "", "")
        jump = settings(name, user, int(port or 0), self._options.ssh_config, "")
        if first:
            jump = Settings(**{**jump.__dict__, "proxy_jump": first})
        transport = self._connect(jump, depth + 1)
        try:
            return transport.open_channel("direct-tcpip", (wanted.host, wanted.port), ("127.0.0.1", 0), timeout=CHANNEL)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise host(
                "no-connection",
                f"{jump.host} does not reach {wanted.host}:{wanted.port}",
                str(error),
                "can it, with `ssh -W`?",
            ) from None

    def _check_key(self, entries: Sequence[knownhosts.Entry], name: str, key: paramiko.PKey, wanted: Settings) -> None:
        blob = key.asbytes()
        seen = knownhosts.fingerprint(blob)
        state, where = knownhosts.check(entries, name, blob)
        if state == "known":
            self.host_key = f"{seen} ({key.get_name()}, {where})"
            return
        if state == "revoked":
            raise host(
                "revoked-key",
                f"the key of {name} is revoked",
                f"{seen}, by {where}",
                "do not connect; ask who runs the host",
            )
        if state == "changed":
            why = f"it shows {key.get_name()} {seen}, {where} has another"
            hint = f"if the host was set up anew, `ssh-keygen -R '{name}'`; if not, someone may be listening"
            raise host("changed-key", f"the key of {name} has changed", why, hint)
        accepted = self._options.fingerprint
        if accepted and accepted.removeprefix("SHA256:").rstrip("=") == seen.removeprefix("SHA256:"):
            self.host_key = f"{seen} ({key.get_name()}, accepted with --host-key)"
            return
        if accepted:
            raise host(
                "wrong-key",
                f"{name} shows another key than the one accepted",
                f"{key.get_name()} {seen}",
                "compare it with the host's own: `ssh-keygen -lf /etc/ssh/ssh_host_*.pub`",
            )
        why = f"its {key.get_name()} key {seen} is in none of {', '.join(str(path) for path in wanted.known_hosts)}"
        raise host(
            "unknown-host",
            f"the host key of {name} is not known",
            why,
            f"compare the fingerprint with the host's, then --host-key {seen}",
        )

    def _authenticate(self, transport: paramiko.Transport, wanted: Settings) -> None:
        tried: list[str] = []
        why = ""
        for label, key in self._keys(wanted):
            if isinstance(key, str):
                tried.append(f"{label} ({key})")
                continue
            try:
                transport.auth_publickey(wanted.user, key)
                if transport.is_authenticated():
                    self._console.detail(f"logged in to {wanted.host} with {label}")
                    return
            except paramiko.BadAuthenticationType as error:
                why = f"the host takes {', '.join(error.allowed_types)} only"
                break
            except paramiko.SSHException as error:
                if not transport.is_active():
                    why = f"the host hung up: {error}"
                    break
            tried.append(label)
        if transport.is_active() and self._by_password(transport, wanted):
            return
        why = f"{why + '; ' if why else ''}keys tried: {', '.join(tried) or 'none was found'}"
        raise host(
            "refused",
            f"{wanted.user}@{wanted.host} does not let us in",
            why,
            "give a key with -i FILE, load it into the agent, or check the user",
        )

    def _keys(self, wanted: Settings) -> Any:
        """(label, key or why it can't be used): the files named, then the agent's, then the usual files. Six tries
        is what a server grants."""
        seen = set()
        files = [path for path in wanted.identities if path.is_file()]
        agent_keys: list[Any] = []
        if wanted.agent:
            try:
                agent_keys = list(paramiko.Agent().get_keys())
            except (paramiko.SSHException, OSError):
                agent_keys = []
        for path in files:
            label = str(path)
            try:
                key = paramiko.PKey.from_path(path)
            except paramiko.PasswordRequiredException:
                public = _public_blob(path)
                held = [key for key in agent_keys if key.asbytes() == public]
                if not held:
                    yield label, "it has a passphrase, and the agent does not hold it"
                    continue
                key = held[0]
            except Exception as error:  # cryptography raises what it likes on a file that is no key
                yield label, f"not a usable key: {str(error)[:80]}"
                continue
            seen.add(key.asbytes())
            yield label, key
        if not wanted.identities_only:
            for key in agent_keys:
                if key.asbytes() not in seen:
                    yield f"agent key {key.get_name()} {knownhosts.fingerprint(key.asbytes())[:18]}…", key

    def _by_password(self, transport: paramiko.Transport, wanted: Settings) -> bool:
        """Ask for a password, on a terminal only, once the host has said that it takes one."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        try:
            transport.auth_none(wanted.user)
            return transport.is_authenticated()
        except paramiko.BadAuthenticationType as error:
            if "password" not in error.allowed_types:
                return False
        except paramiko.SSHException:
            return False
        self._console.end_phase()
        try:
            transport.auth_password(
                wanted.user, getpass.getpass(f"password of {wanted.user}@{wanted.host}: ", sys.stderr)
            )
        except paramiko.SSHException:
            return False
        return transport.is_authenticated()

    def run(
        self, argv: Sequence[str], stdin: bytes = b"", limits: Limits = Limits(), sink: Sink | None = None
    ) -> Result:
        from audit_cli.hosts import inside

        # The login shell may be fish or csh: all that it has to understand is one quoted word.
        command = "exec /bin/sh -c " + shlex.quote("exec " + shlex.join(inside(argv, self._options)))
        try:
            channel = self._transport.open_session(window_size=_WINDOW, timeout=CHANNEL)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise host(
                "lost",
                f"the link to {self.name} was lost",
                str(error) or "it was closed",
                "try again: what arrived is kept",
            ) from None
        try:
            channel.settimeout(CHANNEL)
            channel.exec_command(command)
            return _pump(channel, stdin, limits, sink)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise host(
                "lost",
                f"the link to {self.name} was lost",
                str(error) or "it was closed",
                "try again: what arrived is kept",
            ) from None
        finally:
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):  # a lost link can't be told
                channel.close()

    def close(self) -> None:
        for link in reversed(self._links):
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                link.close()
        self._links.clear()


def _pump(channel: paramiko.Channel, stdin: bytes, limits: Limits, sink: Sink | None) -> Result:
    """Send and drain until the command has ended: reading one output to its end first would block on the other (one
    window for both)."""
    out, err, taken, stopped = bytearray(), bytearray(), 0, ""
    rest = memoryview(stdin)
    start = heard = time.monotonic()
    channel.settimeout(0.0)
    while True:
        moved = False
        if rest and channel.send_ready():
            sent = channel.send(rest[: 1 << 15].tobytes())
            rest = rest[sent:]
            moved = sent > 0
            heard = time.monotonic()
        while channel.recv_ready():
            block = channel.recv(1 << 20)
            moved = True
            taken += len(block)
            if sink is not None:
                sink(block)
            else:
                out += block
            if taken > limits.max_bytes:
                break
        if channel.recv_stderr_ready():
            err = (err + channel.recv_stderr(1 << 18))[-MAX_ERR:]
            moved = True
        now = time.monotonic()
        if moved:
            heard = now
        if taken > limits.max_bytes:
            stopped = "bytes"
        elif now - start > limits.total:
            stopped = "total"
        elif now - heard > limits.idle:
            stopped = "idle"
        if stopped:
            return Result(LOST, bytes(out), bytes(err), stopped)
        if moved:
            continue
        if channel.eof_received and not channel.recv_ready() and not channel.recv_stderr_ready():
            break
        if channel.closed:
            break
        _wait(channel, bool(rest))
    channel.status_event.wait(5)
    code = channel.exit_status if channel.status_event.is_set() else LOST
    return Result(code, bytes(out), bytes(err))


def _wait(channel: paramiko.Channel, sending: bool) -> None:
    """Until there is something to read (or room to send), at most half a second."""
    deadline = time.monotonic() + 0.5
    pause = 0.0005
    while time.monotonic() < deadline:
        if channel.recv_ready() or channel.recv_stderr_ready() or channel.eof_received or channel.closed:
            return
        if sending and channel.send_ready():
            return
        time.sleep(pause)
        pause = min(0.01, pause * 1.5)


def _prefer(transport: paramiko.Transport, known: Sequence[str]) -> None:
    """Ask the server for a key of a type that known_hosts has, as ssh does: it may own several."""
    options = transport.get_security_options()
    wanted = [
        kind for kind in options.key_types if kind in known or (kind.startswith("rsa-sha2") and "ssh-rsa" in known)
    ]
    if wanted:
        options.key_types = [*wanted, *(kind for kind in options.key_types if kind not in wanted)]


def _public_blob(path: Path) -> bytes:
    import base64

    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return b""


def _no_session(name: str, error: Exception) -> DdauditError:
    why = str(error) or "the host hung up"
    if why == "No existing session":
        why = f"it said nothing for {BANNER:.0f} s"
    hint = "is it an ssh server? `ssh -v` shows each step"
    if "kex" in why or "no acceptable" in why.lower():
        hint = "its algorithms are too old for paramiko: try --ssh-backend openssh"
    return host("no-session", f"no SSH session with {name}", why[:200], hint)
