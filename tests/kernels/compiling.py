"""Compile kernels for GPUs that are not here: the launchers run on CPU tensors, and every launch is compiled, not
run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ddtree.kernels import device, fused

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    name: str
    capability: int
    shared: int  # bytes
    cubin: bytes


def source(fn: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ASTSource, dict[str, int]]:
    """What a launch with these arguments would compile, specialised as the launcher does."""
    values = dict(zip(fn.arg_names, args, strict=False)) | kwargs
    options = {n: values.pop(n) for n in ("num_warps", "num_stages") if n in values}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(fn.params):
        value = values[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not free and type(value) is int):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature, constants, attributes), options


@contextmanager
def target(capability: int) -> Iterator[list[Compiled]]:
    """Inside, launches are compiled for this compute capability and listed; nothing runs."""
    done: list[Compiled] = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        what, options = source(self, args, kwargs)
        built = triton.compile(what, target=GPUTarget("cuda", capability, 32), options=options)
        done.append(Compiled(self.fn.__name__, capability, built.metadata.shared, built.asm["cubin"]))

    kept = JITFunction.run, device.capability, device.processors
    JITFunction.run, device.capability, device.processors = run, lambda _: capability, lambda _: 132
    try:
        yield done
    finally:
        JITFunction.run, device.capability, device.processors = kept


def resources(compiled: Compiled) -> str:
    """Registers and local memory (spills) that the disassembler reports; empty where it is not installed."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if not found:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        text = subprocess.run([found, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return " ".join(w for w in text.split() if w.startswith(("REG", "STACK", "LOCAL")))


def _attention(dim: int, heads: int, kv_heads: int, nodes: int, dtype: torch.dtype, paged: bool, window: int) -> None:
    from ddtree.kernels.attention import tree_attention

    q = torch.empty(1, nodes, heads, dim, dtype=dtype)
    k = torch.empty(64, 16, kv_heads, dim, dtype=dtype) if paged else torch.empty(1, 8192, kv_heads, dim, dtype=dtype)
    words = torch.empty(1, nodes, -(-nodes // 64), dtype=torch.int64)
    depth, lengths = torch.empty(1, nodes, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    table = torch.empty(1, 64, dtype=torch.int32) if paged else None
    tree_attention(q, k, k, lengths, words, depth=depth, window=window, block_table=table)


def _parts() -> None:
    from ddtree.kernels.attention import merge, tree_part

    q, k = torch.empty(65, 32, 128, dtype=torch.bfloat16), torch.empty(65, 8, 128, dtype=torch.bfloat16)
    out, lse = tree_part(q, k, k, torch.empty(2, dtype=torch.int32), torch.empty(65, 2, dtype=torch.int64))
    merge(out, lse, out, lse)


def _gdn(nodes: int, state_dtype: torch.dtype = torch.float32) -> None:
    from ddtree import gdn
    from ddtree.kernels.gdn import launch_commit, launch_verify

    hk, hv, dim = 16, 48, 128
    channels = (2 * hk + hv) * dim
    half = torch.bfloat16
    layer = gdn.Layer(
        torch.empty(channels, 4, dtype=half), torch.empty(hv), torch.empty(hv, dtype=half), hk, hv, dim, dim
    )
    x, a = torch.empty(1, nodes, channels, dtype=half), torch.empty(1, nodes, hv, dtype=half)
    conv, state = torch.empty(1, channels, 3, dtype=half), torch.empty(1, hv, dim, dim, dtype=state_dtype)
    words = torch.empty(1, nodes, -(-nodes // 64), dtype=torch.int64)
    _, stash = launch_verify(layer, x, a, a, conv, state, words, torch.empty(1, nodes, 4, dtype=torch.int32))
    launch_commit(stash, conv, state, torch.empty(1, 16, dtype=torch.int32), torch.empty(1, dtype=torch.int32))


def _tree(budget: int) -> None:
    from ddtree.kernels.tree import build_tree, walk

    values, ids = torch.empty(1, 15, budget), torch.empty(1, 15, budget, dtype=torch.int64)
    tree = build_tree((values, ids), torch.empty(1, dtype=torch.int64), budget)
    walk(tree, torch.empty(1, budget + 1, dtype=torch.int64))


def _rows() -> None:
    from ddtree.kernels.rows import gather_rows, move_rows

    move_rows(torch.empty(4, 2, 1, 64, 8, 128, dtype=torch.bfloat16), *(torch.empty(1, 16, dtype=torch.int64),) * 2)
    gather_rows(torch.empty(1, 65, 20480, dtype=torch.bfloat16), torch.empty(1, 16, dtype=torch.int32))


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
def _fused() -> None:
    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    for width in (576, 5120):
        fused.add_norm(new(1, 3, width), new(1, 3, width), new(width, dtype=F32), 1e-6)
        fused.add_norm(new(1, 3, width), None, new(width, dtype=F32), 1e-6)
    fused.swiglu(new(1, 3, 2 * 17408))
    fused.gated_norm(new(1, 3, 48, 128), new(1, 3, 48 * 128), new(128, dtype=F32), 1e-6)
    for heads, gated, hd, rot in ((32, False, 128, 128), (24, True, 256, 64), (0, False, 64, 64)):
        weight = new(hd, dtype=F32)
        turn, cache = new(1, 3, 1, rot, dtype=F32), new(1, 9, 4, hd)
        qgkv = new(1, 3, (heads * (1 + gated) + 8) * hd)
        rows = torch.zeros(1, 3, dtype=torch.int64)
        for norm in (weight, None):
            fused.rotate_and_write(qgkv, heads, gated, norm, norm, 1e-6, turn, turn, rows, cache, cache.clone())


CASES: dict[str, Callable[[], None]] = {
    "fused": _fused,
    "attention-64": lambda: _attention(64, 9, 3, 65, BF16, False, 0),
    "attention-128": lambda: _attention(128, 32, 8, 65, BF16, False, 0),
    "attention-128-decode": lambda: _attention(128, 32, 8, 1, BF16, False, 0),
    "attention-128-paged-window": lambda: _attention(128, 32, 8, 65, F16, True, 4096),
    "attention-256": lambda: _attention(256, 24, 4, 257, BF16, False, 0),
    "attention-256-paged": lambda: _attention(256, 24, 4, 65, BF16, True, 0),
    "attention-128-float32": lambda: _attention(128, 32, 8, 65, F32, False, 0),
    "two-parts": _parts,
    "gdn-17": lambda: _gdn(17),
    "gdn-65": lambda: _gdn(65),
    "gdn-257-bf16-state": lambda: _gdn(257, BF16),
    "tree-64": lambda: _tree(64),
    "tree-256": lambda: _tree(256),
    "rows": _rows,
}


def main() -> int:
    """Compile the cases named (or all) for every capability, a line each; 1 when one does not fit."""
    import sys

    over = 0
    for name in sys.argv[1:] or CASES:
        for capability, limit in device.SHARED_LIMIT.items():
            with target(capability) as done:
                CASES[name]()
            for one in done:
                fits = "ok  " if one.cubin and one.shared <= limit else "OVER"
                over += fits == "OVER"
                print(
                    f"{fits} sm_{capability} {name:28} {one.name:10} shared {one.shared:7} {resources(one)}", flush=True
                )
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
