"""The host: system, processors, memory, disk, GPUs and what runs on them. gpu: none (nvidia-smi is asked).

Standard library alone, Python 3.8 or newer; shipped as text. ``take`` answers with plain JSON values; what can't be
learned is absent and named in "missing" with the reason."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any, Dict, List, Tuple

GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "compute_cap",
    "driver_version",
    "mig.mode.current",
)
APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


def query(command: List[str], seconds: float = 10.0) -> Tuple[str, str]:
    """(standard output, why there is none)."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=seconds
        )
    except FileNotFoundError:
        return "", "%s is not installed" % command[0]
    except subprocess.TimeoutExpired:
        return "", "%s did not answer in %d s" % (command[0], seconds)
    except OSError as error:
        return "", "%s: %s" % (command[0], error)
    text = done.stdout[: 1 << 20].decode("utf-8", "replace")
    if done.returncode:
        last = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        return "", "%s: exit %d: %s" % (command[0], done.returncode, last[-1][:200] if last else "no message")
    return text, ""


def rows(text: str, fields: Tuple[str, ...]) -> List[Dict[str, str]]:
    """The lines of ``nvidia-smi --format=csv,noheader,nounits``; a line with another number of fields is left out."""
    split = ([part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip())
    return [dict(zip(fields, parts)) for parts in split if len(parts) == len(fields)]


def memory() -> Dict[str, int]:
    """MemTotal and MemAvailable in bytes, from /proc/meminfo."""
    found = {}
    with open("/proc/meminfo", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    return found


def system() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("PRETTY_NAME="):
                    return line.partition("=")[2].strip().strip('"')[:200]
    except OSError:
        pass
    return platform.platform()


def take(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """{"system", "kernel", "machine", "cpus", "memory", "disks", "gpus", "gpu_processes", "missing"}.

    Sizes are in bytes, GPU memory is in MiB as nvidia-smi prints it.
    """
    missing = {}  # type: Dict[str, str]
    facts = {
        "system": system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }  # type: Dict[str, Any]
    try:
        facts["memory"] = memory()
    except (OSError, ValueError) as error:
        missing["memory"] = str(error)
    disks = {}
    for path in (os.path.expanduser("~"), "/tmp", "/dev/shm", *arguments.get("paths", ())):
        try:
            usage = shutil.disk_usage(path)
            disks[path] = {"total": usage.total, "free": usage.free}
        except OSError as error:
            missing["disk " + path] = error.strerror or str(error)
    facts["disks"] = disks
    text, why = query(["nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"])
    facts["gpus"] = rows(text, GPU_FIELDS)
    if why:
        missing["gpus"] = why
    else:
        text, why = query(
            ["nvidia-smi", "--query-compute-apps=" + ",".join(APP_FIELDS), "--format=csv,noheader,nounits"]
        )
        facts["gpu_processes"] = rows(text, APP_FIELDS)
        if why:
            missing["gpu_processes"] = why
    facts["missing"] = missing
    return facts
