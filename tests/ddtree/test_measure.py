"""Acceptance arithmetic, and replay against rounds walked one by one."""

from __future__ import annotations

import pytest
import torch
from engine_toys import ZLAB, H, V, drafter_of

from ddtree.measure import CHAIN, Acceptance, Document, acceptance, divergences, logit_noise, replay
from ddtree.tree import build_tree


def test_acceptance() -> None:
    found = acceptance([0, 2, 2, 1], tokens=8, drafts=3)
    assert found.rounds == 4 and found.tau == 2.0
    assert found.reached == [0.75, 0.5, 0.0]
    assert found.conditional == [0.75, pytest.approx(2 / 3), 0.0]
    assert found + Acceptance((1,), 1) == Acceptance((2, 1, 2, 0), 9)


def test_replay_equals_rounds_walked_by_hand() -> None:
    drafter, gen = drafter_of(ZLAB), torch.Generator().manual_seed(0)
    embedding, head = torch.randn(V, H, generator=gen), torch.randn(V, H, generator=gen) * 0.3
    documents, expected = [], dict.fromkeys((CHAIN, 4, 32), (0, 0))
    for length, prompt in [(30, 4), (12, 1), (9, 8)]:
        ids, features = torch.randint(0, V, (length,), generator=gen), torch.randn(length, 3 * H, generator=gen)
        for at in range(prompt, length - 1):  # let most drafts be right, so that rounds have many lengths
            hidden = drafter(features[None], ids[None, at : at + 1], torch.tensor([[at]]), embedding)
            if torch.rand(1, generator=gen) < 0.7:
                ids[at + 1] = int((hidden[0, 0, 1] @ head.T).argmax())
        documents.append(Document(ids, prompt, features))
        for budget in expected:
            at = prompt
            while at < length - 1:
                hidden = drafter(features[None], ids[None, at : at + 1], torch.tensor([[at]]), embedding)[0]
                logprobs = torch.log_softmax(hidden[:, 1:] @ head.T, -1)
                if budget == CHAIN:
                    paths = [[int(x) for x in logprobs[0, :d].argmax(-1)] for d in range(1, 6)]
                else:
                    tree = build_tree(logprobs, ids[at : at + 1], budget)
                    paths = [path_tokens(tree.tokens[0], tree.parents[0], i) for i in range(1, budget + 1)]
                true = ids[at + 1 :].tolist()
                best = max((len(p) for p in paths if p == true[: len(p)]), default=0)
                tokens, rounds = expected[budget]
                expected[budget] = (tokens + min(best + 1, length - 1 - at), rounds + 1)
                at += best + 1
    found = replay(drafter, embedding, head, documents, list(expected), anchors_at_once=7)
    assert {b: (a.tokens, a.rounds) for b, a in found.items()} == expected
    assert found[32].tau >= found[4].tau > 1.2


def path_tokens(tokens: torch.Tensor, parents: torch.Tensor, node: int) -> list[int]:
    path = []
    while node > 0:
        path.append(int(tokens[node]))
        node = int(parents[node])
    return path[::-1]


def test_divergences_and_noise() -> None:
    found = divergences([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]], [[0.5, 0.01, 0.5], [1, 1]])
    assert [(d.prompt, d.position) for d in found] == [(0, 1)]
    assert found[0].is_near_tie(0.02) and not found[0].is_near_tie(0.001)
    assert [d.position for d in divergences([[1, 2]], [[1]], [[1, 1]])] == [1]
    table = torch.randn(9, 4)
    assert logit_noise(lambda t, width: table[t] + 0.25 * (width > 1), torch.arange(9), 4) == pytest.approx(0.25)
