"""Fused kernels against their twins. Run by test_fused.py in Triton's interpreter, and as it is on a GPU."""

from __future__ import annotations

import os

import torch

from ddtree import kvcache, layers
from ddtree.kernels import fused

ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if ON_CPU else "cuda"


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    bound = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}[dtype]
    assert got.dtype == want.dtype and got.shape == want.shape and error <= bound, f"{what}: {error:.1e}"


def check(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(DEVICE, dtype)

    for width in (48, 576):
        x, delta, weight = draw(2, 5, width), draw(2, 5, width), draw(width).float()
        for other in (delta, None):
            for got, want in zip(
                fused.add_norm(x, other, weight, 1e-6), layers.add_norm(x, other, weight, 1e-6), strict=True
            ):
                close(got, want, dtype, "add_norm")
    gate_up = draw(2, 3, 2 * 1100)
    close(fused.swiglu(gate_up), layers.swiglu(gate_up), dtype, "swiglu")
    out, wide, weight = draw(2, 5, 6, 32), draw(2, 5, 400), draw(32).float()
    z = wide[..., 17 : 17 + 192]
    close(fused.gated_norm(out, z, weight, 1e-6), layers.gated_norm(out, z, weight, 1e-6), dtype, "gated_norm")

    cases = ((6, False, True, 32), (6, True, True, 8), (4, False, False, 32), (0, False, True, 32))
    for heads, gated, norm, rot in cases:
        kv, hd, requests, nodes, rows = 2, 32, 2, 5, 40
        qgkv = draw(requests, nodes, 7 + (heads * (1 + gated) + 2 * kv) * hd)[..., 7:]
        weights = [draw(hd).float() if norm and (heads or x == "k") else None for x in "qk"]
        positions = torch.randint(0, 3000, (requests, nodes), generator=gen).to(DEVICE)
        cos, sin = layers.Rope(1e4 ** (-torch.arange(0, rot, 2) / rot)).to(DEVICE)(positions)
        at = torch.stack([torch.randperm(rows, generator=gen)[:nodes] for _ in range(requests)]).to(DEVICE)
        caches = [torch.zeros(2, requests, rows, kv, hd, dtype=dtype, device=DEVICE) for _ in range(2)]
        found = []
        for module, cache in zip((fused, kvcache), caches, strict=True):
            found.append(
                module.rotate_and_write(qgkv, heads, gated, *weights, 1e-6, cos, sin, at, cache[0], cache[1])
            )
        if heads:
            close(found[0], found[1], dtype, f"queries {heads} {gated} {norm} {rot}")
        close(caches[0], caches[1], dtype, f"cache {heads} {gated} {norm} {rot}")


if __name__ == "__main__":
    for kind in (torch.float32, torch.float16) if ON_CPU else (torch.float32, torch.float16, torch.bfloat16):
        check(kind)
    print("fused kernels equal their twins")
