"""Export: names, keys, both RoPE spellings; what is read back drafts the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from ddtree.checkpoint import TargetShape, load_drafter, read_config
from ddtree.training.pipeline import run_eval, run_export, target_shape
from ddtree.training.report import eval_text
from ddtree.training.smoke import LAYER_IDS
from ddtree.training.target import load_target

from .conftest import World

Trained = tuple[Path, dict[str, object]]


def test_both_forms_read_back(world: World, trained: Trained, tmp_path: Path) -> None:
    table = run_eval(trained[0] / "best", world.target, [world.held], (8, 16), dtype="float32", samples=100)
    errors = run_export(trained[0], world.target, tmp_path, ("zlab", "speculators"), table, "toy")
    assert set(errors) == {"zlab", "speculators"} and max(errors.values()) < 1e-5
    zlab = json.loads((tmp_path / "zlab" / "config.json").read_text())
    assert zlab["architectures"] == ["DFlashDraftModel"] and zlab["model_type"] == "qwen3"
    assert zlab["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in zlab["dflash_config"]["target_layer_ids"]]
    assert zlab["dflash_config"]["causal"] is False and zlab["dflash_config"]["mask_token_id"] == 3
    assert zlab["block_size"] == zlab["dflash_config"]["block_size"] == 8
    assert zlab["num_target_layers"] == 4
    assert zlab["rope_theta"] == zlab["rope_parameters"]["rope_theta"] and zlab["rope_scaling"] is None
    assert zlab["layer_types"] == ["full_attention"] * 2
    with safe_open(tmp_path / "zlab" / "model.safetensors", "pt") as handle:
        names = set(handle.keys())
        assert len(names) == 3 + 11 * 2
        assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
        assert handle.get_tensor("fc.weight").dtype == torch.bfloat16
        assert handle.get_tensor("norm.weight").dtype == torch.float32
    spec = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert spec["speculators_model_type"] == "dflash" and spec["aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert spec["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert spec["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    with safe_open(tmp_path / "speculators" / "model.safetensors", "pt") as handle:
        assert set(handle.keys()) == names | {"embed_tokens.weight", "lm_head.weight"}
    assert read_config(tmp_path / "zlab").target_layer_ids == read_config(tmp_path / "speculators").target_layer_ids
    text = (tmp_path / "zlab" / "README.md").read_text()
    assert '"method": "dflash"' in text and "prompt lookup" in text
    assert (tmp_path / "zlab" / "tau.png").stat().st_size > 5000


def test_eval_prints_lookup_beside_tau(world: World, trained: Trained) -> None:
    table = run_eval(trained[0] / "best", world.target, [world.held], (16,), dtype="float32", samples=100)
    text = eval_text(table)
    assert "prompt lookup" in text and "tree-16" in text and "bonus included" in text
    chain = table["rules"]["chain"]
    assert chain["interval"][0] <= chain["tau"] <= chain["interval"][1]
    assert set(chain["by_category"]) == {"chat", "code"}
    assert table["rules"]["tree-16"]["tau"] > 1


def test_block_size_may_be_inside_dflash_config(world: World, trained: Trained, tmp_path: Path) -> None:
    run_export(trained[0], world.target, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["block_size"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    target = load_target(world.target, LAYER_IDS, torch.float32, "cpu")
    assert load_drafter(tmp_path / "out", target_shape(target), "cpu", torch.float32).config.block_size == 8


def test_the_retrained_drafter_in_the_repository() -> None:
    folder = Path(__file__).parents[1] / "assets" / "smollm2-135m-dflash-retrained"
    drafter = load_drafter(folder, TargetShape(576, 30, 49152), "cpu", torch.float32)
    assert drafter.config.target_layer_ids == (1, 8, 14, 20, 27) and drafter.config.block_size == 8
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 26_000_000
    assert drafter.norm.weight.dtype == torch.float32
    table = json.loads((folder / "acceptance.json").read_text())
    assert table["rules"]["chain"]["tau"] >= 2.8 and table["rules"]["tree-64"]["tau"] >= 3.9
    assert table["rules"]["chain"]["tau_not_looping"] >= table["prompt_lookup"]["tau_not_looping"] + 0.4
