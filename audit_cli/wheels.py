"""Published wheels: fetched once with pip, kept in the cache, read without being unpacked."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from audit_cli.errors import DdauditError, host, usage

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.+!_-]+))?")
#: vLLM's wheels are for Linux; they are read, not installed, so any system can fetch them.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(40, 16, -1)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]


def wheel_for(requirement: str, folder: Path) -> Path:
    """The wheel of ``name==version`` (from the cache when it is there) or of the newest ``name``. Raises
    DdauditError."""
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise usage(f"pypi:{requirement} is not a release", "a name, or name==version", "pypi:vllm==0.33.0")
    name, version = match.groups()
    if version is not None:
        kept = cached(name, version, folder)
        if kept is not None:
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
        _download(requirement, Path(scratch))
        wheels = sorted(Path(scratch).glob("*.whl"))
        if not wheels:
            raise host(
                "no-wheel", f"no wheel of {requirement}", "pip fetched none", "give a wheel that you have as wheel:FILE"
            )
        target = folder / wheels[0].name
        if not (
            target.is_file() and target.stat().st_size == wheels[0].stat().st_size
        ):  # keep the old one's times: its index is keyed by them
            wheels[0].replace(target)
        return target


def cached(name: str, version: str, folder: Path) -> Path | None:
    """The wheel of that version in ``folder``, if any; with several builds of it, the one with the highest build
    number."""
    stem = re.sub(r"[-_.]+", "_", name).lower()

    def build(path: Path) -> int:
        parts = path.name.split("-")
        return int(parts[2]) if len(parts) == 6 and parts[2].isdigit() else 0

    found = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{stem}-{version.lower()}-")]
    return max(found, key=build) if found else None


def _download(requirement: str, folder: Path) -> None:
    options = [
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        "--disable-pip-version-check",
        "--quiet",
    ]
    options += [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "--abi",
        "abi3",
        "--abi",
        "cp312",
        "--abi",
        "none",
    ]
    options += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    try:
        result = subprocess.run(
            [*_pip(), *options, requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        raise host(
            "no-pip", "pip could not be started", str(error), "give a wheel that you have as wheel:FILE"
        ) from None
    if result.returncode == 0:
        return
    said = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.startswith("ERROR")]
    why = (
        said[-1] if said else result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "pip said nothing"
    )[:300]
    if "No space left" in result.stderr:
        raise _full(folder)
    missing = "No matching distribution" in result.stderr
    hint = (
        "check the name and version"
        if missing
        else "check the network and pip's settings, or give a wheel as wheel:FILE"
    )
    raise host("no-wheel", f"could not fetch {requirement}", why, hint)


def _full(folder: Path) -> DdauditError:
    free = shutil.disk_usage(folder).free // 2**20
    return host(
        "disk-full",
        "the wheel does not fit on the disk",
        f"{free} MB are free for {folder.parent}",
        "free some, or set DDAUDIT_CACHE_DIR",
    )


def _pip() -> list[str]:
    """pip of this Python, or whichever is at hand: pipx and uv make environments without one."""
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, command in (("pip", ["pip"]), ("pip3", ["pip3"]), ("uv", ["uv", "tool", "run", "pip"])):
        if shutil.which(name):
            return command
    raise host(
        "no-pip", "there is no pip", "it fetches the wheels", "install pip, or give a wheel that you have as wheel:FILE"
    )
