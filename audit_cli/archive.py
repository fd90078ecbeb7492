"""The inventory of a wheel or a tarball, read in place: nothing is unpacked, no name in it becomes a name on this
disk."""

from __future__ import annotations

import hashlib
import json
import lzma
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from audit_cli import releases
from audit_cli.errors import DdauditError, host
from audit_cli.store import Store, write_atomic
from probes import inventory, metadata, op_schemas

MAX_SOURCE = inventory.MAX_SOURCE
MAX_TOTAL = 24 << 30
MAX_MEMBERS = 200_000
_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
_FORMAT = 2


class Wheel:
    """A wheel file. ``data`` is its inventory (the form that ``probes.inventory`` gives), ``schemas`` the op schemas
    by sha256."""

    def __init__(self, path: Path, cache: Path, trust: bool = True) -> None:
        self.path = path
        self._names: dict[str, str] = {}
        self._zip: zipfile.ZipFile | None = None
        self._lock = threading.Lock()
        try:
            status = path.stat()
        except OSError as error:
            raise host(
                "no-wheel", f"{path} can't be read", error.strerror or str(error), "give the path of a .whl file"
            ) from None
        key = hashlib.sha256(
            json.dumps([_FORMAT, str(path.resolve()), inventory.stat_key(status)]).encode()
        ).hexdigest()
        kept = cache / f"{key}.json"
        try:
            self.data, self.schemas = json.loads(kept.read_bytes())
        except (OSError, ValueError):
            self.data, self.schemas = (_read_known(path) if trust else None) or _read_wheel(path)
            write_atomic(kept, json.dumps([self.data, self.schemas], separators=(",", ":")).encode())
        for tree in self.data["trees"]:
            self._names.update({digest: name for name, _, digest, _ in tree["files"]})

    def has(self, sha256: str) -> bool:
        return sha256 in self._names

    def get(self, sha256: str) -> bytes:
        """A file of the wheel by its hash. Raises OSError."""
        try:
            with self._lock:
                self._zip = self._zip or zipfile.ZipFile(self.path)
                data = self._zip.read(self._names[sha256])
        except (*_BROKEN, KeyError) as error:
            raise OSError(f"{self.path.name}: {error}") from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise OSError(f"{self.path.name} has changed since it was read")
        return data


def _read_known(path: Path) -> tuple[dict[str, Any], dict[str, list[str] | None]] | None:
    """The same from the wheel's table of contents and RECORD, for a file whose every byte is known."""
    schemas = releases.schemas_of(releases.sha256_of(path))
    if schemas is None:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
            texts = {name: archive.read(name).decode("utf-8", "replace") for name in sizes if _is_metadata(name)}
    except _BROKEN as error:
        raise _broken(path, error, "wheel") from None
    record = {name: text for name, text in texts.items() if name.endswith(".dist-info/RECORD")}
    listed = metadata.parse_record("".join(record.values()))
    digests = {
        name: (size, listed.get(name, "") or hashlib.sha256(texts.get(name, "").encode()).hexdigest())
        for name, size in sizes.items()
    }
    return of_members(digests, texts, path), schemas


def _read_wheel(path: Path) -> tuple[dict[str, Any], dict[str, list[str] | None]]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist() if not info.is_dir()}
            _check_names(members)
            if len(members) > MAX_MEMBERS or sum(info.file_size for info in members.values()) > MAX_TOTAL:
                raise ValueError("it would unpack to far more than any wheel holds")
            texts = {
                n: archive.read(n).decode("utf-8", "replace")
                for n, i in members.items()
                if _is_metadata(n) and i.file_size < MAX_SOURCE
            }
        digests: dict[str, tuple[int, str]] = {}
        schemas: dict[str, list[str] | None] = {}
        large = sorted((i.file_size, n) for n, i in members.items() if i.file_size > 1 << 20)
        small = [n for n, i in members.items() if i.file_size <= 1 << 20]
        with ThreadPoolExecutor(4) as pool:  # inflating and hashing leave the interpreter's lock
            jobs = [pool.submit(_digest_members, path, [name]) for _, name in reversed(large)]
            jobs += [pool.submit(_digest_members, path, small[i::2]) for i in range(2)]
            for job in jobs:
                more, found = job.result()
                digests.update(more)
                schemas.update(found)
    except _BROKEN as error:
        raise _broken(path, error, "wheel") from None
    return of_members(digests, texts, path), schemas


def _digest_members(path: Path, names: list[str]) -> tuple[dict[str, tuple[int, str]], dict[str, list[str] | None]]:
    digests: dict[str, tuple[int, str]] = {}
    schemas: dict[str, list[str] | None] = {}
    with zipfile.ZipFile(path) as archive:
        for name in names:
            with archive.open(name) as file:
                size, digest, found = _read_through(file, inventory.is_binary(name))
            digests[name] = size, digest
            if found is not None:
                schemas[digest] = found
    return digests, schemas


def _read_through(file: IO[bytes], binary: bool) -> tuple[int, str, list[str] | None]:
    """(size, sha256, op schemas of a binary) in one pass, a block at a time."""
    digest, size, scanner = hashlib.sha256(), 0, op_schemas.Scanner() if binary else None
    while block := file.read(op_schemas.BLOCK):
        digest.update(block)
        size += len(block)
        if scanner:
            scanner.feed(block)
    return size, digest.hexdigest(), scanner.schemas() if scanner else None


def of_members(digests: Mapping[str, tuple[int, str]], texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """An inventory from the members of an archive: name -> (size, sha256), and the texts of its metadata files."""
    if not any(name.startswith("vllm/") for name in digests):
        raise host(
            "no-vllm",
            f"there is no vLLM in {path.name}",
            "no member's name begins with vllm/",
            "give a wheel of vLLM, or a tarball of a site-packages folder",
        )
    folders = sorted({name.split("/")[0] for name in texts if name.split("/")[0].endswith(".dist-info")})
    versions, points, mine = {}, [], ""
    owned: dict[str, set[str]] = {}
    for folder in folders:
        name, version = _name_and_version(folder, texts.get(f"{folder}/METADATA", ""))
        if name in inventory.VERSIONS:
            versions[name] = version
        if name == "vllm":
            mine = folder
        for group, point, value in metadata.parse_entry_points(texts.get(f"{folder}/entry_points.txt", "")):
            if group == "vllm" or group.startswith("vllm."):
                points.append([group, point, value, name, version])
                if name != "vllm":
                    tops = {
                        p.split("/")[0]
                        for p in metadata.parse_record(texts.get(f"{folder}/RECORD", ""))
                        if p.endswith(".py")
                    }
                    owned.setdefault(name, set()).update(tops | {value.split(":")[0].split(".")[0]})
    trees = [_tree("vllm", digests, {"vllm"})] + [
        _tree(f"plugin:{name}", digests, tops - {"vllm"}) for name, tops in sorted(owned.items())
    ]
    injected = [
        f"{name}: {line.strip()[:300]}"
        for name, text in sorted(texts.items())
        if name.endswith(".pth")
        for line in text.splitlines()
        if line.startswith("import")
    ]
    injected += sorted(name for name in digests if name in ("sitecustomize.py", "usercustomize.py"))
    listed = metadata.parse_record(texts.get(f"{mine}/RECORD", "")) if mine else {}
    if any(name.startswith("vllm/") for name in listed):
        here = {name: digest for name, (_, digest) in digests.items() if not name.endswith(".pyc")}
        record = inventory.compare(listed, here, (), "vllm")
    else:
        record, listed = {"status": "unknown", "changed": [], "missing": [], "orphans": [], "files": 0}, {}
    return inventory.finish({
        "vllm": "vllm", "site_packages": "", "trees": trees, "record": record, "listed": listed, "entry_points": points,
        "injected": injected, "versions": versions, "copies": [], "environment": {}, "python": {},
    })  # fmt: skip


def _tree(origin: str, digests: Mapping[str, tuple[int, str]], tops: set[str]) -> dict[str, Any]:
    inside = {
        name: value
        for name, value in digests.items()
        if name.split("/")[0] in tops and "/__pycache__/" not in name and not name.endswith(".pyc")
    }
    program = {n for n, (size, _) in inside.items() if size > 1 << 20 and "." not in n.rsplit("/", 1)[-1]}
    files = [
        [n, size, digest]
        for n, (size, digest) in sorted(inside.items())
        if n.endswith(".py") or inventory.is_binary(n) or n in program
    ]
    return {"origin": origin, "root": "", "files": files, "failed": [], "others": {}}


def read_tarball(path: Path, store: Store) -> tuple[dict[str, Any], dict[str, list[str] | None]]:
    """Inventory and op schemas of a tarball of a site-packages folder (any folder above it is left out); its sources
    go into the store."""
    digests: dict[str, tuple[int, str]] = {}
    schemas: dict[str, list[str] | None] = {}
    texts: dict[str, str] = {}
    refused: list[list[str]] = []
    try:
        for name, member, size, why in _members(path):
            if member is None:
                refused.append([name, why])
                continue
            if not name.endswith(".py") and not _is_metadata(name):
                with member as file:
                    length, digest, found = _read_through(file, inventory.is_binary(name))
                digests[name] = length, digest
                if found is not None:
                    schemas[digest] = found
                continue
            if size > MAX_SOURCE:
                refused.append([name, f"larger than {MAX_SOURCE} bytes"])
                continue
            body = member.read()
            digest = hashlib.sha256(body).hexdigest()
            digests[name] = len(body), digest
            if name.endswith(".py"):
                if not store.has(digest):
                    store.put(digest, body)
            elif _is_metadata(name):
                texts[name] = body.decode("utf-8", "replace")
    except DdauditError:
        raise
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno == 28:
            raise
        raise _broken(path, error, "tarball") from None
    above = _folder_above(digests)
    cut = len(above)
    data = of_members(
        {n[cut:]: v for n, v in digests.items() if n.startswith(above)},
        {n[cut:]: t for n, t in texts.items() if n.startswith(above)},
        path,
    )
    data["trees"][0]["failed"] += [
        [n[cut:], why] for n, why in refused if n.startswith(f"{above}vllm/") and n.endswith((".py", ".so"))
    ]
    return data, schemas


def _members(path: Path) -> Iterator[tuple[str, IO[bytes] | None, int, str]]:
    """(name, its bytes, size, why not) of each member that is no folder, in the order of the stream."""
    total = count = 0
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            count += 1
            name = member.name.removeprefix("./")
            total += max(0, member.size)
            if count > MAX_MEMBERS or total > MAX_TOTAL:
                raise ValueError("it would unpack to far more than any install holds")
            if member.isdir():
                continue
            if not member.isreg():
                yield name, None, 0, "not a regular file"
            elif name.startswith("/") or ".." in name.split("/"):
                yield name, None, 0, "a path outside of the archive"
            else:
                yield name, archive.extractfile(member), member.size, ""


def _folder_above(names: Mapping[str, Any]) -> str:
    """What stands before ``vllm/__init__.py``; the shortest, since a build folder may hold another copy."""
    found = sorted(
        (name[: -len("vllm/__init__.py")] for name in names if ("/" + name).endswith("/vllm/__init__.py")), key=len
    )
    return found[0] if found else ""


def _check_names(names: Mapping[str, Any]) -> None:
    for name in names:
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise ValueError(f"a member named {name[:80]!r}")


def _is_metadata(name: str) -> bool:
    parts = name.split("/")
    top = parts[-2] if len(parts) > 1 else ""
    return (
        top.endswith(".dist-info") and parts[-1] in ("METADATA", "RECORD", "entry_points.txt", "direct_url.json")
    ) or name.endswith(".pth")


def _name_and_version(folder: str, text: str) -> tuple[str, str]:
    name, _, version = folder.removesuffix(".dist-info").partition("-")
    for line in text.splitlines():
        if not line.strip():
            break
        if line.startswith("Name:"):
            name = line[5:].strip()
        elif line.startswith("Version:"):
            version = line[8:].strip()
    return name.lower().replace("_", "-").replace(".", "-"), version


def _broken(path: Path, error: Exception, kind: str) -> DdauditError:
    why = str(error) or type(error).__name__
    return host(
        f"broken-{kind}",
        f"{path.name} is not a readable {kind}",
        why[:200],
        "fetch it again, and compare its size with the original's",
    )
