"""Commands that a sceptical person runs in site-packages to see the evidence itself, without this tool, and what they
print.

Only ``sh``, ``sed``, ``grep``, ``sha256sum`` and a stock ``python3``. Every word that comes from the install is
quoted, and what a command prints is worked out here from the same bytes, so that a test can run the command and
compare.
"""

from __future__ import annotations

import shlex
from typing import Any

from rules.base import Context
from rules.tree import SourceFile

_SHORT = 4000  # characters: what a person still reads


class Recheck:
    """Collects commands and what they print. ``done()`` gives the two fields of a Verdict.

    >>> check = Recheck(ctx)
    >>> check.lines(file, 10, 12)          # prints these lines
    >>> check.count(file, "layer_types")   # prints how many lines hold the word
    >>> Verdict(..., **check.done())
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._commands: list[str] = []
        self._prints: list[str] = []
        self._known = True

    def lines(self, file: SourceFile, line: int, end_line: int) -> Recheck:
        """``sed -n``: the lines of one place."""
        text = self._text(file)
        self._commands.append(f"sed -n {line},{end_line}p {self._path(file)}")
        self._prints.append("".join(f"{row}\n" for row in text.split("\n")[line - 1 : end_line]))
        return self

    def count(self, file: SourceFile, literal: str) -> Recheck:
        """``grep -c -F``: on how many lines of a file a text stands (0 is an answer, so the exit status is dropped)."""
        hits = sum(literal in row for row in self._text(file).split("\n"))
        self._commands.append(f"{{ grep -c -F -e {quote(literal)} {self._path(file)} || :; }}")
        self._prints.append(f"{hits}\n")
        return self

    def digest(self, file: SourceFile) -> Recheck:
        """``sha256sum`` of one file."""
        self._commands.append(f"sha256sum {self._path(file)}")
        self._prints.append(f"{file.sha256}  {file.path}\n")
        return self

    def python(self, script: str, *arguments: str, prints: str | None = None) -> Recheck:
        """``python3 -I -c``: a script on the standard library; ``prints`` is None when what it prints can't be known
        here."""
        words = " ".join(quote(word) for word in arguments)
        self._commands.append(f"python3 -I -c {quote(script)} {words}".rstrip())
        self._prints.append(prints or "")
        self._known = self._known and prints is not None
        return self

    def shell(self, command: str, prints: str | None = None) -> Recheck:
        """Any other POSIX command; quote what comes from the install with ``quote``."""
        self._commands.append(command)
        self._prints.append(prints or "")
        self._known = self._known and prints is not None
        return self

    def done(self) -> dict[str, Any]:
        """``recheck`` and ``recheck_expect`` (empty when it is long or not known beforehand)."""
        printed = "".join(self._prints)
        return {
            "recheck": "; ".join(self._commands),
            "recheck_expect": printed if self._known and len(printed) <= _SHORT else "",
        }

    def _text(self, file: SourceFile) -> str:
        try:
            return self._ctx.tree.read(file.sha256).decode("utf-8", "replace")
        except OSError:
            self._known = False
            return ""

    def _path(self, file: SourceFile) -> str:
        # A file of a --pythonpath folder is not under site-packages: the command then needs that folder as its
        # working directory.
        if file.origin.startswith("pythonpath:"):
            self._known = False
        return quote(f"./{file.path}" if file.path.startswith("-") else file.path)


def quote(word: str) -> str:
    """One word for ``sh``."""
    return shlex.quote(word)
