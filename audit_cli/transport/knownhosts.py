"""known_hosts as OpenSSH reads it (sshd(8)): hashed names, patterns, @revoked and @cert-authority; a bad line costs
that line only.

paramiko's own reader gives up on the whole file at the first line that it does not know, and never honours @revoked.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Entry:
    """One line: ``names`` as written, key type and key blob."""

    marker: str
    names: str
    kind: str
    blob: bytes
    where: str


def read(paths: Iterable[Path]) -> list[Entry]:
    """The entries of these files that can be understood; files that aren't there are empty."""
    entries = []
    for path in paths:
        try:
            lines = path.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or words[0].startswith("#"):
                continue
            try:
                blob = base64.b64decode(words[2], validate=True)
            except (binascii.Error, ValueError):
                continue
            entries.append(Entry(marker, words[0], words[1], blob, f"{path}:{number}"))
    return entries


def lookup_name(host: str, port: int) -> str:
    return host if port == 22 else f"[{host}]:{port}"


def matches(entry: Entry, name: str) -> bool:
    """Whether the entry is for ``name`` (as ``lookup_name`` gives it)."""
    if entry.names.startswith("|1|"):
        try:
            _, _, salt, digest = entry.names.split("|")
            made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except (ValueError, binascii.Error):
            return False
    hit = False
    for pattern in entry.names.lower().split(","):
        bare = pattern.removeprefix("!")
        # fnmatch reads [ as a set, ssh does not
        if fnmatch.fnmatchcase(name.lower(), bare.replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


def kinds(entries: Sequence[Entry], name: str) -> list[str]:
    """The key types known for ``name``, to ask the server for one of them."""
    return list(dict.fromkeys(e.kind for e in entries if not e.marker and matches(e, name)))


def check(
    entries: Sequence[Entry], name: str, blob: bytes
) -> tuple[Literal["known", "unknown", "changed", "revoked"], str]:
    """What known_hosts says of this key for this name, and the line that says it."""
    mine = [entry for entry in entries if matches(entry, name)]
    for entry in mine:
        if entry.marker == "@revoked" and entry.blob == blob:
            return "revoked", entry.where
    plain = [entry for entry in mine if not entry.marker]
    for entry in plain:
        if entry.blob == blob:
            return "known", entry.where
    if plain:
        return "changed", plain[0].where
    return "unknown", ""


def fingerprint(blob: bytes) -> str:
    """As ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
