"""Text from a host, made safe to print: what an attacker or an accident puts into a file name must not become markup or
a terminal command."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Controls, and the Unicode that reorders or hides text. A tab and a newline are the business of each caller.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LINE_LIMIT = 400
COMMAND_LIMIT = 20_000  # a command that is cut can't be run
_CELL = 240  # characters of a summary that a table shows; the details have it all
_AGAIN = re.compile(r" \(([^()\s]+:\d+)\)(?=, [^(),;]* \(\1\))")
# What setuptools puts into every environment, word for word: anything else in a file of that name is shown.
_SETUPTOOLS = re.compile(
    r"(?<![\w./-])distutils-precedence\.pth: import os; var = 'SETUPTOOLS_USE_DISTUTILS'; "
    r"enabled = os\.environ\.get\(var, '(?:stdlib|local)'\) == 'local'; "
    r"enabled and __import__\('_distutils_hack'\)(?:\.add_shim\(\))?;?(?=; | \(and |$)"
)


def visible(text: str) -> str:
    """``text`` with every control, bidirectional and zero-width character spelled out (``\\x1b``); newlines and tabs
    stay.

    A byte that was not UTF-8 reaches us as a lone surrogate (PEP 383) and is shown as that byte: ``\\xff``.
    """
    return _HIDDEN.sub(lambda match: _spell(match.group()), text)


def one_line(text: str) -> str:
    """``visible`` on one line: newlines and tabs become spaces, runs of spaces one."""
    return " ".join(visible(text).split())


def brief(text: str) -> str:
    """A summary for a table: a place that is named several times in a row once, setuptools' own ``.pth`` by its name,
    and no more clauses than fit."""
    text = _AGAIN.sub("", _SETUPTOOLS.sub("distutils-precedence.pth (setuptools' own)", one_line(text)))
    if len(text) <= _CELL:
        return text
    kept, *rest = text.split("; ")
    while rest and len(kept) + len(rest[0]) <= _CELL:
        kept += f"; {rest.pop(0)}"
    return f"{kept}; … (all of it: see the details)" if rest and kept.count("`") % 2 == 0 else text


def prose(text: str) -> str:
    """A sentence as Markdown. What stands between a pair of backticks becomes a code span, other markup is escaped."""
    parts = one_line(text).split("`")
    if len(parts) % 2 == 0:  # an odd backtick: none of them is markup
        return _escape("`".join(parts))
    return "".join(code(part) if index % 2 else _escape(part) for index, part in enumerate(parts))


def code(text: str) -> str:
    """A code span around ``text``, whatever it holds. An empty text is shown as an em dash."""
    text = visible(text).replace("\n", "\\n").replace("\t", " ")
    if not text.strip():
        return "—"
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fence(text: str, language: str = "", limit: int = _LINE_LIMIT) -> str:
    """A fenced block around ``text``, whatever it holds; lines longer than ``limit`` are cut with a mark."""
    lines = [_cut(visible(line.removesuffix("\r")), limit) for line in text.removesuffix("\n").split("\n")]
    ticks = "`" * max(3, _longest_run("\n".join(lines)) + 1)
    return "\n".join([ticks + language, *lines, ticks])


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A GitHub table of cells that are Markdown already. A pipe is escaped here, in a code span too: GFM wants that."""
    lines = [_row(head), _row(("---",) * len(head)), *(_row(row) for row in rows)]
    return "\n".join(lines)


def fold(summary: str, body: str) -> str:
    """A folded block. ``summary`` is plain text, ``body`` Markdown."""
    return f"<details><summary>{html(summary)}</summary>\n\n{body}\n\n</details>"


def html(text: str) -> str:
    """``text`` on one line, as HTML text."""
    text = one_line(text)
    return _at(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "&#96;"))


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 file``, ``3,231 files``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def _spell(char: str) -> str:
    point = ord(char)
    if 0xDC80 <= point <= 0xDCFF:
        return f"\\x{point - 0xDC00:02x}"
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _escape(text: str) -> str:
    text = re.sub(r"([\\`*\[\]$~])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9_])", r"\\_", text)  # inside a word an underscore is no markup
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"^([#+\-=>]|\d+[.)](?=\s|$))", _first, text)
    return _at(text)


def _first(match: re.Match[str]) -> str:
    """The start of a line, so that it opens neither a heading nor a list."""
    text = match.group()
    return f"{text[:-1]}\\{text[-1]}"


def _at(text: str) -> str:
    return re.sub(r"(?<!\w)@(?=\w)", "&#64;", text)  # a mention would notify somebody


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else f"{line[:limit]} … ({len(line) - limit:,} more characters)"
