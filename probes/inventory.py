"""What an install is made of, read by the host's own Python: the standard library alone, nothing imported from vLLM,
nothing written.

Shipped as text and run with ``python -I -B`` (Python 3.8 or newer); imported by the auditor itself for folders and
wheels. ``take`` answers
with plain JSON values. Everything that it walks is bounded in depth, number and size: the folder may be anything.
"""

from __future__ import annotations

import hashlib
import os
import platform
import site
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from probes.metadata import (
    distributions,
    editable_of,
    injected_by,
    name_and_version,
    parse_entry_points,
    parse_record,
    read_text,
    where,
)

MAX_FILES = 50_000
MAX_DEPTH = 32
MAX_SOURCE = 64 << 20
MAX_BINARY = 8 << 30
#: Variables that change what vLLM runs. Values of no other variable leave the host.
ENVIRONMENT = (
    "VLLM_PLUGINS", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_PRECOMPILED",
    "VLLM_TARGET_DEVICE", "VLLM_SAMPLER", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_USE_TRITON_FLASH_ATTN", "VLLM_BATCH_INVARIANT",
)  # fmt: skip
VERSIONS = (
    "vllm",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "flash-attn",
    "compressed-tensors",
    "numpy",
    "setuptools",
)
#: Written by the installer, not by the release.
UNPUBLISHED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_build.json", "uv_cache.json")

FileStat = Tuple[int, int, int, int]  # size, mtime_ns, ctime_ns, inode
Index = Dict[str, List[Any]]  # absolute path -> [size, mtime_ns, ctime_ns, inode, sha256]


def is_binary(name: str) -> bool:
    """Whether Python would load it as an extension module, or it is a shared library."""
    return name.endswith((".so", ".pyd", ".dylib")) or ".so." in name


def walk(folder: str, prefix: str) -> Iterator[Tuple[str, str, Optional[os.stat_result], str]]:
    """(path below the root, absolute path, stat, why it can't be used) of every file below ``folder``, sorted; byte
    code is left out.

    Links are followed as Python follows them, each folder once. What is neither a file nor a folder is reported,
    never opened.
    """
    seen = set()  # type: set[Tuple[int, int]]
    todo = [(folder, prefix, 0)]
    count = 0
    while todo:
        here, path, depth = todo.pop()
        try:
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(here), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            yield path, here, None, error.strerror or str(error)
            continue
        folders = []
        for entry in reversed(entries):
            below = path + "/" + entry.name
            if entry.name == "__pycache__" or entry.name.endswith(".pyc"):
                continue
            count += 1
            if count > MAX_FILES:
                yield below, entry.path, None, "more than %d files: the rest was not read" % MAX_FILES
                return
            try:
                found = entry.stat()
            except OSError as error:
                yield below, entry.path, None, error.strerror or str(error)
                continue
            if stat.S_ISDIR(found.st_mode):
                if depth < MAX_DEPTH:
                    folders.append((entry.path, below, depth + 1))
                else:
                    yield below, entry.path, None, "more than %d folders deep" % MAX_DEPTH
            elif stat.S_ISREG(found.st_mode):
                yield below, entry.path, found, ""
            else:
                yield below, entry.path, None, "not a regular file"
        todo.extend(reversed(folders))


def sha256_of(path: str, limit: int) -> Tuple[str, str]:
    """(sha256, why not). Opened without blocking, so that a pipe put there meanwhile does not hang the scan."""
    digest = hashlib.sha256()
    left = limit
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return "", "not a regular file"
            while True:
                block = file.read(1 << 20)
                if not block:
                    return digest.hexdigest(), ""
                left -= len(block)
                if left < 0:
                    return "", "larger than %d bytes" % limit
                digest.update(block)
    except OSError as error:
        return "", error.strerror or str(error)


def stat_key(found: os.stat_result) -> FileStat:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def hash_all(
    found: List[Tuple[str, str, os.stat_result]], index: Index
) -> Iterator[Tuple[str, str, os.stat_result, str, str]]:
    """(path, absolute path, stat, sha256, why not) of each. ``index`` saves reading what has the size, times and
    inode it had."""

    def one(item: Tuple[str, str, os.stat_result]) -> Tuple[str, str, os.stat_result, str, str]:
        path, absolute, status = item
        known = index.get(absolute)
        if known is not None and tuple(known[:4]) == stat_key(status):
            return path, absolute, status, known[4], ""
        limit = MAX_SOURCE if path.endswith(".py") else MAX_BINARY
        digest, why = sha256_of(absolute, limit) if status.st_size <= limit else ("", "larger than %d bytes" % limit)
        return path, absolute, status, digest, why

    large = [item for item in found if item[2].st_size > 1 << 20]
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1), len(large)))) as pool:
        later = pool.map(
            one, large
        )  # hashing leaves the interpreter's lock, so the large ones run beside the many small ones
        for item in found:
            if item[2].st_size <= 1 << 20:
                yield one(item)
        for result in later:
            yield result


def root_of_tree(origin: str, root: str, tops: Iterable[str], index: Index) -> Dict[str, Any]:
    """The files of the packages or modules ``tops`` (paths below ``root``): .py and binaries in ``files``, the
    others' hashes in ``others``."""
    found, failed = [], []
    for top in tops:
        absolute = os.path.join(root, top)
        if os.path.isdir(absolute):
            for path, here, status, why in walk(absolute, top):
                if status is None:
                    failed.append([path, why])
                else:
                    found.append((path, here, status))
        elif os.path.isfile(absolute):
            found.append((top, absolute, os.stat(absolute)))
    files, others, stats = [], {}, {}
    for path, absolute, status, digest, why in hash_all(found, index):
        if why:
            failed.append([path, why])
            continue
        stats[absolute] = list(stat_key(status)) + [digest]
        if path.endswith(".py") or is_binary(path) or is_program(absolute, status):
            files.append([path, status.st_size, digest])
        else:
            others[path] = digest
    return {
        "origin": origin,
        "root": root,
        "files": sorted(files),
        "failed": sorted(failed),
        "others": others,
        "stats": stats,
    }


def is_program(path: str, status: os.stat_result) -> bool:
    """Whether it is a compiled program that a package ships (vLLM has one): code that no rule reads, so it has to be
    named."""
    if status.st_size < 1 << 16 or "." in os.path.basename(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def compare(record: Dict[str, str], here: Dict[str, str], gone: Iterable[str], top: str) -> Dict[str, Any]:
    """RECORD against the hashes of the files below ``top``. ``gone``: files that are there and could not be read."""
    unread = set(gone)
    changed, missing, compared = [], [], 0
    for path, digest in record.items():
        base = path.rsplit("/", 1)[-1]
        if base in UNPUBLISHED or not digest:
            continue
        if path in here:
            compared += path.endswith(".py")
            if here[path] != digest:
                changed.append(path)
        elif path not in unread:
            missing.append(path)
    orphans = [path for path in here if path.startswith(top + "/") and path not in record]
    status = "changed" if changed or missing or orphans else ("unknown" if unread & set(record) else "clean")
    return {
        "status": status,
        "changed": sorted(changed),
        "missing": sorted(missing),
        "orphans": sorted(orphans),
        "files": compared,
    }


def record_of(metadata: str, tree: Dict[str, Any], top: str = "vllm") -> Tuple[Dict[str, Any], Dict[str, str]]:
    """(comparison, RECORD) for the distribution whose metadata folder lies beside the tree; an editable install has
    no RECORD of its files."""
    record = parse_record(read_text(metadata + "/RECORD")) if metadata else {}
    if not any(path.startswith(top + "/") for path in record):
        return {"status": "unknown", "changed": [], "missing": [], "orphans": [], "files": 0}, {}
    here = {path: digest for path, _, digest in tree["files"]}
    here.update(tree["others"])
    site_packages = os.path.dirname(metadata)
    for path in record:
        if path not in here and not path.startswith(top + "/"):  # metadata, console scripts
            absolute = os.path.normpath(os.path.join(site_packages, path))
            if os.path.isfile(absolute):
                here[path] = sha256_of(absolute, MAX_SOURCE)[0]
    return compare(record, here, (path for path, _ in tree["failed"]), top), record


def plugins(dists: List[str], index: Index) -> Tuple[List[List[str]], List[Dict[str, Any]]]:
    """(entry points of vllm.* groups as [group, name, value, distribution, version], the files of those
    distributions)."""
    points, trees = [], []
    for folder in dists:
        name, version = "", ""
        packages = []
        for group, point, value in parse_entry_points(read_text(folder + "/entry_points.txt")):
            if group == "vllm" or group.startswith("vllm."):
                if not name:
                    name, version = name_and_version(folder)
                points.append([group, point, value, name, version])
                packages.append(value.split(":")[0].split(".")[0])
        if name and name != "vllm":
            site_packages = os.path.dirname(folder)
            listed = [
                path for path in parse_record(read_text(folder + "/RECORD")) if path.endswith(".py") or is_binary(path)
            ]
            tops = {path.split("/")[0] for path in listed if not path.startswith("..")}
            for package in packages:
                place = where(package)
                if place and (place[0] != site_packages or place[1] not in tops):
                    trees.append(root_of_tree("plugin:" + name, place[0], [place[1]], index))
            if tops - {"vllm"}:
                trees.append(root_of_tree("plugin:" + name, site_packages, sorted(tops - {"vllm"}), index))
    return points, trees


def finish(data: Dict[str, Any], stats: bool = False) -> Dict[str, Any]:
    """``data`` as it leaves the host: each file row says whether RECORD lists these bytes; what only served to
    compare is left out."""
    listed = data.pop("listed")
    for tree in data["trees"]:
        mine = tree["origin"] == "vllm"
        tree["files"] = [
            [path, size, digest, int(mine and listed.get(path) == digest)] for path, size, digest in tree["files"]
        ]
        del tree["others"]
        if not stats:
            tree.pop("stats", None)
    return data


def _answer(
    place: Optional[Tuple[str, str]],
    site_packages: str,
    trees: List[Dict[str, Any]],
    record: Dict[str, Any],
    listed: Dict[str, str],
    points: List[List[str]],
    lines: List[str],
    versions: Dict[str, str],
) -> Dict[str, Any]:
    return {
        "vllm": os.path.join(*place) if place else "",
        "site_packages": site_packages,
        "trees": trees,
        "record": record,
        "listed": listed,
        "entry_points": points,
        "injected": lines,
        "versions": versions,
        "copies": [],
        "lacking": [],
        "environment": {},
        "python": {},
    }


def of_folder(folder: str, index: Index) -> Dict[str, Any]:
    """The inventory of an unpacked site-packages folder that no Python of its own goes with."""
    tree = root_of_tree("vllm", folder, ["vllm"], index)
    dists = list(distributions([folder]))
    versions = {name: version for name, version in map(name_and_version, dists) if name in VERSIONS}
    mine = [dist for dist in dists if name_and_version(dist)[0] == "vllm"]
    record, listed = record_of(mine[0] if mine else "", tree)
    points = []
    for dist in dists:
        for group, point, value in parse_entry_points(read_text(dist + "/entry_points.txt")):
            if group == "vllm" or group.startswith("vllm."):
                points.append([group, point, value, *name_and_version(dist)])
    names = {point[3] for point in points} - {"vllm"}
    trees = [tree]
    for dist in dists:
        name = name_and_version(dist)[0]
        if name in names:
            listed_by_it = [
                path for path in parse_record(read_text(dist + "/RECORD")) if path.endswith(".py") or is_binary(path)
            ]
            tops = {path.split("/")[0] for path in listed_by_it if not path.startswith("..")} - {"vllm"}
            tops |= {
                p[2].split(":")[0].split(".")[0]
                for p in points
                if p[3] == name and os.path.isdir(os.path.join(folder, p[2].split(":")[0].split(".")[0]))
            }
            trees.append(root_of_tree("plugin:" + name, folder, sorted(tops - {"vllm"}), index))
    lines, modules = injected_by([folder])
    for module in modules:
        for top in (module, module + ".py"):
            if os.path.exists(os.path.join(folder, top)):
                trees.append(root_of_tree("plugin:" + module, folder, [top], index))
    lines += [line for line in map(editable_of, dists) if line]
    place = (folder, "vllm") if os.path.isdir(os.path.join(folder, "vllm")) else None
    return finish(_answer(place, folder, trees, record, listed, points, lines, versions), stats=True)


def take(options: Dict[str, Any]) -> Dict[str, Any]:
    """The inventory of the Python that runs this. ``options``: pythonpath (folders that PYTHONPATH would add), index
    (see ``Index``), stats (whether to
    answer with what the index is made of)."""
    index = options.get("index", {})  # type: Index
    extra = [os.path.abspath(os.path.expanduser(folder)) for folder in options.get("pythonpath", ())]
    lacking = [folder for folder in extra if not os.path.isdir(folder)]
    sys.path[:0] = extra
    if (
        sys.prefix == sys.base_prefix and not site.ENABLE_USER_SITE
    ):  # -I leaves it out, a service that runs this Python doesn't
        user = site.getusersitepackages()
        if os.path.isdir(user):
            sys.path.append(user)
    path = [folder for folder in sys.path if os.path.isdir(folder)]
    dists = list(distributions(path))
    mine = [dist for dist in dists if name_and_version(dist)[0] == "vllm"]
    versions = {name: version for name, version in map(name_and_version, dists) if name in VERSIONS}
    place = where("vllm")
    trees = []
    record, listed = {"status": "unknown", "changed": [], "missing": [], "orphans": [], "files": 0}, {}  # type: Tuple[Dict[str, Any], Dict[str, str]]
    if place:
        tree = root_of_tree("vllm", place[0], [place[1]], index)
        trees.append(tree)
        beside = [dist for dist in mine if os.path.realpath(os.path.dirname(dist)) == os.path.realpath(place[0])]
        record, listed = record_of(beside[0] if beside else "", tree)
    points, more = plugins(dists, index)
    trees += more
    for number, folder in enumerate(extra):
        if os.path.isdir(folder):
            tops = sorted(
                name
                for name in os.listdir(folder)
                if name != "__pycache__" and not name.endswith((".dist-info", ".egg-info", ".pyc"))
            )
            taken = {(tree["root"], top) for tree in trees for top in {row[0].split("/")[0] for row in tree["files"]}}
            trees.append(
                root_of_tree(
                    "pythonpath:%d" % number, folder, [top for top in tops if (folder, top) not in taken], index
                )
            )
    lines, modules = injected_by(path)
    for module in modules:
        found = where(module)
        if (
            found
            and found[1] != "vllm"
            and not any(
                tree["root"] == found[0] and any(r[0].split("/")[0] == found[1] for r in tree["files"])
                for tree in trees
            )
        ):
            trees.append(root_of_tree("plugin:" + module, found[0], [found[1]], index))
    lines += [line for line in map(editable_of, dists) if line]
    copies = sorted(
        {os.path.realpath(folder + "/vllm") for folder in path if os.path.isfile(folder + "/vllm/__init__.py")}
    )
    environment = {name: os.environ[name][:300] for name in ENVIRONMENT if name in os.environ}
    if "VLLM_PLUGINS" in environment:
        lines.append("VLLM_PLUGINS=" + environment["VLLM_PLUGINS"])
    data = _answer(place, place[0] if place else "", trees, record, listed, points, lines, versions)
    data.update(copies=copies, lacking=lacking, environment=environment)
    data["python"] = {
        "executable": sys.executable,
        "version": platform.python_version(),
        "prefix": sys.prefix,
        "machine": platform.machine(),
        "system": platform.system(),
    }
    return finish(data, stats=bool(options.get("stats")))
