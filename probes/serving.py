"""What is serving now: running vLLM processes with their Python, flags and models, and their own counters. gpu: none.

Read from /proc and from the server's loopback ``/metrics``; nothing is sent but one GET. Standard library
alone, Python 3.8 or newer; shipped as text. Secrets never leave the host: values of key-like flags are replaced
before the answer is made."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from typing import Any, Dict, List, Optional, Tuple

SECRET = re.compile(r"(api[-_]?key|token|password|passwd|secret|credential|auth)$", re.I)
URL_USER = re.compile(r"(\w+://)[^/\s@]+@")
MAX_METRICS = 4 << 20
#: Metric families that tell how speculation goes and how busy the server is; no others leave the host.
WANTED = (
    "vllm:spec_decode",
    "vllm:prefix_cache",
    "vllm:num_requests",
    "vllm:kv_cache_usage",
    "vllm:gpu_cache_usage",
    "vllm:generation_tokens",
    "vllm:prompt_tokens",
    "vllm:request_success",
    "vllm:ddtree",
)
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def hide(argv: List[str]) -> List[str]:
    """argv with the values of key-like flags and the user part of URLs replaced by ***."""
    out = []
    secret = False
    for word in argv:
        if secret and not word.startswith("--"):
            out.append("***")  # one flag may take several keys
            continue
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and bool(SECRET.search(name))
        if secret and equals:
            out.append(name + "=***")
            secret = False
        else:
            out.append(URL_USER.sub(r"\1***@", word))
    return out


def is_server(argv: List[str]) -> bool:
    """Whether a command line is a vLLM API server or an offline engine's front process (not one of its workers)."""
    names = [os.path.basename(word) for word in argv[:4]]
    if "vllm" in names and "serve" in argv[:6]:
        return True
    return any(argv[i] == "-m" and argv[i + 1].startswith("vllm.entrypoints") for i in range(min(6, len(argv) - 1)))


def processes() -> List[Dict[str, Any]]:
    found = []
    for entry in sorted((e for e in os.listdir("/proc") if e.isdigit()), key=int):
        base = "/proc/" + entry
        try:
            with open(base + "/cmdline", "rb") as data:
                argv = [word.decode("utf-8", "replace") for word in data.read(1 << 17).split(b"\0") if word]
            if not argv or not is_server(argv):
                continue
            record = {"pid": int(entry), "argv": hide(argv)}  # type: Dict[str, Any]
            for key in ("exe", "cwd"):
                try:
                    record[key] = os.readlink(base + "/" + key)
                except OSError as error:
                    record[key + "_why"] = error.strerror
            record["uid"] = os.stat(base).st_uid
            found.append(record)
        except (OSError, ValueError):
            continue  # it ended, or it is not ours to read
    return found


def port(argv: List[str]) -> int:
    """The port a server was told to listen on; vLLM's default is 8000."""
    for index, word in enumerate(argv):
        value = (
            word[7:]
            if word.startswith("--port=")
            else argv[index + 1] if word == "--port" and index + 1 < len(argv) else ""
        )
        if value.isdigit() and 0 < int(value) < 65536:
            return int(value)
    return 8000


def samples(text: str) -> List[Tuple[str, Dict[str, str], float]]:
    """(name, labels, value) of the wanted families of a Prometheus exposition."""
    out = []
    for line in text.splitlines():
        if not line.startswith(WANTED):
            continue
        match = SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match.group("value"))
        except ValueError:
            continue
        out.append((match.group("name"), dict(LABEL.findall(match.group("labels") or "")), value))
    return out


def metrics(number: int, seconds: float) -> Tuple[Optional[List[Any]], str]:
    """(samples, why there are none), from loopback only, with no proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open("http://127.0.0.1:%d/metrics" % number, timeout=seconds) as reply:
            return samples(reply.read(MAX_METRICS).decode("utf-8", "replace")), ""
    except urllib.error.HTTPError as error:
        return None, "port %d answers %d" % (number, error.code)
    except (OSError, ValueError) as error:
        return None, "port %d: %s" % (number, getattr(error, "reason", error))


def take(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """{"servers": [{"pid", "argv", "exe", "cwd", "port", "metrics" | "metrics_why"}], "missing"}."""
    if not os.path.isdir("/proc/self"):
        return {"servers": [], "missing": {"processes": "this system has no /proc"}}
    servers = processes()
    for server in servers:
        server["port"] = port(server["argv"])
        found, why = metrics(server["port"], float(arguments.get("seconds", 5)))
        if found is None:
            server["metrics_why"] = why
        else:
            server["metrics"] = found
    return {"servers": servers, "missing": {}}
