"""Each finding has a case that raises it and a negative twin without the fault; released pairs are silent."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

import rules.lint
from rules.lint.flags import FlagError, parse_serve_args
from rules.lint.memory import plan
from rules.lint.model import Case, Gpu, Host, InstallFacts, ModelFolder, read_drafter
from rules.lint.run import lint

GOOD = {
    "aux-layer-offset": "yes",
    "drafter-sliding-window": "yes",
    "own-lm-head": "yes",
    "eagle-block-drop": "yes",
    "gdn-gate-gather": "yes",
    "uniform-decode-guard": "yes",
    "mamba-drop-flag": "yes",
    "tree-mask": "partial",
    "tree-build": "no",
}
METHODS = ("ngram", "eagle3", "mtp", "dflash", "dspark", "suffix")
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "block_size": 16,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
HYBRID: dict[str, Any] = {
    **TARGET,
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "num_hidden_layers": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "hidden_size": 5120,
    "head_dim": 256,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}
HYBRID_DRAFTER = {
    **DRAFTER,
    "hidden_size": 5120,
    "num_target_layers": 64,
    "vocab_size": 248320,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
FLAGS = (
    "--max-num-seqs 32 --max-num-batched-tokens 8192 --speculative-config"
    ' \'{"method":"dflash","num_speculative_tokens":15}\''
)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; None removes a key; "a.b" reaches into a nested object."""
    out = copy.deepcopy(base)
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = out
        for step in path:
            inner = inner.setdefault(step, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return out


def build(
    target: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    flags: str = FLAGS,
    hybrid: bool = False,
    tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    target_tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    template: str = "",
    gpus: tuple[Gpu, ...] = (),
    torch: str = "",
    cuda: str = "",
    runner: str = "V2",
    files: dict[str, int] | None = None,
    problems: tuple[tuple[str, str], ...] = (),
    methods: tuple[str, ...] = METHODS,
    **outcomes: str,
) -> Case:
    bases = (HYBRID, HYBRID_DRAFTER) if hybrid else (TARGET, DRAFTER)
    return Case(
        target=ModelFolder(
            "target",
            merged(bases[0], target or {}),
            tensors=target_tensors or {},
            template=template,
            files=files or {},
            problems=problems,
        ),
        drafter=read_drafter(ModelFolder("drafter", merged(bases[1], drafter or {}), tensors=tensors or {})),
        serve=parse_serve_args(flags),
        install=InstallFacts(
            "0.33.0",
            {**GOOD, **{k.replace("_", "-"): v for k, v in outcomes.items()}},
            methods,
            ("standard", "synthetic", "block"),
            runner,
            runner,
        ),
        host=Host(gpus, torch, cuda),
    )


def spec(body: str, rest: str = "--max-num-seqs 8 --max-num-batched-tokens 8192") -> str:
    return f"{rest} --speculative-config '{body}'"


K = '{"method":"dflash","num_speculative_tokens":%d}'
HEAD = {"lm_head.weight": ("BF16", (32000, 4096)), "fc.weight": ("BF16", (4096, 20480))}
A100, H200, B200 = (
    Gpu(n, m << 30, c) for n, m, c in (("A100", 80, (8, 0)), ("H200", 141, (9, 0)), ("B200", 180, (10, 0)))
)

# id -> (case that has the fault, negative twin)
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model-unreadable": ({"problems": (("config.json", "not JSON"),)}, {}),
    "weights-missing": (
        {"files": {"config.json": 900, "training_args.bin": 5000}},
        {"files": {"config.json": 900, "model.safetensors": 8 << 30}},
    ),
    "block-size-missing": ({"drafter": {"block_size": None}}, {}),
    "draft-tokens-exceed-block": ({"flags": spec(K % 16)}, {"flags": spec(K % 15)}),
    "dspark-block-cut": (
        {
            "drafter": {"architectures": ["Qwen3DSparkModel"]},
            "flags": spec('{"method":"dspark","num_speculative_tokens":7}'),
        },
        {
            "drafter": {"architectures": ["Qwen3DSparkModel"]},
            "flags": spec('{"method":"dspark","num_speculative_tokens":16}'),
        },
    ),
    "block-size-nested": (
        {"drafter": {"block_size": None, "dflash_config.block_size": 16}},
        {"drafter": {"dflash_config.block_size": 16}},
    ),
    "method-does-not-fit-drafter": ({"flags": spec('{"method":"eagle3","num_speculative_tokens":3}')}, {}),
    "architecture-missing": ({"drafter": {"architectures": None}}, {}),
    "method-not-in-install": ({"methods": ("ngram", "eagle3")}, {}),
    "dflash2-on-v1": (
        {"drafter": {"architectures": ["DFlash2DraftModel"]}, "runner": "V1"},
        {"drafter": {"architectures": ["DFlash2DraftModel"]}},
    ),
    "vocabulary-missing": ({"drafter": {"vocab_size": None}}, {}),
    "reduced-vocabulary-without-map": (
        {"drafter": {"draft_vocab_size": 32000}, "tensors": HEAD},
        {"drafter": {"draft_vocab_size": 32000}, "tensors": {**HEAD, "d2t": ("I64", (32000,))}},
    ),
    "vocabulary-differs": (
        {"drafter": {"vocab_size": 152064}, "tensors": {"fc.weight": ("BF16", (4096, 20480))}},
        {"drafter": {"vocab_size": 152064}, "tensors": HEAD},
    ),
    "own-head-overwritten": (
        {"drafter": {"vocab_size": 152064}, "tensors": HEAD, "own_lm_head": "no"},
        {"drafter": {"vocab_size": 152064}, "tensors": HEAD},
    ),
    "mask-token-missing": ({"drafter": {"dflash_config.mask_token_id": None}}, {}),
    "mask-token-is-live": ({"drafter": {"dflash_config.mask_token_id": 151645}}, {}),
    "mask-token-outside-embedding": (
        {"drafter": {"dflash_config.mask_token_id": 151940}},
        {"drafter": {"dflash_config.mask_token_id": 151935}},
    ),
    "layer-ids-missing": ({"drafter": {"dflash_config.target_layer_ids": None}}, {}),
    "layer-ids-out-of-range": (
        {"drafter": {"dflash_config.target_layer_ids": [1, 9, 17, 25, 36]}},
        {"drafter": {"dflash_config.target_layer_ids": [1, 9, 17, 25, 35]}},
    ),
    "layer-ids-not-ascending": ({"drafter": {"dflash_config.target_layer_ids": [1, 17, 9, 25, 33]}}, {}),
    "layer-ids-disagree": (
        {"drafter": {"eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25, 33]}},
        {"drafter": {"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]}},
    ),
    "layer-ids-off-by-one": (
        {"aux_layer_offset": "no"},
        {"aux_layer_offset": "no", "drafter": {"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]}},
    ),
    "layer-ids-do-not-fit-weights": (
        {"tensors": {"fc.weight": ("BF16", (4096, 16384))}},
        {"tensors": {"fc.weight": ("BF16", (4096, 20480))}},
    ),
    "target-depth-differs": ({"drafter": {"num_target_layers": 32}}, {}),
    "hidden-size-differs": (
        {"drafter": {"hidden_size": 2560}},
        {"drafter": {"hidden_size": 2560, "target_hidden_size": 4096}},
    ),
    "verifier-differs": (
        {"drafter": {"speculators_config.verifier.architectures": ["LlamaForCausalLM"]}},
        {"drafter": {"speculators_config.verifier.architectures": ["Qwen3ForCausalLM"]}},
    ),
    "dtype-differs": ({"drafter": {"torch_dtype": "float16"}}, {}),
    "rope-theta-missing": ({"drafter": {"rope_theta": None}}, {}),
    "rope-theta-nested": (
        {"drafter": {"rope_theta": None, "rope_parameters.rope_theta": 1000000}},
        {"drafter": {"rope_parameters.rope_theta": 1000000}},
    ),
    "drafter-partial-rotary": (
        {"drafter": {"partial_rotary_factor": 0.25}},
        {"drafter": {"partial_rotary_factor": 1.0}},
    ),
    "drafter-context-short": (
        {"flags": FLAGS + " --max-model-len 65536"},
        {"flags": FLAGS + " --max-model-len 32768"},
    ),
    "drafter-window-ignored": (
        {
            "drafter": {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048},
            "drafter_sliding_window": "no",
        },
        {"drafter": {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}},
    ),
    "mixed-windows-need-v2": (
        {
            "drafter": {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048},
            "runner": "V1",
        },
        {"drafter": {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}},
    ),
    "window-size-missing": (
        {"drafter": {"layer_types": ["sliding_attention"] * 5}},
        {"drafter": {"layer_types": ["sliding_attention"] * 5, "sliding_window": 4096}},
    ),
    "layer-types-count": ({"drafter": {"layer_types": ["full_attention"] * 4}}, {}),
    "speculators-causal": (
        {"drafter": {"speculators_model_type": "dflash", "sliding_window_non_causal": False}},
        {"drafter": {"speculators_model_type": "dflash", "sliding_window_non_causal": True}},
    ),
    "thinking-mode-differs": (
        {
            "template": "{% if enable_thinking %}",
            "drafter": {"ddtree_training.template_kwargs.enable_thinking": True},
            "flags": FLAGS + " --default-chat-template-kwargs '{\"enable_thinking\": false}'",
        },
        {
            "template": "{% if enable_thinking %}",
            "drafter": {"ddtree_training.template_kwargs.enable_thinking": False},
            "flags": FLAGS + " --default-chat-template-kwargs '{\"enable_thinking\": false}'",
        },
    ),
    "thinking-mode-unknown": ({"template": "{% if enable_thinking %}"}, {"template": "{{ messages }}"}),
    "quantised-target": ({"target": {"quantization_config.quant_method": "fp8"}}, {}),
    "batched-tokens-too-few": (
        {"flags": spec(K % 15, "--max-num-seqs 513 --max-num-batched-tokens 8192")},
        {"flags": spec(K % 15, "--max-num-seqs 512 --max-num-batched-tokens 8192")},
    ),
    "batch-limit-unset": (
        {"flags": spec(K % 64, ""), "drafter": {"block_size": 65}},
        {"flags": spec(K % 64), "drafter": {"block_size": 65}},
    ),
    "lossy-acceptance": (
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"rejection_sample_method":"synthetic"}')},
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"rejection_sample_method":"block"}')},
    ),
    "rejection-method-unknown": (
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"rejection_sample_method":"strict"}')},
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"rejection_sample_method":"standard"}')},
    ),
    "typical-acceptance": (
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"posterior_alpha":0.3}')},
        {},
    ),
    "dead-draft-max-model-len": (
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"max_model_len":4096}'), "runner": "V1"},
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"max_model_len":4096}')},
    ),
    "backend-gone": (
        {"flags": FLAGS + " --attention-backend TREE_ATTN"},
        {"flags": FLAGS + " --attention-backend FLASH_ATTN"},
    ),
    "tree-attention-is-not-verification": (
        {"flags": FLAGS + " --attention-backend TREE_ATTN", "tree_mask": "yes"},
        {"tree_mask": "yes"},
    ),
    "token-tree-gone": (
        {"flags": spec('{"method":"dflash","num_speculative_tokens":15,"speculative_token_tree":"[(0,)]"}')},
        {
            "flags": spec('{"method":"dflash","num_speculative_tokens":15,"speculative_token_tree":"[(0,)]"}'),
            "tree_build": "yes",
        },
    ),
    "draft-tokens-missing": ({"flags": spec('{"method":"dflash"}')}, {}),
    "draft-tokens-not-positive": ({"flags": spec(K % 0)}, {"flags": spec(K % 1)}),
    "eager-hides-the-cost": ({"flags": FLAGS + " --enforce-eager"}, {"flags": FLAGS + " --no-enforce-eager"}),
    "random-prompts": ({"flags": FLAGS + " --dataset-name random"}, {"flags": FLAGS + " --dataset-name sharegpt"}),
    "kv-dtype-with-drafter": (
        {"flags": FLAGS + " --kv-cache-dtype fp8"},
        {
            "flags": (
                spec('{"method":"dflash","num_speculative_tokens":15,"kv_cache_dtype":"auto"}')
                + " --kv-cache-dtype fp8"
            )
        },
    ),
    "head-size-on-gpu": ({"hybrid": True, "gpus": (A100,)}, {"hybrid": True, "gpus": (H200,)}),
    "flashinfer-drafter-on-blackwell": (
        {
            "flags": spec('{"method":"dflash","num_speculative_tokens":15,"attention_backend":"FLASHINFER"}'),
            "gpus": (B200,),
            "drafter_sliding_window": "no",
        },
        {
            "flags": spec('{"method":"dflash","num_speculative_tokens":15,"attention_backend":"FLASHINFER"}'),
            "gpus": (H200,),
            "drafter_sliding_window": "no",
        },
    ),
    "heads-not-divisible": ({"flags": FLAGS + " -tp 3"}, {"flags": FLAGS + " -tp 4"}),
    "gpus-too-few": ({"flags": FLAGS + " -tp 4", "gpus": (H200,)}, {"flags": FLAGS + " -tp 1", "gpus": (H200,)}),
    "pipeline-parallel": ({"flags": FLAGS + " -pp 2"}, {"flags": FLAGS + " -pp 1"}),
    "known-bad-torch-pair": (
        {"flags": FLAGS + " -tp 2", "torch": "2.10.0", "cuda": "12.8"},
        {"flags": FLAGS + " -tp 2", "torch": "2.11.0", "cuda": "13.0"},
    ),
    "target-gives-no-hidden-states": (
        {"target": {"model_type": "qwen3_next"}, "runner": "V1"},
        {"target": {"model_type": "qwen3_next"}},
    ),
    "structured-output": ({"flags": FLAGS + " --tool-call-parser hermes"}, {}),
    "prefix-cache-inert": (
        {"hybrid": True, "eagle_block_drop": "no"},
        {"hybrid": True, "eagle_block_drop": "no", "flags": FLAGS + " --no-enable-prefix-caching"},
    ),
    "prefix-cache-state": ({"hybrid": True, "mamba_drop_flag": "no"}, {"mamba_drop_flag": "no"}),
    "gdn-gates-not-gathered": ({"hybrid": True, "gdn_gate_gather": "no"}, {"gdn_gate_gather": "no"}),
    "prompt-of-one-plus-k": ({"hybrid": True, "uniform_decode_guard": "no"}, {"uniform_decode_guard": "no"}),
    "ngram-on-hybrid": (
        {"hybrid": True, "flags": spec('{"method":"ngram","num_speculative_tokens":4}')},
        {"flags": spec('{"method":"ngram","num_speculative_tokens":4}')},
    ),
    "many-drafts-on-old-gdn": (
        {"hybrid": True, "gdn_gate_gather": "no"},
        {"hybrid": True, "gdn_gate_gather": "no", "flags": spec(K % 4)},
    ),
    "states-per-draft-token": (
        {"hybrid": True, "flags": spec(K % 64), "drafter": {"block_size": 65}},
        {"hybrid": True},
    ),
    "memory-weights": (
        {"gpus": (A100,), "files": {"model.safetensors": 90 << 30}},
        {"gpus": (A100,), "files": {"model.safetensors": 16 << 30}},
    ),
    "memory-context": (
        {
            "gpus": (Gpu("A10", 24 << 30, (8, 6)),),
            "files": {"model.safetensors": 17 << 30},
            "flags": spec(K % 15) + " --max-model-len 40960",
        },
        {
            "gpus": (Gpu("A10", 24 << 30, (8, 6)),),
            "files": {"model.safetensors": 8 << 30},
            "flags": spec(K % 15) + " --max-model-len 8192",
        },
    ),
    "memory-plan": (
        {"gpus": (H200,), "files": {"model.safetensors": 16 << 30}},
        {"files": {"model.safetensors": 16 << 30}},
    ),
}


@pytest.mark.parametrize("id", PAIRS)
def test_a_fault_is_found_and_its_negative_twin_is_silent(id: str) -> None:
    faulty, clean = PAIRS[id]
    assert id in {f.id for f in lint(build(**faulty))}
    assert id not in {f.id for f in lint(build(**clean))}


def test_every_finding_of_the_source_has_a_pair() -> None:
    text = "".join(p.read_text() for p in Path(rules.lint.__file__).parent.glob("*.py"))
    ids = set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', text)) - {"check-failed"}
    assert ids == set(PAIRS)


def test_every_error_and_warning_says_what_to_do() -> None:
    for faulty, _ in PAIRS.values():
        for found in lint(build(**faulty)):
            assert found.severity == "info" or found.fix, found


# Published configs of released pairs (values from their model cards and configs; block 16, five layers unless said).
RELEASED = {
    "Qwen3-4B": (
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
        {"hidden_size": 2560, "intermediate_size": 9728},
    ),
    "Qwen3-8B": ({}, {}),
    "Qwen3-Coder-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "max_position_embeddings": 262144,
            "rope_theta": 10000000,
        },
        {
            "hidden_size": 2048,
            "num_target_layers": 48,
            "max_position_embeddings": 262144,
            "rope_theta": 10000000,
            "dflash_config.target_layer_ids": [1, 12, 23, 34, 45],
        },
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_dense_pairs_raise_no_alarm(name: str) -> None:
    target, drafter = RELEASED[name]
    assert [f for f in lint(build(target, drafter)) if f.severity != "info"] == []


def test_the_released_hybrid_pair_raises_no_alarm_on_an_install_that_has_the_fixes() -> None:
    windows = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
    assert [f for f in lint(build(hybrid=True, drafter=windows)) if f.severity != "info"] == []


def test_a_config_of_nonsense_is_a_finding_and_not_a_crash() -> None:
    for junk in (
        {"layer_types": 3},
        {"hidden_size": "x"},
        {"rope_parameters": []},
        {"eos_token_id": {"a": 1}},
        {"vocab_size": -1},
        {"architectures": "x"},
    ):
        lint(build(target=junk, drafter=junk))


def test_memory_plan_counts_target_and_drafter_kv() -> None:
    made = plan(build(gpus=(H200,), files={"model.safetensors": 16 << 30}))
    assert made is not None
    assert made.kv_per_token == 2 * 8 * 128 * 2 * (36 + 5)


def test_flags_are_read_as_people_write_them() -> None:
    flags = parse_serve_args(
        "vllm serve Qwen/Qwen3-8B -tp 2 \\\n --max_num_seqs=8 --no-enable-prefix-caching --speculative-config.method"
        " dflash --speculative-config.num_speculative_tokens 15 --gpu-memory-utilization 0.85 --seed -1"
    ).flags
    assert flags["model"] == "Qwen/Qwen3-8B" and flags["tensor-parallel-size"] == 2 and flags["max-num-seqs"] == 8
    assert flags["enable-prefix-caching"] is False and flags["speculative-config"] == {
        "method": "dflash",
        "num_speculative_tokens": 15,
    }
    assert flags["gpu-memory-utilization"] == 0.85 and flags["seed"] == -1


@pytest.mark.parametrize(
    ("line", "under"),
    [
        ("--speculative-config {method:dflash}", "method"),
        ("--max-num-seqs 4 junk", "junk"),
        ("--speculative-config '{\"a\": }'", "}"),
    ],
)
def test_what_does_not_parse_is_shown_with_a_caret(line: str, under: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_serve_args(line)
    _reason, shown, caret = str(caught.value).split("\n")
    assert shown[caret.index("^") :].startswith(under), str(caught.value)
