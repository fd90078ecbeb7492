"""Small installs with a RECORD, and the command line as a user runs it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
#: The shape of a chain verifier: the first mismatch ends it.
CHAIN = """
def accept(draft_tokens, target_tokens, out):
    rejected = False
    for i in range(len(draft_tokens)):
        if not rejected:
            out[i] = target_tokens[i]
            if draft_tokens[i] != target_tokens[i]:
                rejected = True
    return out
"""
FILES = {
    "vllm/__init__.py": "",
    "vllm/version.py": "__version__ = '0.99.0'\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/sample/__init__.py": "",
    "vllm/v1/sample/rejection_sampler.py": CHAIN,
    "vllm/v1/worker/gpu_model_runner.py": "from vllm.v1.sample.rejection_sampler import accept\n\n\n"
    "class GPUModelRunner:\n    def __init__(self):\n        self.rejection_sampler = accept\n",
}


def write(
    folder: Path,
    files: Mapping[str, str | bytes] = FILES,
    name: str = "vllm",
    version: str = "0.99.0",
    entry_points: str = "",
) -> Path:
    """Write ``files`` and the metadata that an installer would write for them."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    if entry_points:
        contents[f"{info}/entry_points.txt"] = entry_points.encode()
    rows = []
    for path, data in contents.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(data)}")
    (folder / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return folder


def wheel(file: Path, folder: Path) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    return file


def listing(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file and folder below with mode, modification time and hash: what a scan must leave as it is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, digest)
    return found


def ddaudit(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "audit_cli", *arguments]
    environment = {**os.environ, **(env or {}), "PYTHONPATH": str(REPO)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, stdin=subprocess.DEVNULL, check=False
    )


def audit_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    audit: dict[str, Any] = json.loads(done.stdout)
    return audit
