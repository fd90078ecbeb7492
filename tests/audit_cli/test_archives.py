"""Wheels and tarballs are read in place; what is broken or hostile is an error, or a file that is named."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from audit_cli import releases
from audit_cli.archive import Wheel, read_tarball
from audit_cli.errors import DdauditError
from audit_cli.inventory import parse
from audit_cli.store import Store
from probes import inventory as probe
from tests.audit_cli.installs import CHAIN, FILES, audit_of, ddaudit, wheel, write


def _tar(file: Path, folder: Path, prefix: str = "", mode: str = "w:gz") -> Path:
    with tarfile.open(file, mode) as archive:  # type: ignore[call-overload]
        archive.add(folder, prefix or ".")
    return file


def test_a_wheel_a_folder_and_a_tarball_of_it_have_the_same_files(tmp_path: Path) -> None:
    site = write(tmp_path / "site")
    of_wheel = parse(Wheel(wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", site), tmp_path / "cache").data)
    of_folder = parse(probe.of_folder(str(site), {}))
    store = Store(tmp_path / "store")
    of_tarball = parse(
        read_tarball(_tar(tmp_path / "site.tar.gz", site, "ml-env/lib/python3.12/site-packages"), store)[0]
    )
    for inventory in (of_wheel, of_folder, of_tarball):
        assert {(f.path, f.sha256, f.stock) for f in inventory.files} == {
            (f.path, f.sha256, f.stock) for f in of_wheel.files
        }
        assert inventory.record == of_wheel.record and inventory.record.status == "clean"
        assert inventory.record.files == len(FILES) and inventory.versions["vllm"] == "0.99.0"
    found = next(f for f in of_tarball.files if f.path.endswith("rejection_sampler.py"))
    assert store.get(found.sha256) == CHAIN.encode()


@pytest.mark.wheel
@pytest.mark.parametrize(("version", "files"), [("0.20.2", 1723), ("0.23.0", 1914), ("0.33.0", 3231)])
def test_published_wheels_are_what_their_record_says(
    version: str, files: int, wheel_file: Callable[[str], Path], tmp_path: Path
) -> None:
    read = Wheel(wheel_file(version), tmp_path, trust=False)
    known = Wheel(wheel_file(version), tmp_path / "known")  # from the list of releases: what reading it whole found
    assert releases.schemas_of(releases.sha256_of(wheel_file(version))) == read.schemas
    assert known.data == read.data and known.schemas == read.schemas
    inventory = parse(read.data)
    assert (inventory.record.status, inventory.record.files) == ("clean", files)
    assert inventory.versions == {"vllm": version}
    assert all(found.stock for found in inventory.files)
    schemas = [schema for found in read.schemas.values() for schema in found or ()]
    assert any(schema.startswith("rms_norm(Tensor! result, Tensor input") for schema in schemas)
    assert {point.group for point in inventory.entry_points} <= {"vllm.general_plugins"}
    again = Wheel(wheel_file(version), tmp_path)  # from the index this time
    assert again.data == read.data and again.schemas == read.schemas
    assert again.get(inventory.sources[0].sha256) == read.get(inventory.sources[0].sha256)


@pytest.mark.parametrize("cut", [10, 600, -10])
def test_a_broken_wheel_is_named(home: Path, tmp_path: Path, cut: int) -> None:
    file = wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", write(tmp_path / "site"))
    file.write_bytes(file.read_bytes()[:cut])
    done = ddaudit("scan", f"wheel:{file}", "--json")
    assert done.returncode == 3
    assert '"broken-wheel"' in done.stdout
    assert not list((home / "cache").rglob("*.json"))


def test_a_wheel_with_a_flipped_byte_is_named(home: Path, tmp_path: Path) -> None:
    file = wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", write(tmp_path / "site"))
    with zipfile.ZipFile(file) as archive:
        info = archive.getinfo("vllm/v1/sample/rejection_sampler.py")
    data = bytearray(file.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + 8] ^= 0xFF
    file.write_bytes(data)
    done = ddaudit("scan", f"wheel:{file}")
    assert (done.returncode, done.stdout) == (3, "")
    assert "is not a readable wheel" in done.stderr


@pytest.mark.parametrize("name", ["site.tar", "site.tar.gz", "site.tar.xz"])
def test_a_cut_tarball_is_named(home: Path, tmp_path: Path, name: str) -> None:
    mode = {"tar": "w", "gz": "w:gz", "xz": "w:xz"}[name.rsplit(".", 1)[-1]]
    file = _tar(tmp_path / name, write(tmp_path / "site"), mode=mode)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = ddaudit("scan", f"dir:{file}")
    assert (done.returncode, done.stdout) == (3, "")
    assert "is not a readable tarball" in done.stderr


def test_a_tarball_of_something_else_has_no_vllm(home: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.py").write_text("")
    done = ddaudit("scan", f"dir:{_tar(tmp_path / 'a.tar.gz', tmp_path / 'other')}")
    assert done.returncode == 3 and "there is no vLLM" in done.stderr


def test_hostile_members_write_nothing_and_are_named(tmp_path: Path) -> None:
    site = write(tmp_path / "site")
    file = tmp_path / "site.tar"
    with tarfile.open(file, "w") as archive:
        archive.add(site, ".")
        for name, kind, link in (
            ("vllm/../../../evil.py", tarfile.REGTYPE, ""),
            ("/evil-absolute.py", tarfile.REGTYPE, ""),
            ("vllm/link.py", tarfile.SYMTYPE, "/etc/passwd"),
            ("vllm/hard.py", tarfile.LNKTYPE, "/etc/passwd"),
            ("vllm/pipe.py", tarfile.FIFOTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            archive.addfile(member, io.BytesIO())
    data, _ = read_tarball(file, Store(tmp_path / "store"))
    inventory = parse(data)
    assert {path for path, _ in inventory.failed} == {
        "vllm/link.py",
        "vllm/hard.py",
        "vllm/pipe.py",
        "vllm/../../../evil.py",
    }
    assert {f.path for f in inventory.files} == set(FILES)
    assert not list(tmp_path.rglob("evil*")) and not Path("/evil-absolute.py").exists()
    assert all(len(path.name) == 64 for path in (tmp_path / "store").rglob("*") if path.is_file())


def test_a_link_in_a_tarball_makes_the_scan_incomplete(home: Path, tmp_path: Path) -> None:
    site = write(tmp_path / "site")
    (site / "vllm" / "v1" / "sample" / "rejection_sampler.py").unlink()
    (site / "vllm" / "v1" / "sample" / "rejection_sampler.py").symlink_to("/etc/hostname")
    done = ddaudit("scan", f"dir:{_tar(tmp_path / 'site.tar.gz', site)}", "--json")
    assert done.returncode == 4
    assert any("rejection_sampler.py" in error["message"] for error in audit_of(done)["errors"])


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("audit_cli.archive.MAX_TOTAL", 1 << 20)
    site = write(tmp_path / "site", {**FILES, "vllm/big.bin": b"\0" * (2 << 20)})
    with pytest.raises(DdauditError, match="not a readable tarball"):
        read_tarball(_tar(tmp_path / "site.tar.gz", site), Store(tmp_path / "store"))
    with pytest.raises(DdauditError, match="not a readable wheel"):
        Wheel(wheel(tmp_path / "vllm-0.99.0-py3-none-any.whl", site), tmp_path / "cache")
