"""Attention of one verification step in CUDA graphs, microseconds a layer: stock causal, context + tree, fused.

    python tests/native/bench_attention.py     (needs a GPU and vLLM; Qwen3-8B's head shape)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddtree.kernels.attention import paged_attention
from ddtree.native.attend import attend
from ddtree.native.step_kernels import pack

HEADS, KV, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 36


def time_graph(step: Callable[[], object]) -> float:
    """Microseconds a call, LAYERS calls in one graph, median of 7 replays."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            step()
    times = []
    for _ in range(7):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / LAYERS * 1e3)
    return sorted(times)[3]


def case(requests: int, context: int, rows: int) -> None:
    from vllm.v1.attention.backends.flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    gen = torch.Generator(device="cuda").manual_seed(0)
    total, pages = requests * rows, (context + rows + BLOCK) // BLOCK + 1

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=gen).to(torch.bfloat16)

    q, k, v = made(total, HEADS, DIM), made(total, KV, DIM), made(total, KV, DIM)
    cache = made(requests * pages + 1, 2, BLOCK, KV, DIM)
    keys, values = cache.unbind(1)
    table = torch.arange(1, requests * pages + 1, device="cuda", dtype=torch.int32).view(requests, pages)
    position = context + torch.arange(rows, device="cuda")
    for r in range(requests):
        keys[table[r, position // BLOCK].long(), position % BLOCK] = k[r * rows : (r + 1) * rows]
        values[table[r, position // BLOCK].long(), position % BLOCK] = v[r * rows : (r + 1) * rows]
    start = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * rows
    cached = torch.full((requests,), context, device="cuda", dtype=torch.int32)
    length = torch.full((requests,), rows, device="cuda", dtype=torch.int32)
    words = pack(torch.tril(torch.ones(rows, rows, dtype=torch.bool)), (rows + 63) // 64).cuda().repeat(requests, 1)
    out = torch.empty_like(q)
    scale = DIM**-0.5

    def plan(causal: bool, lens: torch.Tensor, splits: int) -> torch.Tensor:
        return get_scheduler_metadata(
            batch_size=requests, max_seqlen_q=rows, max_seqlen_k=context + rows, num_heads_q=HEADS, num_heads_kv=KV,
            headdim=DIM, cache_seqlens=lens, qkv_dtype=torch.bfloat16, cu_seqlens_q=start, page_size=BLOCK,
            causal=causal, window_size=(-1, -1), num_splits=splits,
        )  # fmt: skip

    common = {"q": q, "k": keys, "v": values, "cu_seqlens_q": start, "max_seqlen_q": rows,
              "max_seqlen_k": context + rows, "softmax_scale": scale, "block_table": table,
              "fa_version": 3}  # fmt: skip

    def stock(splits: int) -> Callable[[], object]:
        full = cached + length
        meta = plan(True, full, splits)
        return lambda: flash_attn_varlen_func(
            out=out, seqused_k=full, causal=True, scheduler_metadata=meta, num_splits=splits, **common
        )

    def split(splits: int) -> Callable[[], object]:
        meta = plan(False, cached, splits)

        def run() -> None:
            part, lse = flash_attn_varlen_func(
                seqused_k=cached, causal=False, return_softmax_lse=True, scheduler_metadata=meta, num_splits=splits,
                **common,
            )  # fmt: skip
            attend(q, k, v, part, lse, words, start, length, cached, out, scale, rows)

        return run

    def fused(reach: int) -> Callable[[], object]:
        return lambda: paged_attention(
            q, keys, values, start, rows, cached, words, table, out=out, scale=scale, reach=reach
        )

    variants = {
        "stock/32": stock(32), "stock/1": stock(1), "split/32": split(32), "split/1": split(1),
        "fused/exact": fused(context), "fused/4096": fused(4096),
    }  # fmt: skip
    expected = None
    line = []
    for name, run in variants.items():
        try:
            run()
            if expected is None:
                expected = out.clone()
            error = float((out - expected).float().abs().max())
            line.append(f"{name} {time_graph(run):6.1f} (err {error:.0e})")
        except Exception as problem:
            line.append(f"{name} failed: {type(problem).__name__} {str(problem)[:80]}")
    print(f"requests {requests:2d} context {context:5d} rows {rows:3d} | " + " | ".join(line), flush=True)


if __name__ == "__main__":
    for shape in ((1, 512, 16), (1, 512, 17), (1, 512, 65), (1, 8192, 65), (8, 512, 65), (32, 512, 17)):
        case(*shape)
