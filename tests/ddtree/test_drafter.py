"""The drafter against a slow reference, its two forwards against each other, and what loading refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import TARGET, ZLAB, B, H, V, drafter_of
from safetensors.torch import save_file

from ddtree.checkpoint import load_drafter, parse_config, read_config
from ddtree.drafter import Drafter, DrafterConfig, block_words
from ddtree.errors import CheckpointError
from ddtree.kvcache import new_cache, plain_attend
from ddtree.standalone.ops import PLAIN
from ddtree.standalone.packed import PackedDrafter


def reference(drafter: Drafter, features: torch.Tensor, token: int, embedding: torch.Tensor) -> torch.Tensor:
    """One block after the context, written out position by position from the paper's description (float64)."""
    c, S = drafter.config, len(features)
    weights = {k: v.double() for k, v in drafter.state_dict().items()}
    rot = int(c.head_dim * c.rope.get("partial_rotary_factor", 1.0))
    freq = c.rope["rope_theta"] ** (-torch.arange(0, rot, 2).double() / rot)

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weights[name]

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        angle = torch.cat([position * freq, position * freq])
        a, b = x[..., : rot // 2], x[..., rot // 2 : rot]
        return torch.cat([x[..., :rot] * angle.cos() + torch.cat([-b, a], -1) * angle.sin(), x[..., rot:]], -1)

    ctx = rms(features.double() @ weights["fc.weight"].T, "hidden_norm.weight")
    x = embedding[[token] + [c.mask_token_id] * (B - 1)].double()
    for i in range(c.num_layers):
        at = f"layers.{i}.self_attn."
        h = rms(x, f"layers.{i}.input_layernorm.weight")
        source = torch.cat([ctx, h])
        q = rms((h @ weights[at + "q_proj.weight"].T).view(B, c.num_heads, -1), at + "q_norm.weight")
        k = rms((source @ weights[at + "k_proj.weight"].T).view(S + B, c.num_kv_heads, -1), at + "k_norm.weight")
        v = (source @ weights[at + "v_proj.weight"].T).view(S + B, c.num_kv_heads, -1)
        k = torch.stack([rotate(k[p], p) for p in range(S + B)])
        out = torch.zeros_like(q)
        for slot in range(B):
            sees = [p for p in range(S + B) if p < S or not c.causal[i] or p <= S + slot]
            sees = [p for p in sees if not c.windows[i] or p > S + slot - c.windows[i]]
            for head in range(c.num_heads):
                group = head // (c.num_heads // c.num_kv_heads)
                score = k[sees, group] @ rotate(q[slot, head], S + slot) * c.head_dim**-0.5
                out[slot, head] = score.softmax(0) @ v[sees, group]
        x = x + out.flatten(1) @ weights[at + "o_proj.weight"].T
        h, mlp = rms(x, f"layers.{i}.post_attention_layernorm.weight"), f"layers.{i}.mlp."
        gate = torch.nn.functional.silu(h @ weights[mlp + "gate_proj.weight"].T)
        x = x + (gate * (h @ weights[mlp + "up_proj.weight"].T)) @ weights[mlp + "down_proj.weight"].T
    return rms(x, "norm.weight")


def incremental(
    drafter: Drafter | PackedDrafter, features: torch.Tensor, token: int, embedding: torch.Tensor
) -> torch.Tensor:
    c, S = drafter.config, len(features)
    cache = new_cache(c.num_layers, 1, S + 4 * B, c.num_kv_heads, c.head_dim, torch.float32, "cpu")
    for rows in torch.arange(S).split(5):
        # As a round does: rows past the accepted ones are written, too, and overwritten later.
        padded = torch.cat([features[rows], torch.full((2, features.shape[1]), 9.0)])
        drafter.extend(cache, padded[None], torch.arange(int(rows[0]), int(rows[0]) + len(padded))[None])
    lengths, depth = torch.tensor([S]), torch.arange(B)[None]
    words = [block_words(B, causal, 1, torch.device("cpu")) for causal in (False, True)]
    attend = (plain_attend(lengths, words[0], S + 4 * B, depth), plain_attend(lengths, words[1], S + 4 * B, depth))
    return drafter.draft(torch.tensor([token]), cache, lengths, embedding, attend)[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "partial-rotary": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "causal": {"dflash_config": {**ZLAB["dflash_config"], "causal": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("context", [0, 1, 23])
def test_both_forwards_equal_the_reference(layout: str, context: int) -> None:
    drafter = drafter_of({**ZLAB, **LAYOUTS[layout]})
    c = drafter.config
    if "rope_parameters" in c.rope:
        c.rope.update(c.rope["rope_parameters"])
    gen = torch.Generator().manual_seed(context)
    features, embedding = torch.randn(context, 3 * H, generator=gen), torch.randn(V, H, generator=gen)
    expected = reference(drafter, features, 7, embedding).float()
    if context:
        torch.testing.assert_close(incremental(drafter, features, 7, embedding), expected, rtol=1e-4, atol=1e-4)
    padded = torch.cat([features, torch.randn(4, 3 * H, generator=gen)])  # rows at and above the anchor must not matter
    packed = drafter(padded[None], torch.tensor([[7]]), torch.tensor([[context]]), embedding)
    torch.testing.assert_close(packed[0, 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_the_drafter(bias: bool) -> None:
    drafter = drafter_of({**ZLAB, **LAYOUTS["sliding"], "attention_bias": bias})
    features, embedding = torch.randn(11, 3 * H), torch.randn(V, H)
    expected = incremental(drafter, features, 7, embedding)
    packed = PackedDrafter(drafter, PLAIN)
    torch.testing.assert_close(incremental(packed, features, 7, embedding), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["full", "sliding"])
def test_many_anchors_of_packed_documents_equal_single_blocks(layout: str) -> None:
    drafter = drafter_of({**ZLAB, **LAYOUTS[layout]})
    gen = torch.Generator().manual_seed(1)
    features, embedding = torch.randn(2, 30, 3 * H, generator=gen), torch.randn(V, H, generator=gen)
    positions = torch.cat([torch.arange(12), torch.arange(18)]).expand(2, -1)
    anchors, starts = torch.tensor([[3, 11, 20], [5, 14, 29]]), torch.tensor([[0, 0, 12], [0, 12, 12]])
    tokens = torch.randint(0, V, (2, 3), generator=gen)
    packed = drafter(features, tokens, anchors, embedding, positions, starts)
    for r in range(2):
        for j in range(3):
            own = features[r, starts[r, j] : anchors[r, j]]
            single = incremental(drafter, own, int(tokens[r, j]), embedding)
            torch.testing.assert_close(packed[r, j], single, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_parameter() -> None:
    drafter = drafter_of(ZLAB).requires_grad_(True)
    out = drafter(torch.randn(1, 9, 3 * H), torch.tensor([[1, 2]]), torch.tensor([[4, 9]]), torch.randn(V, H))
    out[:, :, 1:].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())


def test_rope_survives_a_cast_to_bfloat16() -> None:
    exact = drafter_of(ZLAB).rope.inv_freq.clone()
    assert torch.equal(drafter_of(ZLAB).to(torch.bfloat16).rope.inv_freq, exact)


def write_checkpoint(folder: Path, config: dict[str, Any], drafter: Drafter, **extra: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**{k: v.clone() for k, v in drafter.state_dict().items()}, **extra}, folder / "model.safetensors")
    return folder


def speculators_config(**changes: Any) -> dict[str, Any]:
    layer = {k: v for k, v in ZLAB.items() if k not in ("architectures", "block_size", "dflash_config")}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "block_size": B,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 5, 7],
        **changes,
    }


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    drafter = drafter_of(ZLAB)
    first = load_drafter(write_checkpoint(tmp_path / "a", ZLAB, drafter), TARGET, dtype=torch.float32)
    second = load_drafter(write_checkpoint(tmp_path / "b", speculators_config(), drafter), TARGET, dtype=torch.float32)
    assert first.config.target_layer_ids == second.config.target_layer_ids == (1, 4, 6)
    features, embedding = torch.randn(5, 3 * H), torch.randn(V, H)
    expected = incremental(drafter, features, 2, embedding)
    for loaded in (first, second):
        assert torch.equal(incremental(loaded, features, 2, embedding), expected)


def test_own_head_and_reduced_vocabulary(tmp_path: Path) -> None:
    config = parse_config(speculators_config(draft_vocab_size=20))
    drafter = drafter_of(DrafterConfig(**{**vars(config), "own_head": True, "own_embedding": True}))
    kept = torch.arange(20) * 2 + 5
    path = write_checkpoint(
        tmp_path / "s", speculators_config(draft_vocab_size=20), drafter, d2t=kept - torch.arange(20)
    )
    loaded = load_drafter(path, TARGET, dtype=torch.float32)
    hidden = torch.randn(1, B, H)
    values, ids = loaded.top(hidden, torch.zeros(V, H), 20)
    assert set(ids.flatten().tolist()) == set(kept.tolist())
    assert drafter.lm_head is not None
    full = torch.log_softmax(hidden[:, 1:] @ drafter.lm_head.weight.T, -1)
    torch.testing.assert_close(values, full.sort(-1, descending=True).values)
    bad = write_checkpoint(tmp_path / "t", speculators_config(draft_vocab_size=20), drafter, d2t=torch.full((20,), 40))
    with pytest.raises(CheckpointError, match="vocabulary-map"):
        load_drafter(bad, TARGET)


def changed(**changes: Any) -> dict[str, Any]:
    return {**ZLAB, **changes}


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**ZLAB["dflash_config"], **changes}}


@pytest.mark.parametrize(
    ("code", "config"),
    [
        ("layer-id-range", changed(**dflash(target_layer_ids=[1, 4, 8]))),
        ("layer-id-range", changed(**dflash(target_layer_ids=[-1, 4, 6]))),
        ("layer-id-range", speculators_config(aux_hidden_state_layer_ids=[2, 5, 9])),
        ("layer-count-mismatch", changed(num_target_layers=9)),
        ("hidden-size-mismatch", changed(hidden_size=64)),
        ("hidden-size-mismatch", changed(target_hidden_size=64)),
        ("vocab-mismatch", changed(vocab_size=51)),
        ("mask-token-outside-embedding", changed(**dflash(mask_token_id=V))),
        ("mask-token-outside-embedding", changed(**dflash(mask_token_id="<mask>"))),
        ("missing-key", changed(**dflash(mask_token_id=None))),
        ("missing-key", changed(block_size=None)),
        ("missing-key", changed(layer_types=["sliding_attention"] * 2)),
        ("bad-value", changed(num_hidden_layers="2")),
        ("bad-value", changed(**dflash(target_layer_ids=[]))),
        ("bad-value", changed(layer_types=["full_attention"])),
        ("block-size", changed(block_size=1)),
        ("unsupported-layer-type", changed(layer_types=["linear_attention"] * 2)),
        ("unsupported-activation", changed(hidden_act="gelu")),
        ("unsupported-drafter", {"model_type": "llama", "hidden_size": 8}),
        ("unsupported-drafter", changed(architectures=["DFlash2DraftModel"])),
        ("unsupported-drafter", speculators_config(speculators_model_type="eagle3")),
        ("unsupported-drafter", speculators_config(sample_from_anchor=True)),
        ("missing-tensors", changed(num_hidden_layers=3)),
        ("missing-tensors", speculators_config(draft_vocab_size=20)),
        ("unexpected-tensors", changed(num_hidden_layers=1)),
        ("tensor-shape", changed(intermediate_size=40)),
    ],
)
def test_refuses_by_name(tmp_path: Path, code: str, config: dict[str, Any]) -> None:
    path = write_checkpoint(tmp_path / "d", config, drafter_of(ZLAB))
    with pytest.raises(CheckpointError) as caught:
        load_drafter(path, TARGET)
    assert caught.value.code == code


def test_refuses_folders_that_hold_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not-json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    with pytest.raises(CheckpointError, match="no-weights"):
        load_drafter(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match="unreadable-weights"):
        load_drafter(tmp_path, TARGET)
