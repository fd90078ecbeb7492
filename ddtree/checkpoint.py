"""Drafter checkpoints: read either published format, refuse what does not fit the target, load.

* z-lab: ``config.json`` with ``dflash_config`` and ``block_size``; no embedding, no head.
* speculators (vllm-project): ``speculators_model_type: dflash``, layer shape under ``transformer_layer_config``, layer
  ids counted from the embedding (one higher), own embedding and head, d2t and t2d when the vocabulary is reduced.

Everything is checked against config and tensor headers before a weight is read: a drafter that does not fit would
otherwise only show as lost acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ddtree.drafter import Drafter, DrafterConfig
from ddtree.errors import CheckpointError

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must agree with: known from the target's config alone."""

    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding
    name: str = ""


def read_config(folder: Path | str) -> DrafterConfig:
    """DrafterConfig of a checkpoint folder in either format.

    Raises:
        CheckpointError: no-config, not-json, unsupported-drafter, missing-key, bad-value, unsupported-activation.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError("no-config", f"{path} does not exist", "give the folder of a DFlash drafter")
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError("not-json", f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError("not-json", f"{path} holds no object")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """DrafterConfig of a config.json's content; see read_config."""
    names = [str(x) for x in raw.get("architectures") or []]
    kind = raw.get("speculators_model_type")
    if kind not in (None, "dflash"):
        raise CheckpointError("unsupported-drafter", f"speculators_model_type {kind!r}", "only dflash is implemented")
    if any(n.startswith(("DFlash2", "DSpark")) for n in names):
        raise CheckpointError("unsupported-drafter", f"architecture {names[0]}", "only DFlash is implemented")
    if raw.get("sample_from_anchor"):
        raise CheckpointError("unsupported-drafter", "sample_from_anchor: slot k predicts anchor + k + 1")
    if kind is None and "dflash_config" not in raw:
        raise CheckpointError("unsupported-drafter", "no dflash_config", "this is no DFlash drafter's config.json")
    extra: Mapping[str, Any] = raw.get("dflash_config") or {}
    layer: Mapping[str, Any] = raw if kind is None else raw.get("transformer_layer_config") or {}

    def need(key: str, *places: Mapping[str, Any]) -> Any:
        for place in places or (layer,):
            if place.get(key) is not None:
                return place[key]
        raise CheckpointError("missing-key", f"config.json has no {key}")

    def number(key: str, *places: Mapping[str, Any]) -> int:
        value = need(key, *places)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError("bad-value", f"{key} is {value!r}, not a positive integer")
        return value

    if layer.get("hidden_act", "silu") != "silu":
        raise CheckpointError("unsupported-activation", f"hidden_act {layer['hidden_act']!r}, only silu is implemented")
    if kind is None:
        ids = _ids(need("target_layer_ids", extra, raw), "target_layer_ids", 0)
    else:
        ids = _ids(need("aux_hidden_state_layer_ids", raw), "aux_hidden_state_layer_ids", 1)
    heads, hidden, vocab = number("num_attention_heads"), number("hidden_size"), number("vocab_size")
    windows, causal = _layout(raw, layer, extra, number("num_hidden_layers"))
    mask = need("mask_token_id", extra, raw)
    draft_vocab = layer.get("draft_vocab_size") or raw.get("draft_vocab_size")
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        vocab_size=vocab,
        block_size=number("block_size", raw, extra),
        mask_token_id=mask,
        target_layer_ids=ids,
        target_hidden_size=layer.get("target_hidden_size") or raw.get("target_hidden_size") or hidden,
        windows=windows,
        causal=causal,
        num_target_layers=raw.get("num_target_layers"),
        draft_vocab_size=draft_vocab if draft_vocab and draft_vocab != vocab else None,
        attention_bias=bool(layer.get("attention_bias", False)),
        rope={k: layer[k] for k in ROPE_KEYS if layer.get(k) is not None},
    )


def _ids(value: Any, key: str, base: int) -> tuple[int, ...]:
    """Layer ids in z-lab's convention from ids counted from ``base``."""
    if not isinstance(value, list) or not value or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise CheckpointError("bad-value", f"{key} is {value!r}, not a list of layer numbers")
    return tuple(x - base for x in value)


def _layout(
    raw: Mapping[str, Any], layer: Mapping[str, Any], extra: Mapping[str, Any], layers: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window and causality per layer. Sliding layers are causal within a block unless the checkpoint says otherwise."""
    types = layer.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers:
        raise CheckpointError("bad-value", f"layer_types has {len(types)} entries for {layers} layers")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError("unsupported-layer-type", f"drafter layer type {unknown[0]!r}")
    window = extra.get("swa_window_size") or layer.get("sliding_window") or 0
    sliding = [t == "sliding_attention" or bool(extra.get("use_swa")) for t in types]
    if any(sliding) and window < 1:
        raise CheckpointError("missing-key", "sliding layers, but no sliding_window")
    stated = raw.get("is_causal", extra.get("causal"))
    if raw.get("speculators_model_type"):
        causal = [s and not raw.get("sliding_window_non_causal") for s in sliding]
    else:
        causal = sliding if stated is None else [bool(stated)] * layers
    return tuple(window if s else 0 for s in sliding), tuple(causal)


def check_fit(config: DrafterConfig, target: TargetShape) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        CheckpointError: layer-count-mismatch, layer-id-range, hidden-size-mismatch, vocab-mismatch,
            mask-token-outside-embedding, block-size.
    """
    name = target.name or "the target"
    if config.num_target_layers not in (None, target.num_layers):
        raise CheckpointError(
            "layer-count-mismatch",
            f"the drafter was trained for {config.num_target_layers} target layers, {name} has {target.num_layers}",
        )
    bad = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers]
    if bad:
        raise CheckpointError(
            "layer-id-range",
            f"target layer {bad[0]} of {list(config.target_layer_ids)} is outside {name}'s 0..{target.num_layers - 1}",
        )
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            "hidden-size-mismatch",
            f"the drafter reads hidden states of size {config.target_hidden_size}, {name} has {target.hidden_size}",
        )
    shares = not config.own_embedding or not config.own_head
    if shares and config.hidden_size != target.hidden_size:
        raise CheckpointError(
            "hidden-size-mismatch",
            f"the drafter shares embedding or head, but is {config.hidden_size} wide and {name} {target.hidden_size}",
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            "vocab-mismatch", f"the drafter's vocabulary has {config.vocab_size} tokens, {name}'s {target.vocab_size}"
        )
    mask = config.mask_token_id
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise CheckpointError(
            "mask-token-outside-embedding", f"mask token {mask!r} is no row of an embedding of {target.vocab_size} rows"
        )
    if config.block_size < 2:
        raise CheckpointError("block-size", f"block size {config.block_size} drafts nothing", "2 is the smallest")


def load_drafter(
    folder: Path | str,
    target: TargetShape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Drafter:
    """Check a checkpoint against its target, then load it for inference.

    Raises:
        CheckpointError: see read_config and check_fit; no-weights, missing-tensors, unexpected-tensors, tensor-shape,
            vocabulary-map.
    """
    config = read_config(folder)
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise CheckpointError("no-weights", f"{folder} holds no .safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118 (a handle does not iterate)
                    name = key.removeprefix("model.")
                    shapes[name] = tuple(handle.get_slice(key).get_shape())
        except Exception as error:  # safetensors raises a type of its own that it does not export for typing
            raise CheckpointError("unreadable-weights", f"{file}: {error}") from error
    config = replace(config, own_head="lm_head.weight" in shapes, own_embedding="embed_tokens.weight" in shapes)
    if config.draft_vocab_size and "d2t" not in shapes:
        raise CheckpointError("missing-tensors", f"no d2t for a reduced vocabulary of {config.draft_vocab_size} tokens")
    check_fit(config, target)
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = {k: tuple(v.shape) for k, v in drafter.state_dict().items()}
    _check_tensors(expected, {k: v for k, v in shapes.items() if k not in ("d2t", "t2d")})

    drafter.to(dtype).to_empty(device=device)
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as handle:
            for key in handle.keys():  # noqa: SIM118 (a handle does not iterate)
                name = key.removeprefix("model.")
                if name in expected:
                    drafter.get_parameter(name).data.copy_(handle.get_tensor(key))
                elif name == "d2t" and config.draft_vocab_size:
                    drafter.d2t = _target_ids(handle.get_tensor(key), config)
    return drafter.eval().requires_grad_(False)


def _check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise CheckpointError("missing-tensors", f"{len(missing)} of {len(expected)}, first {missing[0]}")
    if extra:
        raise CheckpointError(
            "unexpected-tensors", f"{len(extra)}, first {extra[0]}", "a variant of DFlash that is not implemented?"
        )
    wrong = [k for k in expected if expected[k] != found[k]]
    if wrong:
        k = wrong[0]
        raise CheckpointError("tensor-shape", f"{k} is {list(found[k])}, the config asks for {list(expected[k])}")


def _target_ids(offsets: Tensor, config: DrafterConfig) -> Tensor:
    """Target ids int64 [draft_vocab] from stored offsets: target id = draft id + d2t[draft id] (as in EAGLE-3)."""
    ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
    if len(ids) != config.draft_vocab_size or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise CheckpointError("vocabulary-map", f"d2t maps {len(ids)} ids up to {int(ids.max())}")
    if int(torch.bincount(ids).max()) > 1:
        raise CheckpointError("vocabulary-map", "d2t maps two draft tokens to one target token")
    return ids
