"""Exactness: chain, tree and auto give plain decoding's tokens; sampling gives plain sampling's distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_toys import hf_target

from ddtree.drafter import Drafter, DrafterConfig
from ddtree.errors import BudgetError, EngineError, RequestError
from ddtree.standalone.engine import Engine, Request
from ddtree.standalone.rounds import Sampling
from ddtree.standalone.weights import from_transformers

DRAFTER = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    vocab_size=97,
    block_size=8,
    mask_token_id=96,
    target_layer_ids=(0, 2),
    target_hidden_size=32,
    windows=(0,),
    causal=(False,),
)


class Prophet(Drafter):
    """A drafter that knows the response and is wrong at random: acceptance of every length, trees that must branch.

    Real weights cannot be trained in a test; this one still runs the drafter's forward and its cache, and then replaces
    its logits by noise around the recorded response.
    """

    text: torch.Tensor
    strength: float
    noise: torch.Generator

    def draft(self, root_tokens, cache, lengths, embedding, attend):  # type: ignore[no-untyped-def]
        self.at = lengths.clone()
        return super().draft(root_tokens, cache, lengths, embedding, attend)

    def logits(self, hidden, head):  # type: ignore[no-untyped-def]
        out = torch.randn(*hidden.shape[:2], head.shape[0], generator=self.noise)
        for r in range(len(hidden)):
            ahead = self.text[r, self.at[r] + 1 : self.at[r] + 1 + out.shape[1]]
            out[r, torch.arange(len(ahead)), ahead] += self.strength
        return out * abs(self.strength)  # which makes the log-probabilities those of the response given the noise


def build(kind: str, drafter: str = "random", seed: int = 0) -> Engine:
    torch.manual_seed(seed + 1)
    model = (Drafter if drafter == "random" else Prophet)(DRAFTER)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)
    return Engine(from_transformers(hf_target(kind, seed)), model.eval().requires_grad_(False))


def requests_of(lengths: tuple[int, ...], new: int) -> list[Request]:
    gen = torch.Generator().manual_seed(9)
    return [Request(tuple(torch.randint(0, 96, (n,), generator=gen).tolist()), new) for n in lengths]


def inform(engine: Engine, requests: list[Request], plain: list[list[int]], strength: float) -> None:
    """Make the prophet know these responses."""
    drafter = engine.drafter
    assert isinstance(drafter, Prophet)
    rows = [torch.tensor([*r.prompt, *p]) for r, p in zip(requests, plain, strict=True)]
    drafter.text = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    drafter.strength, drafter.noise = strength, torch.Generator().manual_seed(2)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding", "qwen3_5", "qwen3_next"])
def test_all_modes_give_plain_decodings_tokens(kind: str) -> None:
    engine = build(kind, "prophet")
    # One token, exactly 1 + K, longer than the sliding window, and longer than a GDN prompt chunk.
    requests = requests_of((1, 8, 33, 70), 200)
    plain = [r.tokens for r in engine.generate(requests, "ar")]
    assert sum(len(set(t)) for t in plain) > 80  # a response that loops would show little
    # Helpful, adversarial, always right.
    for strength, budgets, new in ((2.5, (1, 8, 64), 200), (-3.0, (8,), 50), (60.0, (8,), 200)):
        inform(engine, requests, plain, strength)
        taus = []
        for mode, budget in [("chain", 0), *(("tree", b) for b in budgets)]:
            found = engine.generate([replace(r, max_new_tokens=new) for r in requests], mode, budget)
            assert [r.tokens for r in found] == [t[:new] for t in plain], (mode, budget, strength)
            total = sum((r.acceptance(7) for r in found[1:]), found[0].acceptance(7))
            taus.append(total.tau)
        if strength == 2.5:
            assert 1.0 < taus[1] <= 2.0 < taus[0] + 0.5 < taus[-1]
        elif strength == 60.0:
            assert min(taus) > 7.5
        else:
            assert max(taus) < 1.05
    inform(engine, requests[:1], plain[:1], 2.5)
    assert engine.generate(requests[:1], "auto")[0].tokens == plain[0]


def test_a_drafter_with_random_weights_changes_nothing() -> None:
    engine = build("qwen3_5")
    requests = requests_of((3, 20), 30)
    plain = [r.tokens for r in engine.generate(requests, "ar")]
    for mode in ("chain", "tree", "auto"):
        assert [r.tokens for r in engine.generate(requests, mode, 16)] == plain


def test_plain_decoding_equals_transformers_generate() -> None:
    hf = hf_target("qwen3_5", 4)
    (request,) = requests_of((12,), 50)
    ids = torch.tensor([request.prompt])
    expected = hf.generate(ids, max_new_tokens=50, do_sample=False)[0, 12:].tolist()
    assert build("qwen3_5", seed=4).generate([request], "ar")[0].tokens == expected


@pytest.mark.parametrize("mode", ["ar", "tree"])
def test_responses_end_where_they_should(mode: str) -> None:
    engine = build("qwen3", "prophet")
    (request,) = requests_of((9,), 40)
    whole = engine.generate([request], "ar")[0].tokens
    inform(engine, [request], [whole], 60.0)  # everything is accepted, so every end lies inside a path

    def run(r: Request) -> tuple[list[int], str]:
        pieces: list[int] = []
        found = engine.generate([r], mode, 8, on_tokens=lambda _, t: pieces.extend(t))[0]
        assert pieces == found.tokens
        return found.tokens, found.finish

    first = whole.index(whole[18])
    assert run(replace(request, stop_tokens=frozenset({whole[18]}))) == (whole[: first + 1], "eos")
    assert run(replace(request, max_new_tokens=17)) == (whole[:17], "length")
    assert run(replace(request, max_new_tokens=1)) == (whole[:1], "length")
    engine.context = 30
    assert run(request) == (whole[:21], "context")
    engine.context = 4096
    engine.decode = lambda ids: "".join(chr(0x100 + i) for i in ids)
    pair = engine.decode(whole[10:12])
    end = engine.decode(whole).index(pair) + 2
    assert run(replace(request, stop_strings=("zzz", pair))) == (whole[:end], "stop")


def test_requests_of_a_batch_end_apart() -> None:
    engine = build("qwen3_5", "prophet")
    requests = [replace(r, max_new_tokens=n) for r, n in zip(requests_of((4, 9, 2), 0), (3, 50, 21), strict=True)]
    plain = [engine.generate([r], "ar")[0].tokens for r in requests]
    inform(engine, requests, plain, 3.0)
    assert [r.tokens for r in engine.generate(requests, "tree", 8)] == plain


def test_sampling_has_plain_samplings_distribution() -> None:
    """First three tokens jointly, 2^14 draws a side, 13 tokens cut to 8 by top-k."""
    vocab, seeds, batch = 13, 2**14, 2**12
    config = replace(
        DRAFTER, hidden_size=16, target_hidden_size=16, num_heads=2, head_dim=8, vocab_size=vocab, mask_token_id=12,
        target_layer_ids=(0,), block_size=4,
    )  # fmt: skip
    torch.manual_seed(1)
    drafter = Drafter(config).eval().requires_grad_(False)
    engine = Engine(from_transformers(hf_target("tiny", vocab=vocab)), drafter)
    sampling = Sampling(temperature=1.3, top_k=8, top_p=0.95)

    def draw(mode: str, seed: int) -> torch.Tensor:
        gen, rows = torch.Generator().manual_seed(seed), []
        for _ in range(seeds // batch):
            found = engine.generate([Request((3, 1, 4), 3)] * batch, mode, 8, sampling, gen)
            rows += [r.tokens for r in found]
            accepted[mode] = accepted.get(mode, 0) + sum(sum(r.counts) for r in found)
        return torch.tensor(rows) @ torch.tensor([vocab**2, vocab, 1])

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        counts = [torch.bincount(x, minlength=vocab**3).double() / len(x) for x in (a, b)]
        return float((counts[0] - counts[1]).abs().sum() / 2)

    accepted: dict[str, int] = {}
    plain = draw("ar", 1)
    for mode in ("chain", "tree"):
        other = draw(mode, 2)
        assert accepted[mode] > seeds / 20  # else drafts had no part in it
        # What two samples of one distribution differ by, and that 0.05 of the mass gone elsewhere would be seen.
        pool, nulls = torch.cat([plain, other]), []
        for i in range(20):
            mixed = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(i))]
            nulls.append(distance(mixed[:seeds], mixed[seeds:]))
        limit = max(nulls) + 0.005
        assert distance(plain, other) <= limit
        moved = torch.rand(seeds, generator=torch.Generator().manual_seed(5)) < 0.05
        assert distance(plain, torch.where(moved, int(plain[0]), other)) > limit


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("empty-prompt", {"prompt": ()}),
        ("prompt-too-long", {"prompt": (1,) * 4096}),
        ("token-outside-vocabulary", {"prompt": (97,)}),
        ("token-outside-vocabulary", {"prompt": (-1, 3)}),
        ("bad-length", {"max_new_tokens": 0}),
        ("no-decode", {"stop_strings": ("x",)}),
        ("unknown-mode", {"mode": "fast"}),
        ("budget-too-small", {"budget": 0}),
        ("budget-too-large", {"budget": 5000}),
        ("bad-sampling", {"sampling": Sampling(top_p=0.0)}),
    ],
)
def test_bad_requests_are_refused_by_name(code: str, change: dict[str, object]) -> None:
    engine = build("qwen3")
    fields = {k: v for k, v in change.items() if k in ("prompt", "max_new_tokens", "stop_strings")}
    others = {k: v for k, v in change.items() if k not in fields}
    with pytest.raises(EngineError) as caught:
        engine.generate([replace(Request((1, 2)), **fields)], **others)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert isinstance(caught.value, (RequestError, BudgetError))
    engine.drafter = None
    with pytest.raises(RequestError, match="no-drafter"):
        engine.generate([Request((1, 2))], "tree")
