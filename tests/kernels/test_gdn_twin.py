"""The tree form of GDN layers against the plain recurrence and against transformers, every node of every tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ddtree import gdn
from ddtree.tree import dense_mask
from tests.kernels.trees import SHAPES, make_tree, path_to, relative_error, shuffled

HK, HV, DIM = 1, 2, 64


def random_inputs(gen, requests, nodes, regime):
    """q, k [R, N, HK, d], v [R, N, HV, d], g, beta [R, N, HV], state [R, HV, d, d]; float64."""

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, k, v = randn(requests, nodes, HK, DIM), randn(requests, nodes, HK, DIM), randn(requests, nodes, HV, DIM)
    beta = torch.sigmoid(randn(requests, nodes, HV))
    g = -torch.rand(requests, 1, HV, generator=gen, dtype=torch.float64) * F.softplus(randn(requests, nodes, HV) + 1)
    if regime == "strong":
        g = -16 * F.softplus(randn(requests, nodes, HV) + 1)
    if regime == "aligned":
        k = randn(requests, 1, HK, DIM) + 0.05 * k
        beta, g = torch.full_like(beta, 0.999), torch.zeros_like(g)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * DIM**-0.5, k, v, g, beta, 0.1 * randn(requests, HV, DIM, DIM)


def recurrence(q, k, v, g, beta, state, parents):
    """One request, node by node, each from its parent's state: the definition. Returns out [N, HV, d] and the
    states."""
    group = HV // HK
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    states, out = [], []
    for i, p in enumerate(parents):
        s = (state if p < 0 else states[p]) * g[i].exp()[:, None, None]
        u = beta[i, :, None] * (v[i] - torch.einsum("hkv,hk->hv", s, k[i]))
        states.append(s + k[i, :, :, None] * u[:, None, :])
        out.append(torch.einsum("hkv,hk->hv", states[-1], q[i]))
    return torch.stack(out), states


@pytest.mark.parametrize("regime", ["normal", "strong", "aligned"])
@pytest.mark.parametrize(
    ("shape", "size"), [(s, n) for s in SHAPES for n in (16, 65)] + [("chain", 256), ("spine", 256)]
)
def test_solve_and_commit_equal_the_recurrence(shape, size, regime):
    gen = torch.Generator().manual_seed(size)
    lists = [shuffled(SHAPES[shape](n, gen), gen) for n in (size, max(1, size - 5))]
    tree = make_tree(lists, size, gen)
    data = random_inputs(gen, 2, size, regime)
    # Path sums of a 256-deep chain with strong decay reach -4,000, where float32 resolves 2e-4.
    bounds = {torch.float64: 2e-14, torch.float32: 3e-5 if (shape, regime) == ("chain", "strong") else 9e-6}
    exact = [recurrence(*(x[r] for x in data), parents) for r, parents in enumerate(lists)]
    for dtype, bound in bounds.items():
        q, k, v, g, beta, state = (x.to(dtype) for x in data)
        out, path_sum, u = gdn.solve_tree(q, k, v, g, beta, state, tree.words)
        assert torch.isfinite(out).all()
        for r, parents in enumerate(lists):
            want, states = exact[r]
            assert relative_error(out[r, : len(parents)], want) < bound
            leaf = int(tree.depth[r].argmax())
            path = path_to(parents, leaf)
            nodes = torch.full((1, len(path) + 2), -1, dtype=torch.int32)
            nodes[0, : len(path)] = torch.tensor(path)
            moved, conv = state[r : r + 1].clone(), torch.zeros(1, 4, 4, dtype=dtype)
            stash = gdn.Stash(torch.zeros(1, size, 4, dtype=dtype), k[r : r + 1], path_sum[r : r + 1], u[r : r + 1])
            gdn.commit(stash, conv, moved, nodes, torch.tensor([len(path) - 1]))
            assert relative_error(moved[0], states[leaf]) < bound


def test_padding_touches_nothing():
    gen = torch.Generator().manual_seed(3)
    parents = SHAPES["random"](20, gen)
    data = [x.float() for x in random_inputs(gen, 1, 32, "normal")]
    padded = make_tree([parents], 32, gen)
    cleared = replace(padded, words=padded.words * (torch.arange(32) < 20)[None, :, None])
    alone = gdn.solve_tree(*(x[:, :20] for x in data[:5]), data[5], padded.words[:, :20])
    for tree in (padded, cleared):
        out, path, u = gdn.solve_tree(*data, tree.words)
        for got, want in zip((out, path, u), alone, strict=True):
            torch.testing.assert_close(got[:, :20], want, rtol=2e-5, atol=2e-6)
    assert not u[:, 20:].any()


def test_conv_windows_follow_ancestors():
    gen = torch.Generator().manual_seed(4)
    parents = shuffled(SHAPES["spine"](48, gen), gen)
    tree = make_tree([parents], 48, gen)
    channels, kernel = 24, 4
    x = torch.randn(1, 48, channels, generator=gen, dtype=torch.float64)
    weight = torch.randn(channels, kernel, generator=gen, dtype=torch.float64)
    windows = gdn.conv_windows(tree.parents, kernel)
    for width in (kernel - 1, kernel):  # vLLM keeps kernel - 1 columns, transformers kernel
        history = torch.randn(1, channels, width, generator=gen, dtype=torch.float64)
        got = gdn.convolve(x, history, weight, windows)
        for i in range(48):
            path = path_to(parents, i)
            inputs = torch.cat([history[0], x[0, path].T], 1)
            want = F.silu(F.conv1d(inputs[None], weight[:, None], groups=channels)[0, :, -1])
            assert relative_error(got[0, i], want) < 1e-14
            moved = history.clone()
            stash = gdn.Stash(x, x.new_zeros(1, 48, 1, 2), x.new_zeros(1, 48, 1), x.new_zeros(1, 48, 1, 2))
            nodes = torch.tensor([path + [-1]], dtype=torch.int32)
            gdn.commit(stash, moved, x.new_zeros(1, 1, 2, 2), nodes, torch.tensor([len(path) - 1]))
            assert torch.equal(moved[0], inputs[:, -width:])


def _layer_and_inputs(gen, nodes, dtype=torch.float32):
    layer = gdn.Layer(
        conv_weight=torch.randn(2 * HK * DIM + HV * DIM, 4, generator=gen).to(dtype) * 0.5,
        a_log=torch.rand(HV, generator=gen).to(dtype),
        dt_bias=torch.rand(HV, generator=gen).to(dtype),
        key_heads=HK, value_heads=HV, key_dim=DIM, value_dim=DIM,
    )  # fmt: skip
    channels = layer.conv_weight.shape[0]
    x = torch.randn(1, nodes, channels, generator=gen).to(dtype)
    a, b = (torch.randn(1, nodes, HV, generator=gen).to(dtype) for _ in range(2))
    conv = torch.randn(1, channels, 4, generator=gen).to(dtype)
    return layer, x, a, b, conv, torch.randn(1, HV, DIM, DIM, generator=gen) * 0.1


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_verify_equals_transformers_on_every_path(rule):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    gen = torch.Generator().manual_seed(5)
    parents = shuffled(SHAPES["spine"](24, gen), gen)
    tree = make_tree([parents], 24, gen)
    layer, x, a, b, conv, state = _layer_and_inputs(gen, 24)
    out, stash = gdn.verify(layer, x, a, b, conv, state, tree.words, gdn.conv_windows(tree.parents, 4))
    for leaf in range(24):
        path = path_to(parents, leaf)
        inputs = torch.cat([conv, x[:, path].transpose(1, 2)], 2)
        mixed = F.silu(F.conv1d(inputs, layer.conv_weight[:, None], groups=inputs.shape[1]))
        q, k, v = mixed[:, :, -len(path) :].transpose(1, 2).split([HK * DIM, HK * DIM, HV * DIM], -1)
        q, k = (t.view(1, -1, HK, DIM).repeat_interleave(HV // HK, 2) for t in (q, k))
        g = -layer.a_log.exp() * F.softplus(a[:, path] + layer.dt_bias)
        want, final = getattr(modeling, rule)(
            q, k, v.view(1, -1, HV, DIM), g=g, beta=b[:, path].sigmoid(), initial_state=state.clone(),
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert relative_error(out[0, leaf], want[0, -1]) < 3e-6
        moved, window = state.clone(), conv.clone()
        gdn.commit(stash, window, moved, torch.tensor([path], dtype=torch.int32), torch.tensor([len(path) - 1]))
        assert relative_error(moved, final) < 3e-6
        assert torch.equal(window, inputs[:, :, -4:])


def test_ten_rounds_drift_no_more_than_plain_decoding():
    gen = torch.Generator().manual_seed(6)
    exact = plain = None
    state = torch.randn(1, HV, DIM, DIM, generator=gen) * 0.1
    exact, plain = state[0].double(), state[0].clone()
    conv = torch.zeros(1, 4, 4)
    for _ in range(10):
        parents = shuffled(SHAPES["spine"](65, gen), gen)
        tree = make_tree([parents], 65, gen)
        q, k, v, g, beta, _ = random_inputs(gen, 1, 65, "normal")
        g = g * 0.01  # little decay, so that errors are kept
        leaf = int(tree.depth[0].argmax())
        path = path_to(parents, leaf)
        along = [x[0, path] for x in (q, k, v, g, beta)]
        line = list(range(-1, len(path) - 1))
        exact = recurrence(*along, exact, line)[1][-1]
        plain = recurrence(*(x.float() for x in along), plain, line)[1][-1]
        single = [x.float() for x in (q, k, v, g, beta)]
        _, path_sum, u = gdn.solve_tree(*single, state, tree.words)
        stash = gdn.Stash(torch.zeros(1, 65, 4), single[1], path_sum, u)
        gdn.commit(stash, conv, state, torch.tensor([path], dtype=torch.int32), torch.tensor([len(path) - 1]))
    assert relative_error(state[0], exact) < max(3 * relative_error(plain, exact), 2e-6)


def test_slots_pick_the_states_and_a_request_without_path_keeps_them():
    gen = torch.Generator().manual_seed(7)
    parents = SHAPES["spine"](16, gen)
    tree = make_tree([parents, parents], 16, gen)
    layer, x, a, b, conv, state = _layer_and_inputs(gen, 16)
    x, a, b = (t.expand(2, -1, -1) for t in (x, a, b))
    pool, windows_pool = torch.randn(5, HV, DIM, DIM, generator=gen), torch.randn(5, *conv.shape[1:], generator=gen)
    pool[3], windows_pool[3] = state[0], conv[0]
    windows, slots = gdn.conv_windows(tree.parents, 4), torch.tensor([1, 3])
    out, stash = gdn.verify(layer, x, a, b, windows_pool, pool, tree.words, windows, slots)
    alone, stash_alone = gdn.verify(layer, x[:1], a[:1], b[:1], conv, state, tree.words[:1], windows[:1])
    torch.testing.assert_close(out[1:], alone, rtol=2e-5, atol=2e-6)
    before = pool.clone()
    path = path_to(parents, 15)
    nodes = torch.tensor([path, path], dtype=torch.int32)
    gdn.commit(stash, windows_pool, pool, nodes, torch.tensor([-1, len(path) - 1]), slots)
    gdn.commit(stash_alone, conv, state, nodes[:1], torch.tensor([len(path) - 1]))
    assert torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    torch.testing.assert_close(pool[3], state[0], rtol=2e-5, atol=2e-6)
    assert torch.equal(windows_pool[3], conv[0])


def test_mask_is_strictly_lower_triangular_in_any_topological_order():
    gen = torch.Generator().manual_seed(8)
    for _ in range(20):
        tree = make_tree([shuffled(SHAPES["random"](40, gen), gen)], 40, gen)
        assert not dense_mask(tree.words).triu(1).any()
