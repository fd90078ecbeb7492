"""What stands between us and a Python there (the system's ssh, sudo, docker), from what it says on standard error.

The wordings are those of OpenSSH 8 to 10, sudo 1.9, docker and podman."""

from __future__ import annotations

import re

from audit_cli.errors import DdauditError, host
from audit_cli.inventory import shown
from audit_cli.transport.base import Result

#: (pattern, code, what happened with {name} of the target, what to try); the line that it is in is the why.
_SAID = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "changed-key",
        "the key of {name} has changed",
        "if the host was set up anew, remove the old key with `ssh-keygen -R`; if not, someone may be listening",
    ),
    (
        r"REVOKED HOST KEY DETECTED",
        "revoked-key",
        "the key of {name} is revoked",
        "do not connect; ask who runs the host",
    ),
    (
        r"^No .*host key is known for|^Host key verification failed",
        "unknown-host",
        "{name} is not known here",
        "log in once with `ssh`, which shows the fingerprint and asks; or leave --ssh-backend openssh out: then"
        " --host-key SHA256:... accepts a key for one run",
    ),
    (
        r"Permission denied \((publickey|password|keyboard|gssapi|hostbased|none)",
        "refused",
        "{name} does not let us in",
        "name the key with -i, or load it into the agent; `ssh -v` shows each step",
    ),
    (
        r"^ssh: |: Connection (refused|timed out)",
        "no-connection",
        "can't connect to {name}",
        "check the name, the port and that sshd runs there: `ssh -v` shows each step",
    ),
    (
        r"^sudo: |\bsudo: .*not found",
        "no-sudo",
        "sudo does not work on {name}",
        "leave --sudo out, or allow the user to run it without a password (sudo -n)",
    ),
    (
        r"\b(docker|podman): .*not found",
        "no-container",
        "there is no such container program on {name}",
        "leave --container out, or say --container podman:NAME",
    ),
    (
        r"No such container|no container with name|is not running|Cannot connect to the Docker daemon|"
        r"permission denied while trying to connect to the [Dd]ocker",
        "no-container",
        "the container on {name} can't be entered",
        "`docker ps` there lists what runs; --sudo may be needed",
    ),
)


def refusal(result: Result, name: str) -> DdauditError | None:
    """The error of a command that never reached the Python there, or None when it is another's."""
    if not result.code:
        return None
    text = result.err.decode("utf-8", "backslashreplace")
    said = text.splitlines()
    for pattern, code, what, hint in _SAID:
        line = next(filter(re.compile(pattern).search, said), None)
        if line is not None:
            seen = (
                re.search(r"SHA256:[A-Za-z0-9+/]{43}", text) if code.endswith("-key") else None
            )  # a changed one is shown
            listed = re.search(r"Offending .*", text)
            why = f"it shows {seen[0]}; {listed[0] if listed else 'another is known'}" if seen else line
            return host(code, what.format(name=name), shown(why.strip())[:300], hint)
    return None
