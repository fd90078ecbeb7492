"""The engine's forward against transformers' own, and every node of a tree against its path."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_toys import KINDS, hf_target

from ddtree.standalone.ops import PLAIN
from ddtree.standalone.rounds import Parts, commit, new_state, prefill, verify
from ddtree.standalone.weights import from_transformers
from ddtree.tree import build_tree, dense_mask
from ddtree.walk import walk


def parts_of(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Parts, object]:
    hf = hf_target(kind).to(dtype)
    return Parts(from_transformers(copy.deepcopy(hf)), None, PLAIN), hf


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logits_equal_transformers(kind: str) -> None:
    parts, hf = parts_of(kind)
    for length in (1, 17, 150):
        check_prompt(parts, hf, length)


def check_prompt(parts: Parts, hf: object, length: int) -> None:
    prompt = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length))
    state = new_state(parts, 2, length + 3)
    logits = prefill(parts, state, 1, prompt)
    expected = hf(prompt[None]).logits[0, -1]  # type: ignore[operator]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert state.lengths.tolist() == [0, length]


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_equals_its_path_over_many_rounds(kind: str) -> None:
    """Ten rounds of verify and commit with branching trees; the recurrent states must not drift either."""
    parts, hf = parts_of(kind)
    gen = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 97, (n,), generator=gen).tolist() for n in (30, 5)]
    state = new_state(parts, 2, 300)
    for r, text in enumerate(texts):
        prefill(parts, state, r, torch.tensor(text))
    state.roots.copy_(torch.tensor([5, 6]))
    accepted = 0
    for round_ in range(10):
        logprobs = torch.log_softmax(torch.randn(2, 6, 97, generator=gen) * 2, -1)
        tree = build_tree(logprobs, state.roots, 24)
        logits, tapped = verify(parts, state, tree)
        if round_ in (0, 9):
            for r in range(2):
                for node in range(0, tree.size, 6):
                    path = dense_mask(tree.words)[r, node].nonzero()[:, 0]
                    ids = torch.tensor([texts[r] + tree.tokens[r, path].tolist()])
                    expected = hf(ids).logits[0, -1]  # type: ignore[operator]
                    torch.testing.assert_close(logits[r, node], expected, rtol=2e-3, atol=2e-3)
                    assert logits[r, node].argmax() == expected.argmax()
        # Accept a path that ends at some deep node.
        chosen = torch.zeros(2, tree.size, dtype=torch.long)
        for r in range(2):
            deep = int(tree.depth[r].argmax())
            path = dense_mask(tree.words)[r, deep].nonzero()[:, 0]
            chosen[r, path[:-1]] = tree.tokens[r, path[1:]]
            chosen[r, deep] = 50 + round_
        path_ = walk(tree, chosen)
        for r in range(2):
            texts[r] += [int(tree.tokens[r, 0]), *path_.tokens[r, : int(path_.count[r])].tolist()]
        accepted += int(path_.count.sum())
        commit(parts, state, path_, tapped)
        assert state.lengths.tolist() == [len(t) for t in texts]
        assert state.roots.tolist() == path_.bonus.tolist()
    assert accepted > 30


def test_inactive_requests_stay() -> None:
    parts, _ = parts_of("qwen3_5")
    state = new_state(parts, 2, 100)
    for r in range(2):
        prefill(parts, state, r, torch.arange(9))
    state.active[1] = False
    before = copy.deepcopy(state)
    tree = build_tree(torch.log_softmax(torch.randn(2, 4, 97), -1), state.roots, 8)
    logits, tapped = verify(parts, state, tree)
    commit(parts, state, walk(tree, logits.argmax(-1)), tapped)
    assert state.lengths[0] > 9 and state.lengths[1] == 9 and state.roots[1] == before.roots[1]
    for new, old in zip(state.layers, before.layers, strict=True):
        if new.delta is not None and old.delta is not None:
            assert torch.equal(new.delta[1], old.delta[1]) and not torch.equal(new.delta[0], old.delta[0])
