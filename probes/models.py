"""Model folders on the host: configs, tensor headers, file sizes; a hub id is looked up in the cache. gpu: none.

No weight is read: a safetensors header is a few kilobytes at the start of the file. Nothing is downloaded. Standard
library alone, Python 3.8 or newer; shipped as text."""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Dict, List, Tuple

MAX_TEXT = 8 << 20
MAX_HEADER = 64 << 20
MAX_FILES = 2000
TEXTS = {"config": "config.json", "generation": "generation_config.json", "tokenizer": "tokenizer_config.json"}


def locate(name: str) -> Tuple[str, str]:
    """(folder, why there is none) of a folder path or of a hub id in the Hugging Face cache of this host."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return path, ""
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        return "", "%s is no folder on this host" % name
    root = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    repo = os.path.join(root, "models--" + name.replace("/", "--"))
    snapshots = os.path.join(repo, "snapshots")
    try:
        with open(os.path.join(repo, "refs", "main"), encoding="ascii") as ref:
            wanted = os.path.join(snapshots, ref.read(64).strip())
        if os.path.isdir(wanted):
            return wanted, ""
    except (OSError, ValueError):
        pass
    try:
        found = sorted((os.path.join(snapshots, s) for s in os.listdir(snapshots)), key=os.path.getmtime)
    except OSError:
        return "", "%s is not in the Hugging Face cache of this host (%s); nothing is downloaded" % (name, root)
    return (found[-1], "") if found else ("", "%s: the cache holds no snapshot" % name)


def header(path: str) -> Dict[str, Any]:
    """Tensor name -> [dtype, shape] of a safetensors file. Raises ValueError or OSError."""
    size = os.path.getsize(path)
    with open(path, "rb") as data:
        start = data.read(8)
        if len(start) < 8:
            raise ValueError("shorter than a safetensors header")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER or length + 8 > size:
            raise ValueError("header of %d bytes in a file of %d: truncated, or a Git LFS pointer" % (length, size))
        entries = json.loads(data.read(length))
    end = max((item["data_offsets"][1] for name, item in entries.items() if name != "__metadata__"), default=0)
    if end + 8 + length > size:
        raise ValueError("the file ends %d bytes early" % (end + 8 + length - size))
    return {name: [item["dtype"], item["shape"]] for name, item in entries.items() if name != "__metadata__"}


def read(name: str) -> Dict[str, Any]:
    """One model folder, in the shape of ``rules.lint.model.ModelFolder``; "problems" are [file, why] pairs."""
    out = {
        "name": name,
        "config": {},
        "generation": {},
        "tokenizer": {},
        "template": "",
        "tensors": {},
        "files": {},
    }  # type: Dict[str, Any]
    problems = []  # type: List[List[str]]
    out["problems"] = problems
    folder, why = locate(name)
    if not folder:
        problems.append([name, why])
        return out
    out["folder"] = os.path.realpath(folder)
    try:
        names = sorted(os.listdir(folder))[:MAX_FILES]
    except OSError as error:
        problems.append([folder, error.strerror or str(error)])
        return out
    for file in names:
        path = os.path.join(folder, file)
        try:
            if os.path.isfile(path):
                out["files"][file] = os.path.getsize(path)
                if file.endswith(".safetensors"):
                    out["tensors"].update(header(path))
            elif os.path.islink(path):
                problems.append([file, "a link to nothing"])
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            problems.append([file, str(error)])
    for key, file in TEXTS.items():
        path = os.path.join(folder, file)
        if file not in out["files"]:
            if key == "config":
                problems.append([file, "missing"])
            continue
        try:
            with open(path, encoding="utf-8") as text:
                value = json.loads(text.read(MAX_TEXT))
            if not isinstance(value, dict):
                raise ValueError("holds no JSON object")
            out[key] = value
        except (OSError, ValueError, RecursionError) as error:
            problems.append([file, str(error)])
    try:
        template = os.path.join(folder, "chat_template.jinja")
        if os.path.isfile(template):
            with open(template, encoding="utf-8") as text:
                out["template"] = text.read(MAX_TEXT)
        else:
            out["template"] = str(out["tokenizer"].get("chat_template", ""))
    except (OSError, ValueError) as error:
        problems.append(["chat_template.jinja", str(error)])
    missing = index_gaps(folder, out["files"])
    problems.extend([file, "named in the index, not in the folder"] for file in missing)
    return out


def index_gaps(folder: str, files: Dict[str, int]) -> List[str]:
    """Shards that model.safetensors.index.json names and that are not there."""
    try:
        with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as text:
            shards = set(json.loads(text.read(MAX_TEXT))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
    return sorted(str(shard) for shard in shards if shard not in files)


def take(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """{"models": {name: folder}} for the names given."""
    return {"models": {name: read(name) for name in arguments.get("models", ())}}
