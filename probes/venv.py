"""The environment that would serve: distributions, the torch and CUDA pair, plugins, allow-listed variables. gpu: none.

Nothing is imported but the standard library: torch's version file is read as text, so that a broken torch is named and
not tripped over. Python 3.8 or newer; shipped as text and run by the host's own Python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from typing import Any, Dict, List

#: Values of these, and of no others, leave the host. Key-like names are never in it.
VARIABLES = (
    "VLLM_PLUGINS",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_USE_V1",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_TARGET_DEVICE",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_USE_TRITON_FLASH_ATTN",
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_DEEP_GEMM",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HF_HUB_OFFLINE",
    "NCCL_NVLS_ENABLE",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)
ASSIGNMENT = re.compile(r"^(__version__|cuda|hip|git_version)\s*(?::[^=]*)?=\s*['\"]?([^'\"\n]*)['\"]?\s*$", re.M)
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?$")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions() -> Dict[str, List[str]]:
    """name -> versions, in the order of sys.path: of two versions of one name the first one shadows the other."""
    found = {}  # type: Dict[str, List[str]]
    for dist in importlib.metadata.distributions():
        try:
            name = dist.metadata["Name"]
            if name:
                found.setdefault(normal(name), []).append(dist.version)
        except Exception:  # a broken METADATA is a fact, not the end of the inventory
            found.setdefault("?", []).append(str(getattr(dist, "_path", "unreadable")))
    return found


def torch_facts() -> Dict[str, Any]:
    """{"version", "cuda"} as torch/version.py states them, or {"missing": why}."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError, AttributeError) as error:
        return {"missing": "torch can't be located: %s" % error}
    if spec is None:
        return {"missing": "torch is not installed"}
    folders = list(spec.submodule_search_locations or ())
    if not folders:
        return {"missing": "torch is no package"}
    try:
        with open(os.path.join(folders[0], "version.py"), encoding="utf-8", errors="replace") as text:
            found = dict(ASSIGNMENT.findall(text.read(1 << 16)))
    except OSError as error:
        return {"missing": "torch/version.py: %s" % (error.strerror or error)}
    cuda = found.get("cuda", "None")
    return {"version": found.get("__version__", ""), "cuda": "" if cuda == "None" else cuda, "folder": folders[0]}


def pins(name: str) -> Dict[str, str]:
    """What a distribution requires without a marker, name -> specifier; empty when it has no metadata."""
    try:
        wanted = importlib.metadata.requires(name) or []
    except Exception:
        return {}
    out = {}
    for line in wanted:
        match = REQUIREMENT.match(line)
        if match and not (match.group(3) or "").strip():
            out[normal(match.group(1))] = match.group(2).strip()
    return out


def take(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """{"python", "executable", "prefix", "distributions", "torch", "vllm_requires", "variables"}."""
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "distributions": distributions(),
        "torch": torch_facts(),
        "vllm_requires": pins("vllm"),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "hidden_variables": sorted(
            n for n in os.environ if n.startswith(("VLLM_", "HF_", "NCCL_")) and n not in VARIABLES
        ),
    }
