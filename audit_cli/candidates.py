"""Where vLLM may be on a host: a POSIX shell script that looks where people put environments, and nowhere else. It
reads names only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from audit_cli.errors import DdauditError, host
from audit_cli.inventory import shown
from audit_cli.refusals import refusal
from audit_cli.transport.base import Limits, Transport

_SCRIPT = r"""
export LC_ALL=C
look() { for d in "$1"/lib/python3*/site-packages "$1"/lib/python3*/dist-packages "$1"/lib/python3/dist-packages \
  "$1"/local/lib/python3*/dist-packages; do
  for m in "$d"/vllm-*.dist-info "$d"/vllm.egg-link "$d"/__editable__.vllm-*.pth; do
    [ -e "$m" ] && printf 'DDFOUND %s\t%s\n' "$1" "${m##*/}"
  done
done; }
for base in "$VIRTUAL_ENV" "$CONDA_PREFIX" "$HOME" "$HOME"/.[a-zA-Z]* /opt /srv /app /workspace /data /mnt /usr/local \
  /usr /root /home/*; do
  [ -d "$base" ] || continue
  for venv in "$base" "$base"/*env* "$base"/*/.venv "$base"/*/venv "$base"/*/env \
    "$base"/envs/* "$base"/*/envs/* "$base"/*/*env*; do
    [ -d "$venv/lib" ] && look "$venv"
  done
done
exit 0
"""


@dataclass(frozen=True)
class Candidate:
    """``prefix`` holds bin/python; ``version`` is what the metadata folder's name says ("editable" when it doesn't)."""

    prefix: str
    version: str


def find(transport: Transport) -> list[Candidate]:
    """Environments with a vLLM, each once."""
    result = transport.run(["sh", "-s"], _SCRIPT.encode() + b"\nexit 0\n", Limits(idle=20, total=30, max_bytes=1 << 20))
    refused = refusal(result, transport.name)
    if refused is not None:
        raise refused
    found = {}
    for line in result.out.decode("utf-8", "surrogateescape").splitlines():
        match = re.fullmatch(r"DDFOUND (/[^\t]*)\t(.*)", line)
        if match:
            version = re.sub(r"^(vllm-|__editable__\.vllm-)|(\.dist-info|\.pth)$", "", match[2])
            found[match[1]] = Candidate(match[1], "editable" if version == "vllm.egg-link" else shown(version))
    return sorted(found.values(), key=lambda c: c.prefix)[:50]


def only_one(transport: Transport, hint: str) -> Candidate:
    """The only candidate. Raises DdauditError when there is none or a choice."""
    found = find(transport)
    if len(found) == 1:
        return found[0]
    if not found:
        raise host(
            "no-vllm",
            f"no vLLM was found on {transport.name}",
            "none in the places where environments usually are",
            hint,
        )
    raise choice(transport.name, found)


def choice(name: str, found: list[Candidate]) -> DdauditError:
    listed = "; ".join(f"{shown(c.prefix)} (vLLM {c.version})" for c in found)
    return host(
        "which-venv",
        f"{len(found)} environments with vLLM on {name}",
        listed,
        f"choose one: --venv {shown(found[0].prefix)}",
    )
