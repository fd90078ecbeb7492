"""Which tree belongs to which request, through reordering, missed steps, finished requests and a full store."""

from __future__ import annotations

import torch

from ddtree.native.state import TreeState, chained
from ddtree.tree import ancestor_words, build_tree, chain_tree


def state(budget: int = 4, reqs: int = 3) -> TreeState:
    return TreeState(budget, reqs, 64, torch.device("cpu"))


def test_a_tree_follows_its_request_through_reordering_and_a_missed_step():
    trees = state()
    slots, chains = trees.claim(["a", "b", "c"], [False, True, False])
    of = dict(zip("abc", slots.tolist(), strict=True))
    assert chains.tolist() == [0, 1, 0] and len(set(of.values())) == 3
    trees.begin(["c", "a"], [4, 4], [5, 5])  # b sits this step out
    assert trees.slots[:2].tolist() == [of["c"], of["a"]]
    again, _ = trees.claim(["c", "a"], [False, False])
    assert of["b"] not in again.tolist()
    trees.begin(["b", "c", "a"], [4, 4, 2], [5, 5, 3])
    assert trees.slots[:3].tolist() == [of["b"], *again.tolist()]
    assert trees.drafts[:3].tolist() == [4, 4, 2]


def test_a_tree_is_used_once_and_no_drafts_means_no_tree():
    trees = state()
    trees.claim(["a", "b"], [False, False])
    trees.begin(["a", "b"], [4, 0], [5, 1])
    assert trees.slots[1] == -1
    trees.begin(["a", "b"], [4, 4], [5, 5])  # drafts that nobody stored: zeros near the length limit
    assert trees.slots[:2].tolist() == [-1, -1]


def test_slots_come_back_and_a_full_store_never_fails():
    trees = state(reqs=2)
    for n in range(50):
        slots, _ = trees.claim([f"r{n}", f"s{n}"], [False, False])
        assert len(set(slots.tolist())) == 2 and trees.spare not in slots.tolist()
        trees.forget([f"r{n}", f"s{n}"])
    trees.claim(["a", "b"], [False, False])
    trees.claim(["c", "d"], [False, False])
    slots, _ = trees.claim(["e", "f"], [False, False])
    assert slots.tolist() == [trees.spare, trees.spare]
    trees.begin(["e", "a"], [4, 4], [5, 5])
    assert trees.slots[0] == -1 and trees.slots[1] >= 0


def test_the_kind_of_a_step():
    trees = state()
    trees.begin(["a"], [0], [40])
    assert not trees.tree_step and trees.mixed
    trees.claim(["a"], [False])
    trees.begin(["a", "b"], [4, 0], [5, 30])
    assert trees.tree_step and trees.mixed
    trees.begin(["a", "b"], [0, 0], [1, 5])
    assert trees.tree_step and not trees.mixed
    trees.dummy(tree_step=True)
    assert trees.tree_step and int(trees.step.tree_len.sum()) == 0


def test_chained_rows_are_chains_and_others_stay():
    logprobs = torch.randn(2, 5, 30).log_softmax(-1)
    tree = build_tree(logprobs, torch.tensor([3, 4]), 70)
    best = logprobs.argmax(-1)
    mixed = chained(tree, best, torch.tensor([True, False]))
    want = chain_tree(torch.nn.functional.pad(best, (0, 65)), torch.tensor([3, 4]))
    for name in ("tokens", "parents", "depth", "words"):
        assert torch.equal(getattr(mixed, name)[0], getattr(want, name)[0].to(getattr(mixed, name).dtype)), name
        assert torch.equal(getattr(mixed, name)[1], getattr(tree, name)[1]), name
    assert torch.equal(ancestor_words(mixed.parents, 70), mixed.words)
