"""Time every kernel beside the floor of its bytes and operations: python -m ddtree.kernels.bench [--quick] [--out
FILE].

Times are medians of CUDA graph replays over buffers that exceed the L2 cache together. The floor is the larger of bytes
over measured copy bandwidth and operations over measured matrix throughput (bf16, and tf32 at half of it for GDN); a
launch adds about 2 us that the floor leaves out.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddtree import gdn as twin
from ddtree.kernels import gdn
from ddtree.kernels.attention import tree_attention
from ddtree.kernels.rows import move_rows
from ddtree.kernels.tree import build_tree, walk
from ddtree.tree import Tree, top_logprobs
from ddtree.walk import commit_rows

DEVICE = "cuda"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One line of the table; us: microseconds, floor the larger of the two rooflines, flash: the same work by SDPA."""

    kernel: str
    shape: str
    budget: int
    context: int
    batch: int
    mbytes: float
    gflop: float
    floor_us: float
    us: float
    flash_us: float | None = None

    @property
    def ratio(self) -> float:
        return self.us / self.floor_us

    def line(self) -> str:
        flash = f"{self.flash_us:9.1f} {self.us / self.flash_us:6.2f}" if self.flash_us else ""
        return (
            f"{self.kernel:15} {self.shape:10} {self.budget:4} {self.context:7} {self.batch:3} {self.mbytes:9.2f} "
            f"{self.gflop:8.2f} {self.floor_us:8.1f} {self.us:8.1f} {self.ratio:6.2f} {flash}"
        )


HEADER = (
    f"{'kernel':15} {'shape':10} {'N':>4} {'context':>7} {'R':>3} {'MB':>9} {'GFLOP':>8} {'floor us':>8} {'us':>8} "
    f"{'ratio':>6} {'flash us':>9} {'ratio':>6}"
)


def replay(work: Callable[[int], object], calls: int, repeats: int = 15) -> float:
    """Median microseconds of one of `calls` consecutive calls work(0), work(1), ... replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(calls):
            work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i)
    times = []
    for _ in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return float(statistics.median(times[3:])) * 1e3 / calls


@dataclass(frozen=True)
class Ceilings:
    """What the card does, measured: bytes and operations a microsecond."""

    bytes_us: float
    flop_us: float

    def floor(self, size: float, flop: float, slower: float = 1.0) -> float:
        return max(size / self.bytes_us, flop * slower / self.flop_us)


def ceilings() -> Ceilings:
    a = torch.randn(1 << 28, device=DEVICE, dtype=BF16)
    b = torch.empty_like(a)
    copy = replay(lambda i: (b if i % 2 else a).copy_(a if i % 2 else b) and None, 4)
    m = torch.randn(8192, 8192, device=DEVICE, dtype=BF16)
    product = replay(lambda i: torch.matmul(m, m, out=b[: 1 << 26].view(8192, 8192)) and None, 2, 5)
    return Ceilings(2 * a.numel() * 2 / copy, 2 * 8192**3 / product)


def some_tree(budget: int, requests: int, depths: int = 15) -> Tree:
    values, ids = top_logprobs(torch.randn(requests, depths, 4096, device=DEVICE) * 3, budget)
    return build_tree((values, ids), torch.zeros(requests, dtype=torch.int64, device=DEVICE), budget)


def attention_rows(card: Ceilings, quick: bool) -> Iterator[Row]:
    shapes = {"8B": (32, 8, 128), "27B": (24, 4, 256)}
    contexts = (512, 8192, 32768) if quick else (512, 2048, 8192, 32768, 131072)
    for shape, (heads, kv_heads, dim) in shapes.items():
        for batch in (1, 8) if quick else (1, 8, 32):
            for context in contexts:
                for budget in (64,) if quick else (16, 64, 256):
                    if batch * context > 1 << 20:
                        continue
                    yield attention_row(card, shape, heads, kv_heads, dim, batch, context, budget)


def attention_row(
    card: Ceilings, shape: str, heads: int, kv_heads: int, dim: int, batch: int, context: int, budget: int,
    tune: dict[str, int] | None = None, flash: bool = True,
) -> Row:  # fmt: skip
    nodes, rows = budget + 1, context + budget + 1
    item = batch * rows * kv_heads * dim * 2 * 2
    copies = max(1, min(8, (200 << 20) // item))
    k = [torch.randn(batch, rows, kv_heads, dim, device=DEVICE, dtype=BF16) for _ in range(copies)]
    v = [torch.randn_like(x) for x in k]
    q = torch.randn(batch, nodes, heads, dim, device=DEVICE, dtype=BF16)
    tree, lengths = some_tree(budget, batch), torch.full((batch,), context, dtype=torch.int32, device=DEVICE)

    def ours(i: int) -> None:
        tree_attention(q, k[i % copies], v[i % copies], lengths, tree.words, tune=dict(tune) if tune else None)

    calls = max(2, min(20, (1 << 20) // (context * batch)))
    us = replay(ours, calls)
    flash_us = min(flash_times(q, k, v, calls)) if flash else None
    size = item + 2 * q.numel() * 2
    flop = 4.0 * batch * nodes * heads * dim * (context + nodes / 8)
    return Row("attention", shape, budget, context, batch, size / 1e6, flop / 1e9, card.floor(size, flop), us, flash_us)


def flash_times(q: Tensor, k: list[Tensor], v: list[Tensor], calls: int) -> list[float]:
    """The same rows over the same keys without a mask, by torch's FlashAttention: as heads, and with the group packed
    in rows."""
    batch, nodes, heads, dim = q.shape
    kv_heads, copies = k[0].shape[2], len(k)
    packed = q.view(batch, nodes, kv_heads, heads // kv_heads, dim).transpose(1, 2).flatten(2, 3).contiguous()
    plain = q.transpose(1, 2)
    found = []
    for query, grouped in ((plain, True), (packed, False)):

        def run(i: int, query: Tensor = query, grouped: bool = grouped) -> None:
            keys, values = k[i % copies].transpose(1, 2), v[i % copies].transpose(1, 2)
            F.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found.append(replay(run, calls))
    return found


def gdn_rows(card: Ceilings, quick: bool) -> Iterator[Row]:
    for batch, budget in (
        ((1, 16), (1, 64), (8, 16)) if quick else ((1, 16), (1, 64), (1, 256), (8, 16), (8, 64), (32, 16))
    ):
        yield from gdn_pair(card, batch, budget)


def gdn_pair(card: Ceilings, batch: int, budget: int, tune: dict[str, int] | None = None) -> Iterator[Row]:
    """Verify and commit of the 27B shape; microseconds of one of 48 layers, each with states of its own."""
    hk, hv, dim, layers, nodes = 16, 48, 128, 48 if batch == 1 else 12, budget + 1
    channels = (2 * hk + hv) * dim
    layer = twin.Layer(
        torch.randn(channels, 4, device=DEVICE, dtype=BF16), torch.rand(hv, device=DEVICE),
        torch.rand(hv, device=DEVICE), hk, hv, dim, dim,
    )  # fmt: skip
    x = [torch.randn(batch, nodes, channels, device=DEVICE, dtype=BF16) for _ in range(layers)]
    a, b = (torch.randn(batch, nodes, hv, device=DEVICE, dtype=BF16) for _ in range(2))
    conv = [torch.randn(batch, channels, 3, device=DEVICE, dtype=BF16) for _ in range(layers)]
    state = [0.1 * torch.randn(batch, hv, dim, dim, device=DEVICE) for _ in range(layers)]
    tree = some_tree(budget, batch)
    windows = twin.conv_windows(tree.parents, 4)
    stashes: list[twin.Stash] = [None] * layers  # type: ignore[list-item]

    def verify(i: int) -> None:
        stashes[i] = gdn.launch_verify(layer, x[i], a, b, conv[i], state[i], tree.words, windows, tune=tune)[1]

    us = replay(verify, layers)
    fixed = batch * (hv * dim * dim * 4 + nodes * (channels * 2 + hv * dim * 2))
    stash = batch * nodes * (hv * dim + hk * dim + hv) * 4
    flop = batch * hv * (4.0 * nodes * dim * dim + 4 * nodes**2 * dim + 2 * nodes**2 * dim)
    yield Row("gdn verify", "27B", budget, 0, batch, (fixed + stash) / 1e6, flop / 1e9,
              card.floor(fixed + stash, flop, 2.0), us)  # fmt: skip
    path = walk(tree, follow(tree))
    us = replay(lambda i: gdn.launch_commit(stashes[i], conv[i], state[i], path.nodes, path.count), layers)
    size = batch * (2 * hv * dim * dim * 4 + 2 * channels * 3 * 2 + 16 * (hv * dim + hk * dim) * 4)
    yield Row("gdn commit", "27B", budget, 0, batch, size / 1e6, 0.0, card.floor(size, 0.0), us)


def follow(tree: Tree) -> Tensor:
    """Choices of a target that accepts the deepest path of every tree."""
    chosen = torch.full_like(tree.tokens, -5)
    for r in range(tree.tokens.shape[0]):
        node = int(tree.depth[r].argmax())
        while (parent := int(tree.parents[r, node])) >= 0:
            chosen[r, parent] = tree.tokens[r, node]
            node = parent
    return chosen


def round_rows(card: Ceilings, quick: bool) -> Iterator[Row]:
    """Build, walk and cache move of one round; the path of the bench is the longest that the tree has."""
    shapes = {"8B": (36, 8, 128, 151936), "SmolLM2": (30, 3, 64, 49152)}
    for shape, (layers, heads, dim, vocabulary) in shapes.items():
        for batch in (1,) if quick else (1, 8, 32):
            cache = torch.randn(layers, 2, batch, 2048, heads, dim, device=DEVICE, dtype=BF16)
            logits = torch.randn(batch, 15, vocabulary, device=DEVICE, dtype=BF16)
            for budget in (16, 64, 256):
                yield from round_parts(card, shape, batch, budget, cache, logits)


def round_parts(card: Ceilings, shape: str, batch: int, budget: int, cache: Tensor, logits: Tensor) -> Iterator[Row]:
    lengths = torch.full((batch,), 1024, device=DEVICE)
    roots = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    best = top_logprobs(logits, budget)
    tree = build_tree(best, roots, budget)
    chosen = follow(tree)
    path = walk(tree, chosen)
    rows = commit_rows(path, lengths)
    changed = int((rows[0] != rows[1]).sum())
    moved = changed * 2 * cache[:, :, 0, 0].numel() * cache.element_size()
    parts: dict[str, tuple[float, Callable[[int], object]]] = {
        "top tokens": (logits.numel() * 2, lambda _: top_logprobs(logits, budget)),
        "build": (best[0].numel() * 12, lambda _: build_tree(best, roots, budget)),
        "walk": (tree.words.numel() * 8 + tree.tokens.numel() * 24, lambda _: walk(tree, chosen)),
        "commit rows": (64.0 * batch, lambda _: commit_rows(path, lengths)),
        "move rows": (max(moved, 1), lambda _: move_rows(cache, *rows)),
    }
    for name, (size, work) in parts.items():
        us = replay(work, 20)
        yield Row(name, shape, budget, 0, batch, size / 1e6, 0.0, card.floor(size, 0.0), us)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", choices=("attention", "gdn", "round"), help="one group of kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: the kernels' speed can only be measured on one", file=sys.stderr)
        return 2
    card = ceilings()
    name = torch.cuda.get_device_name()
    print(f"{name}: copy {card.bytes_us / 1e6:.2f} TB/s, bf16 product {card.flop_us / 1e6:.0f} TFLOP/s")
    print(HEADER)
    rows = []
    groups = {"round": round_rows, "gdn": gdn_rows, "attention": attention_rows}
    for group_name, group in groups.items():
        if options.only in (None, group_name):
            for row in group(card, options.quick):
                rows.append(row)
                print(row.line(), flush=True)
                torch.cuda.empty_cache()
    if options.out:
        data = {"gpu": name, "torch": torch.__version__, "ceilings": asdict(card)}
        options.out.write_text(json.dumps(data | {"rows": [asdict(r) for r in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
