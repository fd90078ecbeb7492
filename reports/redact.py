"""An audit without the names of its host: for an issue, a vendor, a public place.

Taken out: host names, addresses and their ports, users, absolute paths of the host. Kept: what the answer rests on
(versions, hashes, file names below site-packages, source snippets, names of plugins). Read a redacted report before
publishing it: a snippet of a patched file is shown as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import Any

from reports.model import Audit, audit_from_json, to_json

# The user of a home folder: the name goes wherever else it stands, too.
_OWNER = re.compile(r"(?<![\w./~-])/(?:home|Users)/([A-Za-z_][\w.-]*[\w-])")
#: Names of accounts that are words of a report as well: they tell nothing, and to swap them would change answers.
_NO_NAME = frozenset(
    ("vllm", "root", "user", "ubuntu", "yes", "no", "unknown", "partial", "high", "medium", "low", "none")
    + ("chain", "tree", "native", "standalone", "retrain", "local", "ok", "failed")
)
# Folders that belong to a user or a site; /usr, /dev, /proc and the like are the same everywhere and stay.
_PATH = re.compile(
    r"(?<![\w./~-])/(?:home|root|Users|mnt|media|data|srv|opt|scratch|workspace|workspaces|nfs|shared)(?:/[^\s'\"`:;,)\]}]+)+"
)
_HOME = re.compile(r"(?<![\w./])~[\w-]*(?:/[\w.+-]+)+")
_ADDRESS = re.compile(
    r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
)

_PORT = re.compile(r"(?<=\bHOST):\d+\b|(?<=\bADDRESS):\d+\b")


def redact(audit: Audit) -> Audit:
    """The same audit with HOST, USER, PYTHON, SITE_PACKAGES, VENV and PATH in place of the host's own. Doing it twice
    changes nothing."""
    plain = to_json(audit)
    swaps = _swaps(audit, _owners(plain))

    def clean(text: str) -> str:
        for swap in swaps:
            text = swap(text)
        return text

    return audit_from_json(_map(plain, clean))


def _swaps(audit: Audit, owners: set[str]) -> list[Callable[[str], str]]:
    target = audit.target
    swaps: list[Callable[[str], str]] = []
    # The longest first: a folder's name is the start of the names in it.
    named = {
        target.site_packages: "SITE_PACKAGES",
        target.python: "PYTHON",
        _venv(target.python): "VENV",
    }
    if target.kind in ("wheel", "dir"):
        path = target.spec.split(":", 1)[-1]
        named[path] = "PATH"
    swaps += [
        _exactly(path, name)
        for path, name in sorted(named.items(), key=lambda p: -len(p[0]))
        if len(path) > 1 and path != name
    ]
    user, host = _user_and_host(audit)
    if user:
        swaps.append(lambda text: re.sub(rf"(?<![\w.-]){re.escape(user)}@", "USER@", text))
    for name in dict.fromkeys((host, target.host, host.split(".")[0])):
        if len(name) > 1 and name != "HOST":
            swaps.append(_word(name, "HOST"))
    # An account that was named with a path is then a user wherever the name stands alone.
    swaps += [_word(name, "USER") for name in sorted({*owners, user} - _NO_NAME - {""}, key=lambda n: (-len(n), n))]
    swaps += [
        lambda text: _PATH.sub("PATH", text),
        lambda text: _HOME.sub("PATH", text),
        lambda text: _ADDRESS.sub("ADDRESS", text),
        lambda text: _PORT.sub("", text),
    ]
    return swaps


def _owners(value: Any) -> set[str]:
    """The names of every home folder that the audit mentions, in values and in keys."""
    if isinstance(value, str):
        return set(_OWNER.findall(value))
    if isinstance(value, dict):
        return set().union(*map(_owners, value), *map(_owners, value.values()))
    return set().union(*map(_owners, value)) if isinstance(value, list) else set()


def _user_and_host(audit: Audit) -> tuple[str, str]:
    if audit.target.kind != "ssh":
        return "", ""
    user, _, host = audit.target.spec.rpartition("@")
    host = re.sub(r":\d+$", "", host).strip("[]")
    return ("" if user == "USER" else user), host


def _venv(python: str) -> str:
    folder = posixpath.dirname(python)
    return posixpath.dirname(folder) if posixpath.basename(folder) in ("bin", "Scripts") else ""


def _exactly(old: str, new: str) -> Callable[[str], str]:
    pattern = re.compile(rf"(?<![\w.-]){re.escape(old)}(?![\w-])")
    return lambda text: pattern.sub(new, text)


def _word(old: str, new: str) -> Callable[[str], str]:
    """A host may be called ``gpu``: part of a path or of a longer name is left alone."""
    pattern = re.compile(rf"(?<![\w./-]){re.escape(old)}(?![\w/-]|\.\w)")
    return lambda text: pattern.sub(new, text)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, dict):
        return _map_keys(value, change)
    return value


def _map_keys(record: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A key that is no plain word names a thing of the host (a disk by its mount point). Two keys that become one are
    numbered, not merged."""
    cleaned: dict[str, Any] = {}
    for key, item in record.items():
        name = new = key if key.isidentifier() else change(key)
        while new in cleaned:
            new = f"{name}-{int(new[len(name) + 1 :] or 1) + 1}"
        cleaned[new] = _map(item, change)
    return cleaned
