"""Reachability beside acceptance: from the drafters that runners construct, and from the modules that anything
names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from rules.base import Context
from rules.resolver import Key, Reached
from rules.slice import from_drafters
from rules.tree import SourceFile

if TYPE_CHECKING:
    from rules.context import ScanContext


def reached_by_drafters(ctx: Context) -> dict[Key, Reached]:
    """Functions that the drafters of the runners can reach."""
    return from_drafters(cast("ScanContext", ctx))


def lines_of(ctx: Context, file: SourceFile) -> list[str]:
    """The lines of a file; none when its bytes can't be had."""
    return cast("ScanContext", ctx).lines(file)


def named_by(ctx: Context, path: str) -> tuple[str, str]:
    """(file, registered name) of a file that imports this one or names it as a dotted path; ("", "") when none does.
    The registered name
    is what a registry calls it (NAME = "pkg.module.Class")."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, last = module.rpartition(".")
    registered = re.compile(rb"(\w+)\s*[=:(]\s*\(?\s*[\"']" + re.escape(module).encode() + rb"[.:]")
    found = ""
    for file in ctx.tree.files:
        if file.path == path:
            continue
        try:
            text = ctx.tree.read(file.sha256)
        except OSError:
            continue
        if module.encode() in text:
            match = registered.search(text)
            if match:
                return file.path, match[1].decode()
            found = found or file.path
        elif f"from {parent} import".encode() in text and last.encode() in text:
            found = found or file.path
    return found, ""
