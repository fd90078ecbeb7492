"""Tree attention in plain torch against scaled_dot_product_attention with an explicit mask made by walking parents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddtree import attention
from tests.kernels.trees import SHAPES, make_tree, path_to, shuffled


def explicit_mask(lists, size, lengths, slots, window=0):
    mask = torch.zeros(len(lists), size, slots, dtype=torch.bool)
    for r, parents in enumerate(lists):
        for i in range(size):
            path = path_to(parents, i) if i < len(parents) else [i]
            position = lengths[r] + len(path) - 1
            seen = {s: s for s in range(lengths[r])} | {lengths[r] + j: lengths[r] + d for d, j in enumerate(path)}
            for slot, at in seen.items():
                mask[r, i, slot] = window <= 0 or at > position - window
    return mask


def reference(q, k, v, mask):
    group = q.shape[2] // k.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask[:, None]).transpose(1, 2)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_attention_equals_sdpa(shape, window):
    gen = torch.Generator().manual_seed(1)
    lists = [shuffled(SHAPES[shape](n, gen), gen) for n in (70, 33, 1)]
    tree, lengths = make_tree(lists, 70, gen), torch.tensor([0, 25, 61], dtype=torch.int32)
    q = torch.randn(3, 70, 6, 16, generator=gen)
    k, v = (torch.randn(3, 140, 2, 16, generator=gen) for _ in range(2))
    mask = explicit_mask(lists, 70, lengths.tolist(), 140, window)
    got = attention.tree_attention(q, k, v, lengths, tree.words, depth=tree.depth, window=window)
    torch.testing.assert_close(got, reference(q, k, v, mask), rtol=1e-5, atol=1e-6)


def test_unwritten_rows_of_the_cache_are_never_read():
    gen = torch.Generator().manual_seed(2)
    parents = SHAPES["random"](12, gen)
    tree, lengths = make_tree([parents], 12, gen), torch.tensor([9], dtype=torch.int32)
    q = torch.randn(1, 12, 2, 8, generator=gen)
    k, v = (torch.randn(1, 40, 1, 8, generator=gen) for _ in range(2))
    clean = attention.tree_attention(q, k, v, lengths, tree.words)
    k[:, 21:], v[:, 21:] = float("nan"), float("nan")
    assert torch.equal(attention.tree_attention(q, k, v, lengths, tree.words), clean)


def test_paged_cache_with_strided_views_equals_contiguous():
    gen = torch.Generator().manual_seed(3)
    tree = make_tree([SHAPES["spine"](20, gen), SHAPES["star"](11, gen)], 20, gen)
    lengths = torch.tensor([37, 5], dtype=torch.int32)
    packed = torch.randn(16, 2, 8, 2 * 16, generator=gen)  # [block, head, slot, k|v]
    k_pages, v_pages = packed.transpose(1, 2).split(16, -1)
    table = torch.randperm(16, generator=gen).view(2, 8).int()
    k, v = (x[table.long()].flatten(1, 2).contiguous() for x in (k_pages, v_pages))
    q = torch.randn(2, 20, 4, 16, generator=gen)
    got = attention.tree_attention(q, k_pages, v_pages, lengths, tree.words, block_table=table)
    assert torch.equal(got, attention.tree_attention(q, k, v, lengths, tree.words))


def test_without_words_a_block_sees_all_of_itself():
    gen = torch.Generator().manual_seed(4)
    q = torch.randn(1, 5, 2, 8, generator=gen)
    k, v = (torch.randn(1, 30, 1, 8, generator=gen) for _ in range(2))
    got = attention.tree_attention(q, k, v, torch.tensor([11]), None)
    mask = (torch.arange(30) < 16).expand(1, 5, 30)
    torch.testing.assert_close(got, reference(q, k, v, mask), rtol=1e-5, atol=1e-6)


def test_two_part_form_equals_one_pass_also_without_context():
    gen = torch.Generator().manual_seed(5)
    lists, lengths = [shuffled(SHAPES["spine"](n, gen), gen) for n in (30, 17)], [40, 0]
    cu = torch.tensor([0, 30, 47], dtype=torch.int32)
    q = torch.randn(47, 4, 16, generator=gen)
    k, v = (torch.randn(47, 2, 16, generator=gen) for _ in range(2))
    words = torch.cat([make_tree([one], len(one), gen).words[0] for one in lists])
    out, lse = attention.tree_part(q, k, v, cu, words)
    context_k, context_v = (torch.randn(2, 40, 2, 16, generator=gen) for _ in range(2))
    for r in range(2):
        rows = slice(int(cu[r]), int(cu[r + 1]))
        seen = torch.ones(1, rows.stop - rows.start, 40, dtype=torch.bool) & (torch.arange(40) < lengths[r])
        first, first_lse = attention.attend(q[None, rows], context_k[r : r + 1], context_v[r : r + 1], seen)
        got, total = attention.merge(first[0], first_lse[0].T, out[rows], lse[:, rows])
        both_k, both_v = (torch.cat([a[r], b[rows]])[None] for a, b in ((context_k, k), (context_v, v)))
        mask = torch.cat([seen, explicit_mask([lists[r]], len(lists[r]), [0], len(lists[r]))], 2)
        torch.testing.assert_close(got[None], reference(q[None, rows], both_k, both_v, mask), rtol=1e-5, atol=1e-6)
        assert torch.isfinite(total).all()
        if lengths[r] == 0:
            nan = torch.full_like(first[0], float("nan"))
            for empty in (float("-inf"), float("inf")):
                again, _ = attention.merge(nan, torch.full_like(first_lse[0].T, empty), out[rows], lse[:, rows])
                assert torch.equal(again, out[rows])


def test_a_window_needs_depths():
    gen = torch.Generator().manual_seed(6)
    tree = make_tree([SHAPES["chain"](4, gen)], 4, gen)
    q, cache = torch.zeros(1, 4, 1, 8), torch.zeros(1, 8, 1, 8)
    with pytest.raises(ValueError, match="depth"):
        attention.tree_attention(q, cache, cache, torch.tensor([2]), tree.words, window=4)
