"""Where things are kept on this machine. ``DDAUDIT_CACHE_DIR`` and ``DDAUDIT_STATE_DIR`` move them."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """What can be made again: wheels, files by hash, facts."""
    named = os.environ.get("DDAUDIT_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    import platformdirs  # a few milliseconds that --help can do without

    return Path(platformdirs.user_cache_dir("ddaudit", appauthor=False))


def state_dir() -> Path:
    """What can't: the audits that were made."""
    named = os.environ.get("DDAUDIT_STATE_DIR")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_state_dir("ddaudit", appauthor=False))
