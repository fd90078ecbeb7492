"""What the user sees while a scan runs: on stderr, so that stdout holds the report and nothing else."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from audit_cli.errors import DdauditError


class Console:
    """Plain lines; a progress line that is redrawn when stderr is a terminal. ``verbose``: 1 says what is run where,
    2 adds tracebacks."""

    def __init__(self, verbose: int = 0, quiet: bool = False) -> None:
        self.verbose, self.quiet = verbose, quiet
        self.tty = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.tty and not os.environ.get("NO_COLOR")
        self._live: Any = None
        self._phase, self._since = "", 0.0

    def say(self, text: str) -> None:
        if not self.quiet:
            self._clear()
            print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        if self.verbose:
            self.say(text)

    def warn(self, text: str) -> None:
        self._clear()
        print(self._paint("warning: ", "33") + text, file=sys.stderr, flush=True)

    def phase(self, name: str) -> None:
        """Begin a step. Without a terminal each step leaves one line, with its seconds, when the next one begins."""
        self.end_phase()
        name = one_line(name)
        self._phase, self._since = name, time.monotonic()
        if self.tty and not self.quiet:
            self._draw(f"{name} …")

    def progress(self, done: int, total: int) -> None:
        if self.tty and not self.quiet and total:
            self._draw(f"{self._phase} {done:,}/{total:,}")

    def end_phase(self) -> None:
        seconds = time.monotonic() - self._since
        if self._phase and not self.quiet and not self.tty and (seconds > 0.2 or self.verbose):
            print(f"{self._phase}: {seconds:.1f} s", file=sys.stderr, flush=True)
        self._clear()
        self._phase = ""

    def error(self, error: DdauditError) -> None:
        """One line what, one line why, one line what to try."""
        from audit_cli.inventory import shown

        self._clear()
        print(self._paint("error: ", "1;31") + one_line(error.what), file=sys.stderr)
        if error.why:
            print(f"  why: {one_line(error.why)}", file=sys.stderr)
        for line in error.picture:
            print(f"       {shown(line)}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)

    def _draw(self, text: str) -> None:
        if self._live is None:
            from rich.console import Console as Rich
            from rich.live import Live
            from rich.text import Text

            # NO_COLOR means no bold and no dim either
            rich = Rich(stderr=True, color_system="auto" if self.colour else None)
            self._text = Text
            self._live = Live(console=rich, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(self._text(text, style="dim"))

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def one_line(text: str) -> str:
    """Text that may come from a host, as one line that a terminal shows and does not obey."""
    from audit_cli.inventory import shown

    return shown(" ".join(text.split()))
