"""A folder that can't be written, in words: what it is for, and the variable that moves it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from audit_cli.errors import DdauditError, host

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_WRITE = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM)
STDOUT = "standard output"


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Errors inside are about ``path``: a failing write names no file, and one of a temporary file names that."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def naming_stdout() -> Iterator[None]:
    """The same for standard output. What it still holds is dropped: at the exit it would fail again."""
    try:
        with naming(STDOUT):
            yield
    except OSError:
        drop_stdout()
        raise


def drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_words(error: OSError) -> DdauditError:
    """``error`` for people."""
    from audit_cli.paths import cache_dir, state_dir

    name = str(error.filename or STDOUT)  # print names nothing; all else that writes does
    why = error.strerror or str(error)
    if error.errno not in _NO_WRITE:
        return host("os", why, str(error.filename or ""), "-vv shows where")
    code, free = ("disk-full", "free some space, or ") if error.errno in _FULL else ("no-write", "")
    for role, variable, folder in (
        ("cache", "DDAUDIT_CACHE_DIR", cache_dir()),
        ("state", "DDAUDIT_STATE_DIR", state_dir()),
    ):
        if Path(name).absolute().is_relative_to(folder.absolute()):
            what = f"the {role} folder {folder} can't be written"
            return host(code, what, why, f"{free}set {variable} to a folder that can be written")
    hint = f"{free}name a file elsewhere" if name != STDOUT else f"{free}write it elsewhere: --out FILE"
    return host(code, f"{name} can't be written", why, hint)
