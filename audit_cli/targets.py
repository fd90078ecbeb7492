"""What the user may name as a target."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from audit_cli.errors import usage

Kind = Literal["ssh", "local", "pypi", "wheel", "dir"]
_HOST = re.compile(
    r"(?:(?P<user>[^@\s:/]+)@)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Spec:
    """A target as written. ``what``: a release, a file or a folder; user, host and port for ``ssh``."""

    text: str
    kind: Kind
    what: str = ""
    user: str = ""
    host: str = ""
    port: int = 0


def parse(text: str) -> Spec:
    """Raises DdauditError (exit 2) when ``text`` is no target."""
    if text == "local":
        return Spec(text, "local")
    kind, colon, rest = text.partition(":")
    if colon and kind in ("pypi", "wheel", "dir"):
        if not rest:
            raise usage(
                f"{text} names nothing",
                f"{kind}: is followed by what to look at",
                {"pypi": "pypi:vllm==0.33.0", "wheel": "give wheel:FILE", "dir": "give dir:SITE_PACKAGES"}[kind],
            )
        return Spec(text, kind, rest)  # type: ignore[arg-type]
    match = _HOST.fullmatch(text)
    if match is None or Path(text).exists():
        hint = "targets are user@host[:port], an ssh alias, local, pypi:vllm==VERSION, wheel:FILE, dir:FOLDER"
        if Path(text).exists():
            hint = f"did you mean {'wheel' if text.endswith('.whl') else 'dir'}:{text}?"
        raise usage(
            f"{text[:200]} is not a target",
            "it is a path" if Path(text).exists() else "it has none of the forms of a target",
            hint,
        )
    port = int(match["port"] or 0)
    if port > 65535:
        raise usage(f"{text} is not a target", f"there is no port {port}", "ports end at 65535")
    return Spec(text, "ssh", "", match["user"] or "", match["host"].strip("[]"), port)
