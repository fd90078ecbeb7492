"""The folder that is put first on PYTHONPATH so that vLLM finds the plugin: the package and a minimal dist-info.

Nothing is installed and nothing in the environment changes; deleting the folder is the undo. Standard library only.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

ENTRY_POINTS = "[vllm.general_plugins]\nddtree = ddtree.native:register\n"
_SKIP = shutil.ignore_patterns("__pycache__", "*.pyc")


def content_hash(package: Path) -> str:
    """12 hex digits over the names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def write_dist_info(folder: Path, version: str) -> Path:
    """ddtree-VERSION.dist-info with the entry point, as ``importlib.metadata`` reads it."""
    info = folder / f"ddtree-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddtree\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "INSTALLER").write_text("ddaudit\n")
    return info


def write_overlay(folder: Path, package: Path | None = None) -> Path:
    """Copy the ddtree package into ``folder`` and register it there; returns the folder.

    Args:
        package: the ddtree package to copy, by default the one that is running.
    Raises:
        FileExistsError: the folder holds something that is no overlay of ours.
    """
    package = package or Path(__file__).resolve().parents[1]
    version = f"0.1.0+{content_hash(package)}"
    target = folder / "ddtree"
    if folder.exists() and any(folder.iterdir()) and not list(folder.glob("ddtree-*.dist-info/INSTALLER")):
        raise FileExistsError(f"{folder} is not empty and is no overlay")
    if target.exists():
        shutil.rmtree(target)
    for old in folder.glob("ddtree-*.dist-info"):
        shutil.rmtree(old)
    shutil.copytree(package, target, ignore=_SKIP)
    write_dist_info(folder, version)
    return folder
