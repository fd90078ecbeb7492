"""The system's ssh as the way to a host: all that it can (FIDO keys, GSSAPI, certificates, ControlMaster), with its
own checks of the host key."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from audit_cli.transport.pipe import Pipe

if TYPE_CHECKING:
    from audit_cli.opening import Options
    from audit_cli.targets import Spec


def openssh(spec: Spec, options: Options) -> Pipe:
    """Runs each command as ``ssh -T -o BatchMode=yes``: nothing is asked, unknown host keys are refused."""
    from audit_cli.hosts import inside

    command = [
        "ssh",
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "ServerAliveInterval=15",
    ]
    command += ["-F", options.ssh_config] if options.ssh_config else []
    command += ["-i", options.identity, "-o", "IdentitiesOnly=yes"] if options.identity else []
    command += ["-p", str(spec.port)] if spec.port else []
    command += ["-l", spec.user] if spec.user else []

    def wrap(argv: Sequence[str]) -> list[str]:
        return [
            *command,
            "--",
            spec.host,
            "exec /bin/sh -c " + shlex.quote("exec " + shlex.join(inside(argv, options))),
        ]

    return Pipe(spec.text, wrap)
