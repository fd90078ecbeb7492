"""Kernels against their twins: run with TRITON_INTERPRET=1 on a CPU (test_interpreted.py does), or as it is on a GPU.

Each check draws fresh inputs, poisons what a kernel must not read, and raises AssertionError. Usage: python -m
tests.kernels.interpret [NAME...] prints one line per check.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny products on a shared machine

import torch

from ddtree import attention as twin
from ddtree import gdn
from ddtree.kvcache import move_rows as twin_move
from ddtree.tree import build_tree as twin_build
from ddtree.tree import top_logprobs
from ddtree.walk import Path, commit_rows
from ddtree.walk import walk as twin_walk
from tests.kernels.trees import SHAPES, make_tree, path_to, shuffled

ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if ON_CPU else "cuda"
NAN = float("nan")
# The interpreter has no sound bfloat16; float16 takes the same code.
DTYPES = (torch.float32, torch.float16) if ON_CPU else (torch.float32, torch.float16, torch.bfloat16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(gen, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def to_device(tree):
    values = {name: getattr(tree, name) for name in tree.__dataclass_fields__}
    return type(tree)(**{n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in values.items()})


def close(got, want, bound, what=""):
    """Norm-wise relative error below bound; NaN never passes."""
    got, want = got.double().cpu(), want.double().cpu()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= bound, f"{what}: relative error {error:.2e} > {bound:.0e}"


BOUND = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def attention_case(gen, sizes, size, lengths, heads, kv_heads, dim, dtype, window=0, paged=0, words=True, splits=0):
    from ddtree.kernels import attention as fast

    lists = [shuffled(SHAPES["spine"](n, gen), gen) for n in sizes]
    tree = to_device(make_tree(lists, size, gen))
    rows = max(lengths) + size + 9
    q = draw(gen, len(sizes), size, heads, dim, dtype=dtype)
    k, v = (draw(gen, len(sizes), rows, kv_heads, dim, dtype=dtype) for _ in range(2))
    for r, length in enumerate(lengths):
        k[r, length + size :], v[r, length + size :] = NAN, NAN
    where = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    options = {"depth": tree.depth, "window": window}
    bits = tree.words if words else None
    want = twin.tree_attention(q.double(), k.double(), v.double(), where, bits, **options)
    if paged:
        blocks = -(-rows // paged)
        packed = torch.full((len(sizes) * blocks + 3, kv_heads, paged, 2 * dim), NAN, device=DEVICE, dtype=dtype)
        k_pages, v_pages = packed.transpose(1, 2).split(dim, -1)
        table = torch.randperm(len(sizes) * blocks + 3, generator=gen)[: len(sizes) * blocks].view(-1, blocks)
        for r in range(len(sizes)):
            for b in range(blocks):
                part = slice(b * paged, min((b + 1) * paged, rows))
                k_pages[table[r, b], : part.stop - part.start] = k[r, part]
                v_pages[table[r, b], : part.stop - part.start] = v[r, part]
        k, v, options["block_table"] = k_pages, v_pages, table.int().to(DEVICE)
    got = fast.tree_attention(q, k, v, where, bits, **options, tune={"splits": splits} if splits else None)
    for r, n in enumerate(sizes):  # padding rows are padding
        close(got[r, :n], want[r, :n], BOUND[dtype], f"attention {sizes} {lengths} {heads}/{kv_heads}x{dim} {dtype}")


def check_attention():
    for seed, dtype in enumerate(DTYPES):
        gen = generator(seed)
        attention_case(gen, [17, 9], 17, [100, 0], 4, 2, 64, dtype)
        attention_case(gen, [17, 17], 17, [140, 63], 2, 1, 128, dtype, splits=2)
    gen = generator(9)
    attention_case(gen, [70], 70, [37], 3, 1, 16, torch.float32)
    attention_case(gen, [130, 66], 130, [64, 65], 2, 2, 16, torch.float32, splits=3)
    attention_case(gen, [17], 17, [40], 2, 1, 256, torch.float16)


def check_attention_windows():
    gen = generator(1)
    for window, splits in ((7, 1), (50, 2), (400, 2)):
        attention_case(gen, [33, 20], 33, [150, 3], 4, 2, 16, torch.float32, window=window, splits=splits)


def check_attention_paged():
    gen = generator(2)
    for splits in (1, 3):
        attention_case(gen, [33, 20], 33, [150, 3], 4, 2, 16, torch.float32, paged=16, splits=splits)


def check_attention_block():
    gen = generator(3)
    attention_case(gen, [16, 16], 16, [90, 0], 4, 2, 64, torch.float32, words=False)
    attention_case(gen, [16], 16, [90], 4, 2, 64, torch.float32, words=False, splits=2)


def check_paged_ragged():
    from ddtree.kernels import attention as fast

    gen = generator(4)
    sizes, lengths = [20, 5, 33], [30, 100, 0]
    cu = torch.tensor([0, 20, 25, 58], dtype=torch.int32, device=DEVICE)
    trees = [to_device(make_tree([shuffled(SHAPES["spine"](n, gen), gen)], n, gen)) for n in sizes]
    words = torch.cat([t.words[0] for t in trees])
    q, pages = draw(gen, 58, 4, 32), draw(gen, 40, 2, 16, 2, 32)
    k_pages, v_pages = pages[:, 0], pages[:, 1]
    table = torch.randperm(40, generator=gen)[:27].view(3, 9).int().to(DEVICE)
    where = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = fast.paged_attention(q, k_pages, v_pages, cu, 33, where, words, table)
    for r in range(3):
        rows = slice(int(cu[r]), int(cu[r + 1]))
        one = slice(r, r + 1)
        want = twin.tree_attention(
            q[None, rows].double(),
            k_pages.double(),
            v_pages.double(),
            where[one],
            trees[r].words,
            block_table=table[one],
        )
        close(got[rows], want[0], 2e-6, "paged ragged")


def check_two_parts():
    from ddtree.kernels import attention as fast

    gen = generator(5)
    for dtype in DTYPES:
        cu = torch.tensor([0, 30, 47, 117], dtype=torch.int32, device=DEVICE)
        trees = [make_tree([shuffled(SHAPES["spine"](n, gen), gen)], n, gen).words[0] for n in (30, 17, 70)]
        words = torch.cat([torch.nn.functional.pad(w, (0, 2 - w.shape[1])) for w in trees]).to(DEVICE)
        q, k, v = (
            draw(gen, 117, 4, 64, dtype=dtype),
            draw(gen, 117, 2, 64, dtype=dtype),
            draw(gen, 117, 2, 64, dtype=dtype),
        )
        want, want_lse = twin.tree_part(q.double(), k.double(), v.double(), cu, words)
        got, lse = fast.tree_part(q, k, v, cu, words, max_nodes=70)
        close(got, want, BOUND[dtype], "tree part")
        close(lse, want_lse, 2e-6 if dtype == torch.float32 else 1e-3, "tree part lse")
        other, other_lse = draw(gen, 117, 4, 64, dtype=dtype), draw(gen, 4, 117)
        other[3], other_lse[:, 3], other_lse[:, 40] = NAN, float("-inf"), float("inf")
        joined, joined_lse = fast.merge(other, other_lse, got, lse)
        want, want_lse = twin.merge(other, other_lse, got, lse)
        close(joined, want, BOUND[dtype], "merge")
        close(joined_lse, want_lse, 2e-6, "merge lse")


def gdn_case(gen, sizes, size, hk, hv, dim, dtype=torch.float32, aligned=False, slots=None, width=3, tune=None):
    """Verify, then commit one path, against the twin in float64 on the same (rounded) inputs."""
    from ddtree.kernels import gdn as fast

    lists = [shuffled(SHAPES["spine"](n, gen), gen) for n in sizes]
    tree = make_tree(lists, size, gen)
    requests, channels = len(sizes), (2 * hk + hv) * dim
    x = draw(gen, requests, size, channels, dtype=dtype)
    if aligned:  # keys of one head nearly equal: large entries off the diagonal
        x = (draw(gen, 1, 1, channels) + 0.05 * draw(gen, requests, size, channels)).to(dtype)
    a, b = (draw(gen, requests, size, hv, dtype=dtype) for _ in range(2))
    if aligned:
        a, b = a - 12, b + 6
    weight = 0.5 * draw(gen, channels, 4, dtype=dtype)
    layer = gdn.Layer(weight, draw(gen, hv).abs(), draw(gen, hv), hk, hv, dim, dim)
    pool = requests if slots is None else max(slots) + 2
    conv, state = draw(gen, pool, channels, width, dtype=dtype), 0.1 * draw(gen, pool, hv, dim, dim)
    place = None if slots is None else torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    windows, words = gdn.conv_windows(tree.parents, 4).to(DEVICE), tree.words.to(DEVICE)
    exact = gdn.Layer(*(t.double() for t in (layer.conv_weight, layer.a_log, layer.dt_bias)), hk, hv, dim, dim)
    wide = [t.double() for t in (x, a, b, conv, state)]
    want, want_stash = gdn.verify(exact, *wide, words, windows, place)
    got, stash = fast.launch_verify(layer, x, a, b, conv, state, words, windows, place, tune=tune)
    label = f"gdn {sizes} {hk}/{hv}x{dim} {dtype} {'aligned' if aligned else ''} {tune or ''}"
    for r, n in enumerate(sizes):
        close(got[r, :n], want[r, :n], max(BOUND[dtype], 9e-6), label + " out")
        for name in ("k", "g", "u"):
            close(getattr(stash, name)[r, :n], getattr(want_stash, name)[r, :n], 9e-6, f"{label} {name}")
    leaves = [int(tree.depth[r].argmax()) for r in range(requests)]
    paths = [path_to(one, leaf) for one, leaf in zip(lists, leaves, strict=True)]
    nodes = torch.full((requests, 17), -1, dtype=torch.int32)
    for r, path in enumerate(paths):
        nodes[r, : len(path)] = torch.tensor(path)
    for cut in (0, 1, 99):  # root alone, a short path, all of it; -1 leaves a request as it is
        count = torch.tensor([min(cut, len(p) - 1) for p in paths], dtype=torch.int32)
        if cut == 1 and requests > 1:
            count[0] = -1
        states = [conv.clone(), state.clone(), conv.double(), state.double()]
        fast.launch_commit(stash, states[0], states[1], nodes.to(DEVICE), count.to(DEVICE), place)
        gdn.commit(want_stash, states[2], states[3], nodes.to(DEVICE), count.to(DEVICE), place)
        assert torch.equal(states[0].double(), states[2]), f"{label} window"
        close(states[1], states[3], 9e-6, label + " state")


def check_gdn():
    gen = generator(20)
    gdn_case(gen, [17], 17, 1, 2, 16)
    gdn_case(gen, [33, 20], 33, 1, 2, 16, torch.float16, slots=[3, 1], width=4)
    gdn_case(gen, [65, 40], 65, 2, 2, 16)
    gdn_case(gen, [150], 150, 1, 1, 16)
    gdn_case(gen, [1], 1, 1, 1, 16)


def check_gdn_aligned():
    gen = generator(21)
    gdn_case(gen, [65], 65, 1, 2, 32, aligned=True)
    gdn_case(gen, [100], 100, 1, 1, 16, aligned=True, tune={"BLOCK": 32})


def same_tree(got, want):
    for name in ("tokens", "parents", "depth", "words", "n_nodes", "scores"):
        assert torch.equal(getattr(got, name), getattr(want, name)), f"tree {name} differs"


def check_build():
    from ddtree.kernels.tree import build_tree

    gen = generator(30)
    for depths, vocabulary, budget, spread in (
        (15, 300, 16, 3),
        (15, 300, 64, 1),
        (3, 4, 70, 1),
        (1, 50, 8, 1),
        (4, 40, 1, 2),
    ):
        for ties in (False, True):
            logits = draw(gen, 2, depths, vocabulary) * spread
            if ties:  # many equal scores: the order of ties must be the twin's
                logits = logits.round()
                logits[1, :, 1:] = logits[1, :, :1]
            logits[0, :, -1] = float("-inf")
            values, ids = top_logprobs(logits, budget)
            root = torch.tensor([5, 7], device=DEVICE)
            same_tree(build_tree((values, ids), root, budget), twin_build((values, ids), root, budget))


def check_walk():
    from ddtree.kernels.tree import walk

    gen = generator(31)
    for size in (17, 65, 130):
        for _ in range(3):
            lists = [
                shuffled(SHAPES[s](n, gen), gen) for s, n in (("spine", size), ("random", size), ("star", size // 2))
            ]
            tree = to_device(make_tree(lists, size, gen))
            chosen = torch.randint(5000, 6000, (3, size), generator=gen)
            for r, parents in enumerate(lists):  # follow a random path for most nodes
                for i, p in enumerate(parents):
                    if p >= 0 and torch.rand(1, generator=gen) < 0.6:
                        chosen[r, p] = tree.tokens[r, i]
            got, want = walk(tree, chosen.to(DEVICE)), twin_walk(tree, chosen.to(DEVICE))
            for name in ("nodes", "count", "bonus", "tokens"):
                assert torch.equal(getattr(got, name), getattr(want, name)), f"walk {name} differs"


def check_rows():
    from ddtree.kernels.rows import gather_rows, move_rows

    gen = generator(32)
    for dtype in DTYPES:
        cache = draw(gen, 3, 2, 2, 40, 2, 24, dtype=dtype)
        nodes = torch.tensor([[0, 1, 3, 4, 9, -1], [0, 2, -1, -1, -1, -1]], dtype=torch.int32, device=DEVICE)
        path = Path(nodes, torch.tensor([4, 1], dtype=torch.int32, device=DEVICE), nodes[:, 0], nodes)
        source, destination = commit_rows(path, torch.tensor([20, 7], device=DEVICE))
        want = cache.clone()
        twin_move(want, source, destination)
        move_rows(cache, source, destination)
        assert torch.equal(cache, want), "move_rows differs"
        hidden = draw(gen, 2, 12, 100, dtype=dtype)
        got = gather_rows(hidden, nodes)
        for r in range(2):
            for s in range(6):
                expected = hidden[r, nodes[r, s]] if nodes[r, s] >= 0 else torch.zeros_like(hidden[0, 0])
                assert torch.equal(got[r, s], expected), "gather_rows differs"


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}


def main(names: list[str]) -> int:
    failed = 0
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            print("ok    ", name, flush=True)
        except Exception as error:
            failed += 1
            print("FAILED", name, f"{type(error).__name__}: {error}", flush=True)
            if os.environ.get("TRACE"):
                raise
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
