"""The drafter's layers against the target's: which it reads, of what width, with which rotary embedding and window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rules.lint.drafter import FLOAT_DTYPES, PULL, nested
from rules.lint.model import Case, Finding, ModelFolder


def layer_ids(case: Case) -> Iterator[Finding]:
    drafter, target = case.drafter, case.target
    if drafter is None or not drafter.family.startswith(("dflash", "dspark")):
        return
    file = f"{drafter.folder.name}/config.json"
    ids = drafter.layer_ids
    if ids is None:
        yield Finding(
            "layer-ids-missing",
            "warning",
            "the drafter's config does not say which target layers it reads",
            (file,),
            'Add "dflash_config": {"target_layer_ids": [...]}: loaders fall back to a default that may not be yours.',
        )
        return
    layers = target.number("num_hidden_layers") if target else None
    shown = (f"{file}: target layer ids {list(ids)}",)
    if layers is not None and any(not 0 <= i < layers for i in ids):
        yield Finding(
            "layer-ids-out-of-range",
            "error",
            f"a target layer id is outside the target's {layers} layers",
            shown,
            "This drafter was made for another target.",
        )
    if list(ids) != sorted(set(ids)):
        yield Finding(
            "layer-ids-not-ascending",
            "error",
            "target layer ids are not strictly ascending: features would be concatenated in another order",
            shown,
            "Write them in ascending order, as trained.",
        )
    if (
        drafter.aux_ids is not None
        and "dflash_config" in drafter.folder.config
        and drafter.aux_ids != tuple(i + 1 for i in ids)
    ):
        yield Finding(
            "layer-ids-disagree",
            "error",
            "target_layer_ids and eagle_aux_hidden_state_layer_ids do not name the same layers (k must be i + 1)",
            (*shown, f"{file}: eagle_aux_hidden_state_layer_ids={list(drafter.aux_ids)}"),
            f'Write "eagle_aux_hidden_state_layer_ids": {[i + 1 for i in ids]}.',
            PULL + "40727",
        )
    if case.install.outcome("aux-layer-offset") == "no" and drafter.aux_ids is None and not drafter.speculators:
        yield Finding(
            "layer-ids-off-by-one",
            "error",
            "this install feeds the drafter one layer too early (no +1 on target_layer_ids): acceptance falls without"
            " an error",
            (*shown, "verdict aux-layer-offset: no"),
            f'Add to the drafter\'s config "eagle_aux_hidden_state_layer_ids": {[i + 1 for i in ids]}: every release'
            " reads it first.",
            PULL + "40727",
        )
    width = drafter.folder.tensors.get("fc.weight") or drafter.folder.tensors.get("model.fc.weight")
    hidden = (target or drafter.folder).number("hidden_size")
    if width is not None and hidden and len(width[1]) == 2 and width[1][1] != len(ids) * hidden:
        yield Finding(
            "layer-ids-do-not-fit-weights",
            "error",
            f"fc.weight takes {width[1][1]} features, {len(ids)} layers of {hidden} give {len(ids) * hidden}",
            shown,
            "The config and the weights are of different drafters, or of another target.",
        )
    stated = drafter.folder.config.get("num_target_layers")
    if isinstance(stated, int) and layers is not None and stated != layers:
        yield Finding(
            "target-depth-differs",
            "error",
            f"the drafter was made for a target of {stated} layers, this one has {layers}",
            (f"{file}: num_target_layers={stated}",),
            "Use the drafter of this target.",
        )


def shapes(case: Case) -> Iterator[Finding]:
    drafter, target = case.drafter, case.target
    if drafter is None or target is None:
        return
    own = drafter.folder.config.get("target_hidden_size", drafter.folder.number("hidden_size"))
    theirs = target.number("hidden_size")
    if own is not None and theirs is not None and own != theirs and drafter.family.startswith("dflash"):
        yield Finding(
            "hidden-size-differs",
            "error",
            f"the drafter's hidden size {own} is not the target's {theirs}: it shares the target's embedding and"
            " head",
            (drafter.folder.name, target.name),
            "Use the drafter of this target.",
        )
    verifier = nested(drafter.folder.config, "speculators_config", "verifier", "architectures")
    if (
        isinstance(verifier, list)
        and verifier
        and target.architectures
        and not set(verifier) & set(target.architectures)
    ):
        yield Finding(
            "verifier-differs",
            "error",
            f"the drafter names {verifier} as its target, this one is {list(target.architectures)}",
            (f"{drafter.folder.name}/config.json: speculators_config.verifier",),
            "Use the drafter of this target.",
        )
    a, b = (
        str(f.text.get("dtype", f.config.get("dtype", f.config.get("torch_dtype", f.text.get("torch_dtype", "")))))
        for f in (drafter.folder, target)
    )
    if a in FLOAT_DTYPES and b in FLOAT_DTYPES and a != b:
        yield Finding(
            "dtype-differs",
            "warning",
            f"drafter {a}, target {b}: hidden states are cast on the way",
            (drafter.folder.name, target.name),
            "Serve both in the dtype the drafter was trained with (--dtype).",
        )


def rope(case: Case) -> Iterator[Finding]:
    drafter, target = case.drafter, case.target
    if drafter is None or not drafter.family.startswith(("dflash", "dspark")):
        return
    file = f"{drafter.folder.name}/config.json"
    if drafter.folder.rope_theta is None:
        yield Finding(
            "rope-theta-missing",
            "warning",
            "the drafter's config has no rope_theta and takes a class default",
            (file,),
            "Write rope_theta at the top level and in rope_parameters: old and new transformers read different ones.",
        )
    elif "rope_theta" not in drafter.folder.config and not drafter.speculators:
        yield Finding(
            "rope-theta-nested",
            "info",
            "rope_theta stands only in rope_parameters: transformers 4 reads the top-level key",
            (file,),
            f'Add "rope_theta": {drafter.folder.rope_theta:g} at the top level.',
        )
    if drafter.folder.partial_rotary != 1.0 or _mrope(drafter.folder):
        yield Finding(
            "drafter-partial-rotary",
            "warning",
            "the drafter's config carries the target's partial or multimodal rotary embedding: DFlash drafters use"
            " plain RoPE over the whole head",
            (f"{file}: partial_rotary_factor={drafter.folder.partial_rotary:g}",),
            "Check what the trainer used; a factor that leaked in from the target costs acceptance.",
            "https://github.com/vllm-project/speculators/issues/613",
        )
    longest = drafter.folder.number("max_position_embeddings")
    wanted = case.serve.integer("max-model-len", 0) if case.serve else 0
    wanted = wanted or (target.number("max_position_embeddings") or 0 if target else 0)
    if longest is not None and wanted and longest < wanted and case.install.version:
        yield Finding(
            "drafter-context-short",
            "warning",
            f"the drafter's max_position_embeddings {longest} is less than the context served ({wanted})",
            (file,),
            f'Set "max_position_embeddings": {wanted} (it only sizes the rotary cache), or lower --max-model-len.',
        )


def sliding_window(case: Case) -> Iterator[Finding]:
    drafter = case.drafter
    if drafter is None or not drafter.family.startswith("dflash"):
        return
    config: Mapping[str, Any] = drafter.folder.text
    kinds = set(drafter.folder.layer_types)
    inner = drafter.folder.config.get("dflash_config")
    swa = isinstance(inner, Mapping) and bool(inner.get("use_swa"))
    sliding = "sliding_attention" in kinds or bool(config.get("use_sliding_window")) or swa
    mixed = sliding and "full_attention" in kinds
    file = f"{drafter.folder.name}/config.json"
    shown = (f"{file}: layer_types={sorted(kinds)}, sliding_window={config.get('sliding_window')}",)
    if sliding and case.install.outcome("drafter-sliding-window") == "no":
        yield Finding(
            "drafter-window-ignored",
            "error",
            "this install runs the drafter's sliding-window layers as full attention: acceptance collapses beyond the"
            " window",
            (*shown, "verdict drafter-sliding-window: no"),
            "Use 0.25.1 or newer (mixed layouts: 0.26.0 or newer), or keep contexts inside the window.",
            PULL + "40898",
        )
    elif mixed and case.runner == "V1":
        yield Finding(
            "mixed-windows-need-v2",
            "error",
            "a drafter that mixes sliding and full layers is refused by the V1 runner",
            (*shown, "runner in force: V1"),
            "Relaunch with VLLM_USE_V2_MODEL_RUNNER=1 on 0.26.0 or newer.",
            "https://github.com/vllm-project/vllm-ascend/issues/15650",
        )
    if (
        sliding
        and not isinstance(config.get("sliding_window"), int)
        and not (isinstance(inner, Mapping) and inner.get("swa_window_size"))
    ):
        yield Finding(
            "window-size-missing",
            "error",
            "sliding layers without a sliding_window size",
            shown,
            'Add "sliding_window".',
        )
    layers = drafter.folder.number("num_hidden_layers")
    if drafter.folder.layer_types and layers is not None and len(drafter.folder.layer_types) != layers:
        yield Finding(
            "layer-types-count",
            "error",
            f"{len(drafter.folder.layer_types)} layer_types for {layers} layers",
            shown,
            "Write one per layer.",
        )
    if (
        drafter.speculators
        and not sliding
        and drafter.folder.config.get("sliding_window_non_causal") is False
        and case.install.outcome("drafter-sliding-window") == "yes"
    ):
        yield Finding(
            "speculators-causal",
            "warning",
            "a full-attention drafter in speculators form with sliding_window_non_causal=false is served with a"
            " causal mask by releases that map it to dflash_config.causal",
            (f"{file}: sliding_window_non_causal=false",),
            'Set "sliding_window_non_causal": true, or use the z-lab form with "causal": false.',
            PULL + "56692",
        )


def _mrope(folder: ModelFolder) -> bool:
    parameters = folder.text.get("rope_parameters") or folder.text.get("rope_scaling")
    return isinstance(parameters, Mapping) and "mrope_section" in parameters


CHECKS = (layer_ids, shapes, rope, sliding_window)
