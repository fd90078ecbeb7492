"""The probes that need no GPU, on real processes, folders and servers; and on Python 3.8 where it is installed."""

from __future__ import annotations

import http.server
import json
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes import host, models, serving, venv

EXPOSITION = b"""# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
python_gc_objects_collected_total{generation="0"} 5
vllm:request_success_total{finished_reason="st\\"op"} 3
vllm:prefix_cache_hits_total nonsense
"""


@pytest.fixture
def metrics_port() -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(EXPOSITION)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def test_the_host_is_described() -> None:
    facts = host.take({"paths": ["/nonexistent"]})
    assert facts["cpus"] >= 1 and facts["memory"]["MemTotal"] > 2**30
    assert "disk /nonexistent" in facts["missing"]
    if shutil.which("nvidia-smi") is None:
        assert facts["gpus"] == [] and "not installed" in facts["missing"]["gpus"]


def test_nvidia_smi_lines_are_parsed_and_short_ones_left_out() -> None:
    line = "0, NVIDIA H200, GPU-1, 143771, 17, 0, 9.0, 580.159.04, Disabled"
    assert host.rows(line + "\nERR!, x\n", host.GPU_FIELDS)[0]["compute_cap"] == "9.0"
    assert len(host.rows(line + "\nERR!, x\n", host.GPU_FIELDS)) == 1


def test_a_running_server_is_found_without_its_secrets(metrics_port: int, tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("import time\ntime.sleep(60)\n")
    argv = [
        sys.executable,
        str(script),
        "serve",
        "Qwen/Qwen3-8B",
        "--api-key",
        "hunter2",
        "hunter3",
        "--port",
        str(metrics_port),
        "--hf-token=hunter4",
        "--otlp-traces-endpoint",
        "http://me:hunter5@x/",
        "--max-num-seqs",
        "8",
    ]
    running = subprocess.Popen(argv)
    try:
        deadline = time.monotonic() + 10
        found: list[dict[str, Any]] = []
        while not found and time.monotonic() < deadline:  # the child has to get through exec first
            found = [s for s in serving.take({})["servers"] if s["pid"] == running.pid]
    finally:
        running.kill()
        running.wait()
    assert len(found) == 1
    assert "hunter" not in json.dumps(found)
    assert found[0]["argv"][-2:] == ["--max-num-seqs", "8"] and found[0]["cwd"] == str(Path.cwd())
    values = {(name, labels.get("position", "")): value for name, labels, value in found[0]["metrics"]}
    assert values[("vllm:spec_decode_num_drafts_total", "")] == 10.0
    assert values[("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0")] == 7.0
    assert not any("python_gc" in name for name, _ in values)


def test_a_silent_port_is_a_reason_and_not_a_crash() -> None:
    found, why = serving.metrics(1, 1.0)
    assert found is None and "port 1" in why


def test_the_environment_names_torch_without_importing_it() -> None:
    facts = venv.take({})
    assert facts["python"].startswith("3.") and "pytest" in facts["distributions"]
    assert ("missing" in facts["torch"]) or facts["torch"]["version"]


def test_a_model_folder_is_read_and_its_faults_are_named_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    (tmp_path / "generation_config.json").write_text('["a list"]')
    head = json.dumps({"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "whole.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 8)
    (tmp_path / "cut.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 3)
    (tmp_path / "pointer.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    read = models.read(str(tmp_path))
    faults = dict(read["problems"])
    assert set(faults) == {
        "config.json",
        "generation_config.json",
        "cut.safetensors",
        "pointer.safetensors",
        "gone.safetensors",
        "dangling.json",
    }
    assert read["tensors"] == {"w": ["BF16", [2, 2]]}


def test_a_hub_id_is_looked_up_in_the_cache_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "nothing is downloaded" in models.read("org/name")["problems"][0][1]
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    assert models.read("org/name")["config"]["model_type"] == "qwen3"


@pytest.mark.parametrize("probe", ["host", "serving", "venv", "models"])
def test_probes_run_on_old_pythons(probe: str) -> None:
    old = [str(path) for path in Path.home().glob(".pyenv/versions/3.8*/bin/python")]
    python = old[0] if old else sys.executable
    source = Path(host.__file__).with_name(f"{probe}.py").read_text() + "\nimport json\nprint(json.dumps(take({})))\n"
    done = subprocess.run([python, "-I", "-B", "-"], input=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
