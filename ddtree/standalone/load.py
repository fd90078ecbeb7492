"""From folders to an engine: every check that needs no weights first, then memory, then the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddtree.checkpoint import check_fit, load_drafter, read_config
from ddtree.drafter import Drafter, DrafterConfig
from ddtree.errors import DeviceError, TargetError
from ddtree.standalone.config import LINEAR, TargetConfig
from ddtree.standalone.engine import Engine
from ddtree.standalone.ops import ops_for
from ddtree.standalone.weights import load_config, load_target, place, random_target
from ddtree.tree import check_budget

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RESERVE = 600_000_000  # bytes for the CUDA context, cuBLAS workspaces and activations


def parse_devices(text: str | None) -> list[torch.device]:
    """``cpu``, ``0``, ``0,1``; default: the first GPU, or the CPU where there is none.

    Raises:
        DeviceError: no-gpu, no-such-device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text is None:
        return [torch.device("cuda:0" if count else "cpu")]
    if text == "cpu":
        return [torch.device("cpu")]
    if not count:
        raise DeviceError("no-gpu", f"--devices {text}, but torch sees no GPU", "use --devices cpu")
    names = [x.strip().removeprefix("cuda:") for x in text.split(",")]
    if not all(x.isdigit() and int(x) < count for x in names):
        raise DeviceError("no-such-device", f"--devices {text}, but there are {count}: 0..{count - 1}")
    return [torch.device(f"cuda:{x}") for x in names]


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _page_cache()


def _page_cache() -> int:
    """Bytes that Linux would give back: MemAvailable - MemFree."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = {x.split(":")[0]: int(x.split()[1]) for x in lines}
    return max(kilobytes.get("MemAvailable", 0) - kilobytes.get("MemFree", 0), 0) * 1024


def drafter_bytes(c: DrafterConfig, dtype: torch.dtype) -> int:
    """Weight bytes of a drafter."""
    with torch.device("meta"):
        return sum(p.numel() for p in Drafter(c).parameters()) * dtype.itemsize


def plan(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    rows: int,
    requests: int,
    slots: int,
) -> list[torch.device]:
    """A device per layer, from what memory is free now; see weights.place for the errors."""
    width = dtype.itemsize
    kv = 2 * requests * rows * target.kv_heads * target.head_dim * width
    if target.delta is not None:
        d = target.delta
        state = requests * (d.channels * 3 * width + d.value_heads * d.key_dim * d.value_dim * 4)
        stash = requests * slots * (d.channels * width + 4 * (d.key_heads * d.key_dim + d.value_heads * d.value_dim))
        share = target.layer_types.count(LINEAR) / target.layers
        kv = int(kv * (1 - share) + (state + stash) * share)
    home = target.vocab_size * target.hidden_size * width * (1 if target.tied_head else 2)
    home += requests * slots * target.vocab_size * (width + 4) + RESERVE * (devices[0].type == "cuda")
    if drafter is not None:
        home += drafter_bytes(drafter, dtype)
        home += 2 * drafter.num_layers * requests * rows * drafter.num_kv_heads * drafter.head_dim * width
    return place(target, dtype, devices, [free_bytes(d) for d in devices], kv, home)


def load_tokenizer(folder: Path | str, target: TargetConfig) -> Any:
    """The target's tokenizer, which must not make tokens that the target does not have.

    Raises:
        TargetError: no-tokenizer, tokenizer-mismatch.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise TargetError("no-tokenizer", f"{folder}: {error}") from error
    if len(tokenizer) > target.vocab_size:
        raise TargetError(
            "tokenizer-mismatch",
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the target's embedding {target.vocab_size} rows",
        )
    return tokenizer


def end_tokens(folder: Path | str, target: TargetConfig, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response: those of config.json, of generation_config.json, and the tokenizer's own."""
    found = set(target.eos)
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text()).get("eos_token_id")
        found |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def load_engine(
    target_folder: Path | str,
    drafter_folder: Path | str | None,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    context: int,
    requests: int = 1,
    budget: int = 64,
    kernels: bool = True,
) -> tuple[Engine, Any]:
    """An engine and its tokenizer. No weight is loaded before configs, tokenizer, drafter and memory were checked."""
    check_budget(budget)
    config = load_config(target_folder)
    drafter_config = None
    if drafter_folder is not None:
        drafter_config = read_config(drafter_folder)
        check_fit(drafter_config, config.shape)
    tokenizer = load_tokenizer(target_folder, config)
    context = min(context, config.context)
    slots = max(budget + 1, drafter_config.block_size if drafter_config else 1)
    placement = plan(config, drafter_config, dtype, devices, context + 2 * slots, requests, slots)
    drafter = None
    if drafter_folder is not None:
        drafter = load_drafter(drafter_folder, config.shape, devices[0], dtype)
    target = load_target(target_folder, dtype, placement)
    ops = ops_for(devices[0], config, drafter_config, kernels)
    engine = Engine(target, drafter, ops=ops, context=context, decode=tokenizer.decode)
    return engine, tokenizer


def default_drafter(target: TargetConfig, layers: int = 5, block: int = 16) -> DrafterConfig:
    """The drafter that is published for a target of this size: Qwen3-like layers over evenly spaced taps.

    Layer ids follow z-lab's rule: round(linspace(1, layers - 3, n)).
    """
    last = target.layers - 3
    taps = tuple(round(1 + i * (last - 1) / (layers - 1)) for i in range(layers))
    dim = 128 if target.hidden_size >= 1024 else target.head_dim
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=max(target.heads, 1) if dim == target.head_dim else 32,
        num_kv_heads=target.kv_heads if dim == target.head_dim else 8,
        head_dim=dim,
        rms_norm_eps=1e-6,
        vocab_size=target.vocab_size,
        block_size=block,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=taps,
        target_hidden_size=target.hidden_size,
        windows=(0,) * layers,
        causal=(False,) * layers,
    )


def random_engine(
    config_file: Path | str,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    context: int,
    budget: int = 64,
    kernels: bool = True,
    drafter: DrafterConfig | None = None,
) -> Engine:
    """An engine with random weights at a real model's shape, for step cost."""
    config = load_config(config_file)
    shape = drafter or default_drafter(config)
    slots = max(budget + 1, shape.block_size)
    config = replace(config, context=max(config.context, context + 2 * slots))
    placement = plan(config, shape, dtype, devices, context + 2 * slots, 1, slots)
    target = random_target(config, placement, dtype)
    with torch.device("meta"):
        model = Drafter(shape)
    model.to(dtype).to_empty(device=devices[0])
    for p in model.parameters():
        torch.nn.init.ones_(p) if p.ndim == 1 else torch.nn.init.normal_(p, std=0.02)
    return Engine(target, model.eval().requires_grad_(False), ops=ops_for(devices[0], config, shape, kernels))
