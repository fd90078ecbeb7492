"""What the user's ssh configuration says about a host: asked of ``ssh -G`` (Include, Match, canonical names and
all), else of paramiko."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from audit_cli.errors import host


@dataclass(frozen=True)
class Settings:
    """``key_name``: the name that known_hosts is asked for (HostKeyAlias, else the host's)."""

    host: str
    port: int
    user: str
    key_name: str
    identities: tuple[Path, ...]
    identities_only: bool
    known_hosts: tuple[Path, ...]
    proxy_jump: str
    proxy_command: str
    agent: str


def settings(name: str, user: str = "", port: int = 0, config: str = "", identity: str = "") -> Settings:
    """Raises DdauditError when the configuration can't be read."""
    values = _ask_ssh(name, user, port, config) if shutil.which("ssh") else _ask_paramiko(name, config)
    return _settings(name, user, port, identity, values)


def _ask_ssh(name: str, user: str, port: int, config: str) -> dict[str, list[str]]:
    command = [
        "ssh",
        "-G",
        *(["-F", config] if config else []),
        *(["-l", user] if user else []),
        *(["-p", str(port)] if port else []),
    ]
    try:
        result = subprocess.run(
            [*command, "--", name], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise host(
            "ssh-config", "the ssh configuration could not be read", str(error), "look at what `ssh -G HOST` says"
        ) from None
    if result.returncode != 0:
        said = (result.stderr.strip().splitlines() or ["ssh -G failed"])[-1]
        raise host("ssh-config", f"ssh refuses {name}", said, "look at what `ssh -G HOST` says")
    values: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return values


def _ask_paramiko(name: str, config: str) -> dict[str, list[str]]:
    import paramiko

    path = Path(config).expanduser() if config else Path.home() / ".ssh" / "config"
    if not path.exists():
        return {}
    found: Mapping[str, object] = paramiko.SSHConfig.from_path(str(path)).lookup(name)
    return {
        key: [str(item) for item in value] if isinstance(value, list) else [str(value)] for key, value in found.items()
    }


def _settings(name: str, user: str, port: int, identity: str, values: Mapping[str, Sequence[str]]) -> Settings:
    def one(key: str, default: str = "") -> str:
        value = (values.get(key) or [default])[0]
        return "" if value.lower() == "none" else value

    def paths(key: str, default: str) -> tuple[Path, ...]:
        return tuple(Path(word).expanduser() for word in one(key, default).split())

    given = [Path(identity).expanduser()] if identity else []
    configured = [Path(text).expanduser() for text in values.get("identityfile", ()) if text.lower() != "none"]
    if not values.get("identityfile"):
        configured = [Path.home() / ".ssh" / f"id_{kind}" for kind in ("ed25519", "ecdsa", "rsa")]
    return Settings(
        host=one("hostname", name) or name,
        port=port or int(one("port", "22") or 22),
        user=user or one("user") or os.environ.get("USER") or os.environ.get("LOGNAME") or "root",
        key_name=one("hostkeyalias"),
        identities=tuple(dict.fromkeys([*given, *configured])),
        identities_only=one("identitiesonly") == "yes" or bool(identity),
        known_hosts=(
            *paths("userknownhostsfile", "~/.ssh/known_hosts"),
            *paths("globalknownhostsfile", "/etc/ssh/ssh_known_hosts"),
        ),
        proxy_jump=one("proxyjump"),
        proxy_command=one("proxycommand"),
        agent=one("identityagent", "SSH_AUTH_SOCK"),
    )
