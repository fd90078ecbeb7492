"""How long one file may take: a scan must not stall on a file that somebody generated."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SECONDS = 20.0  # of CPU for one question about one file; the slowest file of a release takes half a second


class TookTooLongError(Exception):
    """Raised inside the code that is timed."""


@contextlib.contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raises TookTooLongError in the block after so many seconds of CPU. Only a main thread can be interrupted
    (and only where the system has such a timer): elsewhere the block runs on."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"took more than {seconds:.0f} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
