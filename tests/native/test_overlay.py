"""The overlay folder: what importlib.metadata finds through PYTHONPATH alone, and what is left when it is deleted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree
from ddtree.native.__main__ import main
from ddtree.native.overlay import content_hash, write_overlay

PROBE = """
from importlib.metadata import entry_points
found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "ddtree"]
assert len(found) == 1, found
register = found[0].load()
import ddtree, sys
print(ddtree.__file__)
register(); register()
assert "torch" not in sys.modules or "vllm" in sys.modules
"""


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE], env={"PYTHONPATH": str(folder)}, cwd="/", capture_output=True, text=True
    )


def test_python_finds_the_plugin_in_the_overlay_and_only_there(tmp_path):
    folder = write_overlay(tmp_path / "overlay")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder))
    shutil.rmtree(folder)
    assert run(folder).returncode != 0


def test_writing_twice_leaves_one(tmp_path, capsys):
    assert main(["overlay", str(tmp_path / "o")]) == 0
    assert main(["overlay", str(tmp_path / "o")]) == 0
    assert len(list((tmp_path / "o").glob("*.dist-info"))) == 1
    assert not list((tmp_path / "o").rglob("__pycache__"))


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        write_overlay(tmp_path)
    assert main(["overlay", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_the_name_follows_the_content(tmp_path):
    package = tmp_path / "ddtree"
    shutil.copytree(Path(ddtree.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = content_hash(package)
    (package / "tree.py").write_text((package / "tree.py").read_text() + "\n# changed\n")
    assert content_hash(package) != before
