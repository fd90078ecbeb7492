"""Packed drafting, anchors, losses, replay: the arithmetic that everything else rests on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ddtree.checkpoint import load_drafter
from ddtree.drafter import Drafter, DrafterConfig
from ddtree.measure import CHAIN, Document
from ddtree.measure import replay as reference_replay
from ddtree.standalone.engine import Engine
from ddtree.standalone.weights import from_transformers
from ddtree.training.features import InProcess
from ddtree.training.live import live_and_replay
from ddtree.training.losses import LossConfig, LossSums, head_loss, slot_weights, tree_threshold
from ddtree.training.packing import Plan, Shape, assemble, draw_anchors, keyed_hash, pack_epoch, possible_anchors
from ddtree.training.pipeline import target_shape
from ddtree.training.replay import prompt_lookup, replay, walk_rounds
from ddtree.training.smoke import LAYER_IDS
from ddtree.training.synthetic import END
from ddtree.training.target import load_target
from ddtree.training.tokens import TokenSet
from ddtree.tree import build_tree
from ddtree.walk import walk

from .conftest import World

Trained = tuple[Path, dict[str, object]]


def small_drafter(window: int = 0, causal: bool = False, block: int = 5) -> Drafter:
    torch.manual_seed(3)
    c = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
        vocab_size=50, block_size=block, mask_token_id=3, target_layer_ids=(0, 1), target_hidden_size=32,
        windows=(window, 0), causal=(causal, False), rope={"rope_theta": 10000.0},
    )  # fmt: skip
    return Drafter(c).double().eval()


@pytest.mark.parametrize(("window", "causal"), [(0, False), (6, True)])
def test_packed_documents_draft_as_alone(window: int, causal: bool) -> None:
    drafter, block = small_drafter(window, causal), 5
    torch.manual_seed(0)
    embedding = torch.randn(50, 32, dtype=torch.double)
    lengths, shape = [17, 9, 12], Shape(width=40, rows=1, anchors=8, cap=3, rate=1.0)
    ids = [np.random.default_rng(i).integers(0, 50, n).astype(np.int32) for i, n in enumerate(lengths)]
    features = [torch.randn(n, 64, dtype=torch.double) for n in lengths]
    anchors = [np.array([4, 9, 15]), np.array([2, 7]), np.array([10])]
    batch = assemble([np.arange(3)], [anchors], [ids], shape, block)
    packed = drafter(torch.cat(features)[batch.source], batch.anchor_tokens, batch.anchors, embedding, batch.positions,
                     batch.starts)  # fmt: skip
    at = 0
    for own, tokens, states in zip(anchors, ids, features, strict=True):
        for a in own.tolist():
            # one block alone: nothing at or above the anchor exists
            alone = drafter(states[None, :a], torch.tensor([[int(tokens[a])]]), torch.tensor([[a]]), embedding)[0, 0]
            torch.testing.assert_close(packed[0, at], alone, rtol=1e-5, atol=2e-6)
            ahead = tokens[a + 1 : a + block]
            assert batch.targets[0, at, : len(ahead)].tolist() == ahead.tolist()
            assert batch.valid[0, at].sum() == len(ahead)
            at += 1
    assert not batch.valid[0, at:].any()


def test_anchors_depend_on_document_seed_and_epoch_alone() -> None:
    prompts, totals = np.full(40, 5), np.arange(40) + 20
    shape = Shape(width=64, rows=1, anchors=64, cap=8)
    together = draw_anchors(np.arange(40), prompts, totals, shape, 1, 0)
    alone = [draw_anchors(np.array([d]), prompts, totals, shape, 1, 0)[0] for d in range(40)]
    assert all((a == b).all() for a, b in zip(together, alone, strict=True))
    for own, total in zip(together, totals.tolist(), strict=True):
        possible = possible_anchors(5, total, 64)
        assert len(set(own.tolist())) == len(own) == min(8, -(-possible // 2))
        assert own.min() >= 5 and own.max() <= total - 2
    other = draw_anchors(np.arange(40), prompts, totals, shape, 1, 1)
    assert any((a != b).any() for a, b in zip(together, other, strict=True))
    # every position is drawn about equally often over epochs
    counts = np.bincount(
        np.concatenate([draw_anchors(np.array([0]), prompts, totals, shape, 0, e)[0] for e in range(600)])
    )
    assert counts[5:19].min() > 0.7 * counts[5:19].mean()


def test_packing_keeps_every_document_and_both_limits() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 30, 3000)
    totals = prompts + rng.integers(0, 120, 3000)
    shape = Shape(width=256, rows=1, anchors=96, cap=32)
    rows = pack_epoch(prompts, totals, shape, 0, 0)
    usable = [d for d in range(3000) if possible_anchors(int(prompts[d]), int(totals[d]), 256)]
    assert sorted(np.concatenate(rows).tolist()) == usable
    filled = [int(np.minimum(totals[r], 256).sum()) for r in rows]
    blocks = [sum(shape.anchors_of(possible_anchors(int(prompts[d]), int(totals[d]), 256)) for d in r) for r in rows]
    assert max(filled) <= 256 and max(blocks) <= 96
    full = max(sum(filled) / (256 * len(rows)), sum(blocks) / (96 * len(rows)))
    assert full > 0.9, "rows should be nearly full of tokens or of anchors"
    assert [r.tolist() for r in rows] != [r.tolist() for r in pack_epoch(prompts, totals, shape, 0, 1)]


def test_plan_does_not_depend_on_how_it_is_read() -> None:
    prompts, totals = np.full(200, 4), np.full(200, 24)
    a, b = (Plan(prompts, totals, Shape(width=64, rows=1, anchors=16), 4, seed=5) for _ in range(2))
    late = a.rows(150, 2)  # jumps over epochs
    for step in range(151):
        last = b.rows(step, 2)
    assert late[0] == last[0] and [x.tolist() for x in late[1]] == [x.tolist() for x in last[1]]


def test_keyed_hash_is_spread() -> None:
    h = keyed_hash(0, 1, np.arange(100_000)).astype(np.float64) / 2**64
    assert abs(h.mean() - 0.5) < 0.01 and len(np.unique(h)) == 100_000


def test_weights_by_hand() -> None:
    logq = torch.log(torch.tensor([[0.5, 0.25, 0.8]]))
    valid = torch.tensor([[True, True, False]])
    decay = slot_weights(LossConfig("ce_decay", decay=2.0), 4, logq, valid, None)
    torch.testing.assert_close(decay, torch.tensor([[1.0, float(np.exp(-0.5)), 0.0]]))
    # smoothed: s = .75, .625; prefixes .75, .46875; the third slot is not valid
    dpace = slot_weights(LossConfig("dpace", alpha=0.5), 4, logq, valid, None)
    torch.testing.assert_close(dpace, torch.tensor([[0.75 + 0.46875, 0.46875, 0.0]]))
    theta = torch.log(torch.tensor([0.2]))
    s = torch.sigmoid(torch.log(torch.tensor([0.5, 0.125])) - theta)
    slope = s * (1 - s)
    tree = slot_weights(LossConfig("tree", cold=0.0), 4, logq, valid, theta)
    torch.testing.assert_close(tree[0, :2], torch.stack([slope.sum(), slope[1]]))


def test_dpace_is_the_gradient_of_the_smoothed_chain_length() -> None:
    q = torch.tensor([[0.6, 0.3, 0.9]], requires_grad=True)
    length = (0.5 * q + 0.5).cumprod(-1).sum()
    length.backward()
    w = slot_weights(LossConfig("dpace"), 4, q.detach().log(), torch.ones(1, 3, dtype=torch.bool), None)
    # d length / d log s_k = w_k
    torch.testing.assert_close(q.grad * (0.5 * q.detach() + 0.5) / 0.5, w)  # type: ignore[operator]


@pytest.mark.parametrize("budget", [8, 24, 64])
def test_threshold_counts_what_a_tree_accepts(budget: int) -> None:
    torch.manual_seed(budget)
    logp = (torch.randn(200, 6, 40) * 2.5).log_softmax(-1)
    tree = build_tree(logp, torch.zeros(200, dtype=torch.long), budget)
    theta = tree_threshold(logp.topk(min(budget, 40), -1).values, budget)
    y = torch.multinomial(logp.exp().flatten(0, 1), 1).view(200, 6)
    score = logp.gather(-1, y[..., None])[..., 0].cumsum(-1)
    truth = torch.cat([y, y[:, :1]], 1)
    accepted = walk(tree, truth.gather(1, tree.depth.long())).count
    assert ((score >= theta[:, None] - 1e-6).long().cumprod(-1).sum(-1) == accepted).all()
    assert accepted.float().mean() > 0.3


@pytest.mark.parametrize("kind", ["ce_decay", "dpace", "tree"])
def test_chunked_gradient_is_autograd_of_the_loss(kind: str) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 9, 4, 16, dtype=torch.double, requires_grad=True)
    head, y = torch.randn(60, 16, dtype=torch.double), torch.randint(0, 60, (2, 9, 4))
    valid = torch.arange(4) < torch.randint(0, 5, (2, 9, 1))
    config = LossConfig(kind, budget=16, top=16, chunk=8)
    sums, grad = head_loss(hidden, head, y, valid, config)
    logp = F.linear(hidden, head).log_softmax(-1)
    of_y = logp.gather(-1, y[..., None])[..., 0]
    theta = tree_threshold(logp.detach().flatten(0, 1).topk(16, -1).values.float(), 16) if kind == "tree" else None
    w = slot_weights(config, 5, of_y.flatten(0, 1), valid.flatten(0, 1), theta).view_as(of_y)
    loss = -(w * of_y).sum()
    loss.backward()
    torch.testing.assert_close(grad, hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.loss.double(), loss.detach(), rtol=1e-5, atol=1e-5)
    whole, same = head_loss(hidden, head, y, valid, LossConfig(kind, budget=16, top=16, chunk=10_000))
    torch.testing.assert_close(same, grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.weight, sums.weight)


@pytest.mark.parametrize("kind", ["ce_decay", "dpace"])
def test_denominators_are_global(kind: str) -> None:
    torch.manual_seed(2)
    hidden, head = torch.randn(8, 3, 16), torch.randn(30, 16)
    y, valid = torch.randint(0, 30, (8, 3)), torch.arange(3) < torch.randint(0, 4, (8, 1))
    config = LossConfig(kind)
    whole, grad = head_loss(hidden, head, y, valid, config)
    parts = [head_loss(hidden[i : i + 2], head, y[i : i + 2], valid[i : i + 2], config) for i in range(0, 8, 2)]
    total: LossSums = parts[0][0] + parts[1][0] + parts[2][0] + parts[3][0]
    torch.testing.assert_close(torch.cat([g for _, g in parts]) / total.weight, grad / whole.weight)
    torch.testing.assert_close(total.loss / total.weight, whole.loss / whole.weight)


def test_rounds_of_a_walk() -> None:
    r = walk_rounds([np.array([2, 0, 0, 1, 0]), np.array([0, 0])], drafts=3)
    # first: accept 2 (+bonus) -> position 3: accept 1 -> end; second: two rounds of nothing
    assert r.tokens.tolist() == [5, 2] and r.rounds.tolist() == [2, 2]
    assert r.tau() == 7 / 4 and r.macro() == (2.5 + 1) / 2
    assert r.acceptance.accepted == (2, 1, 1, 0)
    low, high = r.interval()
    assert low <= r.tau() <= high


def test_prompt_lookup_copies() -> None:
    ids = np.array([7, 8, 9, 1, 2, 7, 8, 9, 1, 2, 5], np.int32)
    got = prompt_lookup(ids, 5, drafts=4)
    # at position 6 the pair (7, 8) was seen before: 9 1 2 follow, then 7 where the record has 5
    assert got.tolist() == [0, 3, 2, 1, 0]
    run = np.array([3, 4, 4, 4, 4, 4, 4, 4], np.int32)
    assert prompt_lookup(run, 2, drafts=4).tolist() == [0, 4, 3, 2, 1], "a copy may run on into itself"


def test_replay_is_the_engines_own(world: World, trained: Trained) -> None:
    data = TokenSet(world.held)
    target = load_target(world.target, LAYER_IDS, torch.float32, "cpu")
    drafter = load_drafter(trained[0] / "best", target_shape(target), "cpu", torch.float32)
    source = InProcess(target, data)
    mine = replay(drafter, target.embedding, target.head, data, source, budgets=(8, 16), blocks=100)
    documents = [
        Document(torch.from_numpy(data.ids(r).astype(np.int64)), int(data.index["prompt"][r]),
                 source.features([r], [len(data.ids(r))]))
        for r in mine.rows.tolist()
    ]  # fmt: skip
    other = reference_replay(drafter, target.embedding, target.head, documents, [CHAIN, 8, 16])
    for rule, budget in (("chain", CHAIN), ("tree-8", 8), ("tree-16", 16)):
        assert mine.rules[rule].acceptance == other[budget]


@pytest.mark.parametrize("budget", [CHAIN, 16])
def test_replay_tau_is_live_tau(world: World, trained: Trained, budget: int) -> None:
    data = TokenSet(world.greedy)
    target = load_target(world.target, LAYER_IDS, torch.float32, "cpu")
    drafter = load_drafter(trained[0] / "best", target_shape(target), "cpu", torch.float32)
    served = load_drafter(trained[0] / "best", target_shape(target), "cpu", torch.float32)
    engine = Engine(from_transformers(load_target(world.target, LAYER_IDS, torch.float32, "cpu").model), served)
    prompts = [data.ids(r)[: int(data.index["prompt"][r])].tolist() for r in range(5)]
    live, again = live_and_replay(engine, drafter, target, prompts, budget, 40, [END])
    assert live.rounds > 20 and live.tau > 1.3
    assert (again.tau, again.rounds) == (live.tau, live.rounds)  # the last round may match past the cut
