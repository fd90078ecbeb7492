"""The engine's forward against transformers' own, and every node of a tree against its path."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_toys import KINDS, hf_target

from ddtree.standalone.ops import PLAIN
from ddtree.standalone.rounds import Parts, State, commit, new_state, prefill, verify
from ddtree.standalone.weights import from_transformers
from ddtree.tree import build_tree, chain_tree, dense_mask
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
        logits, _ = verify(parts, state, tree)
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
        commit(parts, state, path_)
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
    logits, _ = verify(parts, state, tree)
    commit(parts, state, walk(tree, logits.argmax(-1)))
    assert state.lengths[0] > 9 and state.lengths[1] == 9 and state.roots[1] == before.roots[1]
    for new, old in zip(state.layers, before.layers, strict=True):
        if new.delta is not None and old.delta is not None:
            assert torch.equal(new.delta[1], old.delta[1]) and not torch.equal(new.delta[0], old.delta[0])


def test_ten_rounds_drift_no_more_than_plain_decoding() -> None:
    """GDN states in float32 against float64, after the same tokens by trees and one by one."""
    gen = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, 97, (20,), generator=gen)
    exact = parts_of("qwen3_5", torch.float64)[0]
    parts = parts_of("qwen3_5")[0]
    states = [new_state(p, 1, 200) for p in (exact, parts, parts)]
    for p, state in zip((exact, parts, parts), states, strict=True):
        prefill(p, state, 0, prompt)
        state.roots.fill_(5)
    for round_ in range(10):
        tree = build_tree(torch.log_softmax(torch.randn(1, 7, 97, generator=gen) * 2, -1), states[0].roots, 32)
        deep = int(tree.depth[0].argmax())
        path = dense_mask(tree.words)[0, deep].nonzero()[:, 0]
        chosen = torch.zeros(1, tree.size, dtype=torch.long)
        chosen[0, path[:-1]], chosen[0, deep] = tree.tokens[0, path[1:]], 40 + round_
        for p, state in ((exact, states[0]), (parts, states[1])):
            verify(p, state, tree)
            commit(p, state, walk(tree, chosen))
        for token in tree.tokens[0, path]:
            states[2].roots.copy_(token[None])
            root = chain_tree(torch.zeros(1, 0, dtype=torch.long), states[2].roots)
            verify(parts, states[2], root)
            commit(parts, states[2], walk(root, token.view(1, 1)))
    assert states[1].lengths.tolist() == states[2].lengths.tolist() == states[0].lengths.tolist()

    def drift(state: State) -> float:
        pairs = [(a.delta, b.delta) for a, b in zip(state.layers, states[0].layers, strict=True)]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs if a is not None and b is not None)

    assert drift(states[1]) < 1.5 * drift(states[2]) + 1e-7 and drift(states[2]) < 1e-5
