"""Verdicts follow the code and never the version: a fix brought into an old release is seen, a fix taken out of a new
one too."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rules.native_adapter import seams
from rules.testing import tree_from_dir
from rules.tree import InstallTree
from tests.rules.history import answers, edited, release, with_file, without_file

pytestmark = pytest.mark.wheel

Wheels = Callable[[str], Path]
V1 = "vllm/v1/worker/gpu_model_runner.py"
V2 = "vllm/v1/worker/gpu/model_runner.py"
SPEC = "vllm/config/speculative.py"
CONFIG = "vllm/config/vllm.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
DRAFTER = "vllm/model_executor/models/qwen3_dflash.py"
LOADER = "vllm/v1/worker/gpu/spec_decode/dflash/utils.py"
EAGLE_UTILS = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
GDN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
GATHER = "mixed_qkv_spec = mixed_qkv.index_select(0, spec_token_indx)\n"
SEARCH = "max_num_blocks = max_length // block_size\n        # Search from right"
WINDOW = """

def window_of(config, layer):
    kinds = getattr(config, "layer_types", None)
    return config.sliding_window if kinds and kinds[layer] == "sliding_attention" else None
"""

# rule, release, file, (old, new)..., outcome before, outcome after
BACKPORTS = [
    (
        "aux-layer-offset",
        "0.20.2",
        V1,
        [('dflash_config.get("target_layer_ids")', '[n + 1 for n in dflash_config.get("target_layer_ids") or ()]')],
        "no",
        "yes",
    ),
    (
        "aux-layer-offset",
        "0.21.0",
        V1,
        [("return tuple(layer_ids)", "return tuple(map(lambda n: 1 + n, layer_ids))")],
        "no",
        "yes",
    ),
    (
        "drafter-sliding-window",
        "0.24.0",
        DRAFTER,
        [
            (
                "            attn_type=attn_type,\n        )\n        self.q_norm",
                (
                    "            attn_type=attn_type,\n"
                    "            per_layer_sliding_window=window_of(None, 0),\n        )\n"
                    "        self.q_norm"
                ),
            ),
            ("logger = init_logger(__name__)\n", "logger = init_logger(__name__)\n" + WINDOW),
        ],
        "no",
        "yes",
    ),
    (
        "eagle-block-drop",
        "0.20.2",
        SCHEDULER,
        [
            (
                "if speculative_config.use_eagle():",
                "if speculative_config.use_eagle() and not speculative_config.use_dflash():",
            )
        ],
        "no",
        "yes",
    ),
    (
        "eagle-block-drop",
        "0.30.0",
        SPEC,
        [
            (
                "return self.use_eagle() and not self.disable_eagle_block_drop",
                'return self.use_eagle() and self.method != "dflash" and not self.disable_eagle_block_drop',
            )
        ],
        "no",
        "yes",
    ),
    (
        "gdn-gate-gather",
        "0.23.0",
        GDN,
        [
            (
                GATHER,
                GATHER
                + "                x = a.index_select(0, spec_token_indx)\n                y = b[spec_token_indx]\n",
            )
        ],
        "no",
        "yes",
    ),
    (
        "uniform-decode-guard",
        "0.23.0",
        V1,
        [
            (
                "uniform_decode = self._is_uniform_decode(",
                "uniform_decode = not self.batch_has_prefill and self._is_uniform_decode(",
            )
        ],
        "no",
        "yes",
    ),
    (
        "uniform-decode-guard",
        "0.20.2",
        V1,
        [
            (
                "and (num_tokens == max_num_scheduled_tokens * num_reqs)",
                "and (num_tokens == max_num_scheduled_tokens * num_reqs) and not any_prefill",
            ),
            (
                "        force_uniform_decode: bool | None = None,\n    ) -> bool:",
                "        force_uniform_decode: bool | None = None,\n        any_prefill: bool = False,\n    ) -> bool:",
            ),
            (
                "            force_uniform_decode=force_uniform_decode,\n        )\n        # Encoder",
                (
                    "            force_uniform_decode=force_uniform_decode,\n"
                    "            any_prefill=self.input_batch.is_prefilling.any(),\n        )\n"
                    "        # Encoder"
                ),
            ),
        ],
        "no",
        "yes",
    ),
    (
        "mamba-drop-flag",
        "0.33.0",
        MANAGER,
        [(SEARCH, SEARCH.replace("\n", "\n        if drop_eagle_block:\n            max_num_blocks -= 1\n", 1))],
        "no",
        "yes",
    ),
    (
        "mamba-drop-flag",
        "0.20.2",
        MANAGER,
        [(SEARCH, SEARCH.replace("block_size\n", "block_size - int(use_eagle)\n"))],
        "no",
        "yes",
    ),
    (
        "lossless-only",
        "0.33.0",
        SPEC,
        [('Literal["standard", "synthetic", "block", "fly"]', 'Literal["standard", "block"]')],
        "no",
        "yes",
    ),
    (
        "own-lm-head",
        "0.24.0",
        LOADER,
        [
            (
                'getattr(dflash_model, "draft_id_to_target_id", None) is None',
                'not getattr(dflash_model, "has_own_lm_head", False)',
            )
        ],
        "yes",
        "yes",
    ),
    (
        "dflash-support",
        "0.23.0",
        "vllm/v1/worker/gpu/spec_decode/__init__.py",
        [
            (
                "    if speculative_config",
                (
                    '    if speculative_config.method == "dflash":\n'
                    "        return DFlashSpeculator(vllm_config, device)\n    if speculative_config"
                ),
            )
        ],
        "yes",
        "yes",
    ),
]
REVERTS = [
    (
        "aux-layer-offset",
        "0.33.0",
        V1,
        [("i + 1 for i in (dflash_config", "i for i in (dflash_config")],
        "yes",
        "partial",
    ),
    (
        "drafter-sliding-window",
        "0.33.0",
        DRAFTER,
        [("            per_layer_sliding_window=sliding_window,\n", "")],
        "yes",
        "no",
    ),
    (
        "drafter-sliding-window",
        "0.26.0",
        DRAFTER,
        [("per_layer_sliding_window=sliding_window", "per_layer_sliding_window=None")],
        "yes",
        "no",
    ),
    (
        "own-lm-head",
        "0.33.0",
        LOADER,
        [
            (
                (
                    '        and not getattr(dflash_model.config, "has_own_lm_head", False)\n'
                    "        and _should_share(\n"
                    '            dflash_model, "has_own_lm_head", draft_lm_head, target_lm_head\n'
                    "        )\n"
                ),
                "",
            )
        ],
        "yes",
        "no",
    ),
    (
        "own-lm-head",
        "0.24.0",
        LOADER,
        [('        and getattr(dflash_model, "draft_id_to_target_id", None) is None\n', "")],
        "yes",
        "no",
    ),
    (
        "eagle-block-drop",
        "0.33.0",
        SPEC,
        [("return self.use_eagle() and not (self.use_dflash() or self.use_dspark())", "return self.use_eagle()")],
        "yes",
        "no",
    ),
    (
        "eagle-block-drop",
        "0.33.0",
        SCHEDULER,
        [
            (
                "self.use_eagle_block_drop = speculative_config.use_eagle_block_drop()",
                "self.use_eagle_block_drop = speculative_config.use_eagle()",
            )
        ],
        "yes",
        "no",
    ),
    ("gdn-gate-gather", "0.33.0", GDN, [("b_spec = b.index_select(0, spec_token_indx)", "b_spec = b")], "yes", "no"),
    (
        "uniform-decode-guard",
        "0.33.0",
        "vllm/v1/worker/utils.py",
        [("if decode_graph_eligible and is_uniform_query_len(", "if is_uniform_query_len(")],
        "yes",
        "no",
    ),
    (
        "uniform-decode-guard",
        "0.33.0",
        V2,
        [("num_reqs, num_toks, max_query_len, decode_graph_eligible\n", "num_reqs, num_toks, max_query_len, True\n")],
        "yes",
        "no",
    ),
    (
        "lossless-only",
        "0.23.0",
        SPEC,
        [('Literal["standard", "synthetic"]', 'Literal["standard", "gentle"]')],
        "no",
        "unknown",
    ),
    (
        "dflash-support",
        "0.23.0",
        V1,
        [("elif self.speculative_config.use_dflash():", "elif self.speculative_config.use_suffix():")],
        "yes",
        "partial",
    ),
    (
        "dflash-support",
        "0.20.2",
        SPEC,
        [('DFlashModelTypes = Literal["dflash"]', 'DFlashModelTypes = Literal["eagle"]')],
        "yes",
        "partial",
    ),
]
# The same code under other names is still found.
RENAMES = [
    (
        "aux-layer-offset",
        "0.33.0",
        V1,
        [
            ("_get_eagle3_aux_layers_from_config", "_taps"),
            ("dflash_config", "my_dflash_stuff"),
            ("layer_ids", "numbers"),
            ("target_numbers", "target_layer_ids"),
        ],
        "yes",
    ),
    (
        "uniform-decode-guard",
        "0.23.0",
        V1,
        [("_is_uniform_decode", "_all_alike"), ("max_num_scheduled_tokens", "longest")],
        "no",
    ),
    ("gdn-gate-gather", "0.33.0", GDN, [("a_spec", "left"), ("b_spec", "right"), ("mixed_qkv", "packed")], "yes"),
    ("mamba-drop-flag", "0.33.0", MANAGER, [("drop_eagle_block", "drop_tail"), ("MambaManager", "StateManager")], "no"),
    (
        "own-lm-head",
        "0.33.0",
        LOADER,
        [("load_dflash_model", "attach"), ("target_lm_head", "theirs"), ("draft_lm_head", "mine")],
        "yes",
    ),
    ("dflash-support", "0.20.2", V1, [("DFlashProposer", "BlockDFlashDrafter")], "yes"),
]


@pytest.mark.parametrize(("rule", "version", "path", "changes", "before", "after"), BACKPORTS + REVERTS)
def test_an_edit_flips_the_verdict(
    wheel_tree: Wheels, rule: str, version: str, path: str, changes: list[tuple[str, str]], before: str, after: str
) -> None:
    tree = release(wheel_tree, version)
    assert answers(tree, [rule])[rule].outcome == before
    verdict = answers(edited(tree, path, *changes), [rule])[rule]
    assert verdict.outcome == after, verdict.summary


@pytest.mark.parametrize(("rule", "version", "path", "changes", "outcome"), RENAMES)
def test_names_do_not_matter(
    wheel_tree: Wheels, rule: str, version: str, path: str, changes: list[tuple[str, str]], outcome: str
) -> None:
    assert answers(edited(release(wheel_tree, version), path, *changes), [rule])[rule].outcome == outcome


@pytest.mark.parametrize(
    "rule", ["aux-layer-offset", "eagle-block-drop", "gdn-gate-gather", "own-lm-head", "lossless-only"]
)
def test_the_version_number_says_nothing(wheel_tree: Wheels, rule: str) -> None:
    tree = dataclasses.replace(release(wheel_tree, "0.33.0"), vllm_version="0.20.2+local")
    assert answers(tree, [rule])[rule].outcome == answers(release(wheel_tree, "0.33.0"), [rule])[rule].outcome


def test_dflash_support_names_the_runners_that_a_backport_adds(wheel_tree: Wheels) -> None:
    rule, version, path, changes, _, _ = BACKPORTS[-1]
    verdict = answers(edited(release(wheel_tree, version), path, *changes), [rule])[rule]
    assert {item["runner"] for item in verdict.items} == {"V1", "V2"}


def test_runner_follows_the_code(wheel_tree: Wheels) -> None:
    def runners(tree: InstallTree) -> list[str]:
        return [str(item["runner"]) for item in answers(tree, ["runner-in-force"])["runner-in-force"].items]

    old, new = release(wheel_tree, "0.23.0"), release(wheel_tree, "0.33.0")
    v2_knows_dflash = edited(
        old,
        CONFIG,
        ('not in ("eagle", "eagle3", "mtp"):', 'not in ("eagle", "eagle3", "mtp", "dflash"):'),
        (
            "if speculative_config.parallel_drafting:",
            'if speculative_config.parallel_drafting and speculative_config.method != "dflash":',
        ),
    )
    assert runners(v2_knows_dflash) == ["V2", "V1"]
    listed = edited(
        v2_knows_dflash, CONFIG, ('        "Qwen3ForCausalLM",\n', '        "Qwen3_5ForConditionalGeneration",\n')
    )
    assert runners(listed) == ["V1", "V2"]
    no_longer = edited(new, CONFIG, ('in ("suffix", "custom_class"):', 'in ("suffix", "custom_class", "dflash"):'))
    assert runners(no_longer) == ["V1", "V1"]
    flipped = edited(
        new,
        "vllm/v1/worker/gpu_worker.py",
        ("= vllm_config.use_v2_model_runner", "= not vllm_config.use_v2_model_runner"),
    )
    assert runners(flipped) == ["V1", "V1"]


@pytest.mark.parametrize(
    ("rule", "version", "path"),
    [
        ("runner-in-force", "0.33.0", "vllm/v1/worker/gpu_worker.py"),
        ("drafter-sliding-window", "0.33.0", DRAFTER),
        ("own-lm-head", "0.33.0", LOADER),
        ("eagle-block-drop", "0.33.0", SPEC),
        ("gdn-gate-gather", "0.33.0", GDN),
        ("mamba-drop-flag", "0.33.0", MANAGER),
        ("spec-methods", "0.33.0", SPEC),
        ("lossless-only", "0.33.0", SPEC),
    ],
)
def test_a_missing_place_is_unknown_and_never_no(wheel_tree: Wheels, rule: str, version: str, path: str) -> None:
    assert answers(without_file(release(wheel_tree, version), path), [rule])[rule].outcome == "unknown"


def test_a_file_on_the_pythonpath_wins(wheel_tree: Wheels) -> None:
    """The file that Python would import decides, not the one that lies in site-packages."""
    tree = release(wheel_tree, "0.20.2")
    _, _, path, changes, _, _ = BACKPORTS[0]
    patched = next(f for f in edited(tree, path, *changes).files if f.path == path)
    over = dataclasses.replace(patched, origin="pythonpath:0")
    both = dataclasses.replace(edited(tree, path, *changes), files=(*tree.files, over))
    got = answers(both, ["aux-layer-offset", "plugins"])
    assert got["aux-layer-offset"].outcome == "yes"
    assert [item["replaces_vllm_files"] for item in got["plugins"].items if item["kind"] == "pythonpath"] == [1]


def _copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, copy_function=os.symlink)
    return to


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def test_a_patched_install_is_no_longer_what_was_published(wheel_tree: Wheels, tmp_path: Path) -> None:
    site = _copy(wheel_tree("0.23.0"), tmp_path / "site")
    _replace(site / V1, (site / V1).read_text() + "\n# patched\n")
    _replace(site / "vllm/v1/spec_decode/left_behind.py", "x = 1\n")
    (site / GDN).unlink()
    verdict = answers(tree_from_dir(site), ["record-integrity"])["record-integrity"]
    assert verdict.outcome == "no"
    assert {(item["what"], item["file"]) for item in verdict.items} == {
        ("changed", V1),
        ("not in RECORD", "vllm/v1/spec_decode/left_behind.py"),
        ("missing", GDN),
    }
    done = subprocess.run(["sh", "-c", verdict.recheck], cwd=site, capture_output=True, text=True)
    assert done.stdout == verdict.recheck_expect and "1 changed, 1 missing, 1 not in RECORD" in done.stdout


def test_a_plugin_is_named_with_its_code(wheel_tree: Wheels, tmp_path: Path) -> None:
    site = _copy(wheel_tree("0.23.0"), tmp_path / "site")
    (site / "walker").mkdir()
    (site / "walker" / "entry.py").write_text("def register(): ...\n")
    info = site / "walker-1.2.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nwalk = walker.entry:register\n")
    (info / "RECORD").write_text("walker/entry.py,,\n")
    verdict = answers(tree_from_dir(site), ["plugins"])["plugins"]
    mine = [item for item in verdict.items if not item.get("own")]
    assert verdict.outcome == "yes" and verdict.summary.startswith("walker 1.2 (vllm.general_plugins: walk)")
    assert [(item["value"], item["file"], item["files"]) for item in mine] == [
        ("walker.entry:register", "walker/entry.py", 1)
    ]
    done = subprocess.run(["sh", "-c", verdict.recheck], cwd=site, capture_output=True, text=True)
    assert (
        done.stdout == verdict.recheck_expect
        and "walker vllm.general_plugins walk walker.entry:register" in done.stdout
    )
    (site / "walker" / "entry.py").unlink()
    assert answers(tree_from_dir(site), ["plugins"])["plugins"].outcome == "unknown"


def test_an_adapter_stops_fitting_when_a_seam_moves(wheel_tree: Wheels) -> None:
    tree = release(wheel_tree, "0.23.0")
    first = next(s for s in seams()[1][0]["seams"] if s["file"] == V1 and s["kind"] == "method")
    name = first["qualname"].rsplit(".", 1)[-1]
    verdict = answers(edited(tree, V1, (f"def {name}(", "def moved_elsewhere(")), ["native-adapter"])["native-adapter"]
    assert verdict.outcome == "no"
    assert any(first["qualname"] in problem for problem in verdict.items[0]["missing"])
    beside = answers(with_file(tree, "vllm/extra.py", "x = 1\n"), ["native-adapter"])["native-adapter"]
    assert beside.outcome == "yes"
    gone = answers(without_file(tree, V1), ["native-adapter"])["native-adapter"]
    assert gone.outcome == "no" and any(V1 in problem for problem in gone.items[0]["missing"])
