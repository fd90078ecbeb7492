"""Published vLLM releases, unpacked once (Python files and metadata) and kept between test runs."""

from __future__ import annotations

import tempfile
import zipfile
from functools import cache
from pathlib import Path

from audit_cli.paths import cache_dir
from audit_cli.wheels import wheel_for
from rules.engine import Judgement, judge
from rules.testing import tree_from_dir
from rules.tree import InstallTree


@cache
def unpacked(version: str) -> Path:
    """The site-packages folder of that release: ``vllm/`` without its binaries, ``vllm-*.dist-info/``."""
    folder = cache_dir() / "unpacked" / version
    if folder.is_dir():
        return folder
    wheel = wheel_for(f"vllm=={version}", cache_dir() / "wheels")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        fresh = Path(scratch) / version
        wanted = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
        archive.extractall(fresh, wanted)
        try:
            fresh.rename(folder)
        except OSError:  # another test run was faster
            if not folder.is_dir():
                raise
    return folder


@cache
def release(version: str) -> InstallTree:
    return tree_from_dir(unpacked(version))


@cache
def judged(version: str) -> Judgement:
    return judge(release(version), cache=cache_dir() / "facts")
