"""The memory plan: weights, drafter, KV and recurrent state, per GPU, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rules.lint.hybrid import state_bytes
from rules.lint.model import Case, Finding, ModelFolder

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "auto": 2}


@dataclass(frozen=True)
class Plan:
    """Bytes on each GPU. ``kv_per_token``: target and drafter; ``sequences``: how many of ``context`` tokens fit."""

    weights: int
    drafter: int
    activations: int
    kv_per_token: int
    state_per_sequence: int
    usable: int
    context: int

    @property
    def left(self) -> int:
        return self.usable - self.weights - self.drafter - self.activations

    @property
    def sequences(self) -> float:
        each = self.kv_per_token * self.context + self.state_per_sequence
        return self.left / each if each > 0 else 0.0


def weight_bytes(folder: ModelFolder) -> int:
    """Bytes of the safetensors files, or 0 when there are none."""
    return sum(size for name, size in folder.files.items() if name.endswith(".safetensors"))


def kv_bytes(folder: ModelFolder, dtype: str) -> int:
    """Bytes of keys and values of one token over the layers that keep them."""
    heads, dim = folder.number("num_key_value_heads") or folder.number("num_attention_heads"), folder.head_dim
    layers = folder.number("num_hidden_layers") or 0
    if folder.layer_types:
        layers = sum("attention" in kind and "linear" not in kind for kind in folder.layer_types)
    elif interval := folder.number("full_attention_interval"):
        layers //= interval
    return 2 * heads * dim * layers * DTYPE_BYTES.get(dtype, 2) if heads and dim else 0


def plan(case: Case) -> Plan | None:
    """None when the GPUs, the target or its weights are not known."""
    target, serve = case.target, case.serve
    if target is None or serve is None or not case.host.gpus or not weight_bytes(target):
        return None
    size = serve.integer("tensor-parallel-size", 1)
    share = serve.flags.get("gpu-memory-utilization", 0.9)
    context = serve.integer("max-model-len", 0) or target.number("max_position_embeddings") or 4096
    kv = str(serve.flags.get("kv-cache-dtype", "auto"))
    k = case.draft_tokens or 0
    tokens = serve.integer("max-num-batched-tokens", 8192)
    width = max(target.number("intermediate_size") or 0, 4 * (target.number("hidden_size") or 0))
    logits = (k + 1) * serve.integer("max-num-seqs", 64) * (target.number("vocab_size") or 0) * 4
    drafter = case.drafter.folder if case.drafter else None
    return Plan(
        weights=weight_bytes(target) // size,
        drafter=weight_bytes(drafter) // size if drafter else 0,
        activations=4 * tokens * width // size + logits + GIB,  # 1 GiB: CUDA context, graphs, workspaces
        kv_per_token=(kv_bytes(target, kv) + (kv_bytes(drafter, kv) if drafter else 0)) // size,
        state_per_sequence=state_bytes(case) * (k + 1) // size,
        usable=int(case.host.gpus[0].memory * float(share if isinstance(share, (int, float)) else 0.9)),
        context=context,
    )


def memory(case: Case) -> Iterator[Finding]:
    made = plan(case)
    if made is None:
        return
    lines = (
        (
            f"usable {made.usable / GIB:.1f} GiB, weights {made.weights / GIB:.1f}, drafter {made.drafter / GIB:.1f},"
            f" activations and graphs about {made.activations / GIB:.1f}"
        ),
        (
            f"KV {made.kv_per_token / 1024:.1f} KiB a token, recurrent state {made.state_per_sequence / 2**20:.0f}"
            f" MiB a sequence: {made.sequences:.1f} sequences of {made.context} tokens"
        ),
    )
    source = "https://github.com/turboderp-org/exllamav3/issues/212"
    if made.left <= 0:
        yield Finding(
            "memory-weights",
            "error",
            f"weights, drafter and activations need {(made.usable - made.left) / GIB:.1f} GiB,"
            f" {made.usable / GIB:.1f} GiB are usable a GPU",
            lines,
            "Use more GPUs (--tensor-parallel-size), a quantised target, or fewer --max-num-batched-tokens.",
            source,
        )
    elif made.sequences < 1:
        yield Finding(
            "memory-context",
            "error",
            f"not one sequence of {made.context} tokens fits beside the weights",
            lines,
            f"Set --max-model-len to {max(0, (made.left - made.state_per_sequence) // max(1, made.kv_per_token))} or"
            " less, or fewer draft tokens.",
            source,
        )
    else:
        yield Finding(
            "memory-plan",
            "info",
            f"{made.sequences:.0f} sequences of {made.context} tokens fit on each GPU beside weights and drafter",
            lines,
            "",
            source,
        )


CHECKS = (memory,)
