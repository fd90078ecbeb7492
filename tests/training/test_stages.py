"""Generation, pre-flight, plan, command line: each stage as its user meets it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.training import plan, validate
from ddtree.training.__main__ import main
from ddtree.training.decode import Sampler, SlotGenerator
from ddtree.training.errors import DataError, PreflightError, PromptError
from ddtree.training.generate import OpenAIBackend, TransformersBackend, generate
from ddtree.training.pipeline import TrainJob, load_tokenizer, run_train, stop_ids
from ddtree.training.prompts import Prompt
from ddtree.training.smoke import LAYER_IDS, smoke_config
from ddtree.training.synthetic import END, MASK, VOCAB, make_tokenizer, sample_language, words
from ddtree.training.target import Target, default_layer_ids, load_target, target_identity
from ddtree.training.tokens import TokenSet, failed_path

from .conftest import World


@pytest.fixture(scope="module")
def target(world: World) -> Target:
    return load_target(world.target, LAYER_IDS, torch.float32, "cpu")


def some_prompts(count: int = 9) -> list[Prompt]:
    names = words()
    return [
        Prompt(f"q{i}", [{"role": "user", "content": " ".join(names[t] for t in ids[: 3 + i % 5])}])
        for i, ids in enumerate(sample_language(count, 8, 99))
    ]


def identity_of(world: World) -> dict[str, Any]:
    return validate.data_identity(target_identity(world.target), load_tokenizer(world.target), {}, VOCAB)


# ------------------------------------------------------------------------------------------------------- generation
def test_slots_decode_as_transformers_does(target: Target) -> None:
    prompts = [
        ids[:n].tolist()
        for ids, n in zip(sample_language(11, 12, 5), [4, 5, 6, 7, 8, 9, 10, 11, 12, 3, 4], strict=True)
    ]
    expected = []
    for p in prompts:
        out = target.model.generate(torch.tensor([p]), max_new_tokens=25, do_sample=False, eos_token_id=END)  # type: ignore[operator]
        expected.append(out[0, len(p) :].tolist())
    got = dict(SlotGenerator(target, [END], slots=4, rows=48).generate(prompts, Sampler(max_new=25)))
    assert [got[i].ids for i in range(11)] == expected
    assert all(r.reason == ("stop" if r.ids[-1] == END else "length") for r in got.values())


def test_sampling_is_the_targets_distribution(target: Target) -> None:
    prompt = sample_language(1, 12, 8)[0].tolist()
    with torch.no_grad():
        p = (target.logits(torch.tensor([prompt]))[0, -1] / 0.8).softmax(-1)
    generator = SlotGenerator(target, [END], slots=100, rows=16)
    got = [r.ids[0] for _, r in generator.generate([prompt] * 2000, Sampler(temperature=0.8, max_new=1, seed=3))]
    seen = torch.bincount(torch.tensor(got), minlength=VOCAB) / len(got)
    assert float((seen - p).abs().sum() / 2) < 0.05


def test_generate_resumes_and_keeps_failures(world: World, target: Target, tmp_path: Path) -> None:
    tokenizer, prompts = load_tokenizer(world.target), some_prompts(9)
    prompts.append(Prompt("long", [{"role": "user", "content": "w1 " * 90}]))
    backend = TransformersBackend(target, [END], slots=4, rows=64)
    first = generate(prompts[:4], backend, tokenizer, Sampler(max_new=8), tmp_path, identity_of(world))
    assert first["kept"] == 4
    stamp = (tmp_path / "shard-00000.ids").stat().st_mtime_ns
    both = generate(prompts, backend, tokenizer, Sampler(max_new=8), tmp_path, identity_of(world))
    assert both["kept"] == 9 and both["failed"] == 1
    assert (tmp_path / "shard-00000.ids").stat().st_mtime_ns == stamp
    tokens = TokenSet(tmp_path)
    assert sorted(m["prompt"] for m in tokens.meta) == [f"q{i}" for i in range(9)]
    failed = json.loads(failed_path(tmp_path).read_text())
    assert failed["prompt"] == "long" and "prompt of" in failed["reason"]
    third = generate(prompts, backend, tokenizer, Sampler(max_new=8), tmp_path, identity_of(world))
    assert (third["kept"], third["failed"], third["response_tokens"]) == (9, 1, 0)
    with pytest.raises(DataError, match=r"tokens-other-target.*sampler"):
        generate(prompts, backend, tokenizer, Sampler(max_new=9), tmp_path, identity_of(world))


class _Endpoint(ThreadingHTTPServer):
    """An OpenAI-compatible server over the synthetic target; can fail on purpose."""

    daemon_threads = True

    def __init__(self, target: Target, tokenizer: Any, return_ids: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.tokenizer, self.return_ids = target, tokenizer, return_ids
        self.fail, self.lock, self.calls = 0, threading.Lock(), 0


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.calls += 1
            failing = server.fail != 0
            server.fail -= 1 if server.fail > 0 else 0
        if failing:
            self.send_error(503)
            return
        with server.lock:
            generator = SlotGenerator(server.target, body["stop_token_ids"], slots=1, rows=64)
            [(_, r)] = generator.generate([body["prompt"]], Sampler(max_new=body["max_tokens"]))
        choice = {"text": server.tokenizer.decode(r.ids), "finish_reason": r.reason}
        if server.return_ids:
            choice["token_ids"] = r.ids
        data = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture(params=[True, False], ids=["ids", "text"])
def endpoint(world: World, target: Target, request: pytest.FixtureRequest) -> Iterator[_Endpoint]:
    server = _Endpoint(target, load_tokenizer(world.target), request.param)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_an_openai_endpoint_gives_the_same_rows(
    world: World, target: Target, endpoint: _Endpoint, tmp_path: Path
) -> None:
    tokenizer, prompts = load_tokenizer(world.target), some_prompts(6)
    url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
    endpoint.fail = 2  # two requests fail once: they are tried again
    backend = OpenAIBackend(url, "toy", tokenizer, [END], workers=3)
    generate(prompts, backend, tokenizer, Sampler(max_new=8), tmp_path / "http", identity_of(world))
    local = TransformersBackend(target, [END], slots=4, rows=64)
    generate(prompts, local, tokenizer, Sampler(max_new=8), tmp_path / "local", identity_of(world))
    a, b = (TokenSet(tmp_path / name) for name in ("http", "local"))
    rows = [{m["prompt"]: s.ids(i).tolist() for i, m in enumerate(s.meta)} for s in (a, b)]
    assert rows[0] == rows[1] and endpoint.calls == 8


def test_a_dead_endpoint_is_an_error_and_keeps_what_came(world: World, target: Target, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(world.target)
    backend = OpenAIBackend("http://127.0.0.1:9/v1", "toy", tokenizer, [END], workers=2, attempts=1, give_up_after=3)
    with pytest.raises(DataError, match="endpoint-dead"):
        generate(some_prompts(8), backend, tokenizer, Sampler(max_new=4), tmp_path, identity_of(world))


# -------------------------------------------------------------------------------------------------------- pre-flight
def test_off_by_one_layers_are_caught(world: World) -> None:
    tokens = TokenSet(world.greedy)
    good = load_target(world.target, LAYER_IDS, torch.float32, "cpu")
    validate.check_capture(good, tokens)
    wrong = load_target(world.target, (1, 2, 3), torch.float32, "cpu")
    wrong.layer_ids = (0, 1, 2)  # what a reader does that forgets the + 1
    honest = wrong.capture

    def shifted(ids: torch.Tensor) -> torch.Tensor:
        wrong.layer_ids = (1, 2, 3)
        try:
            return honest(ids)
        finally:
            wrong.layer_ids = (0, 1, 2)

    wrong.capture = shifted  # type: ignore[method-assign]
    with pytest.raises(PreflightError, match=r"hidden-states-off-by-one.*hidden_states\[1\]"):
        validate.check_capture(wrong, tokens)


def test_a_random_head_is_caught(world: World) -> None:
    tokens = TokenSet(world.greedy)
    target = load_target(world.target, LAYER_IDS, torch.float32, "cpu")
    rows = validate.greedy_rows(tokens)
    assert rows and validate.check_head(target, tokens, rows) > 0.99
    target.head = torch.randn_like(target.head)
    with pytest.raises(PreflightError, match="lm-head-mismatch"):
        validate.check_head(target, tokens, rows)
    target.head = target.embedding  # tied where the checkpoint is not
    with pytest.raises(PreflightError, match="lm-head-mismatch"):
        validate.check_head(target, tokens, rows)


def test_mask_ids(world: World, target: Target) -> None:
    tokens, tokenizer = TokenSet(world.train), load_tokenizer(world.target)
    validate.check_mask_id(MASK, target.embedding, tokens, tokenizer, [END])
    used = int(tokens.flat[-3])
    for mask, code in ((VOCAB, "mask-id-range"), (END, "mask-id-live"), (0, "mask-id-live"), (used, "mask-id-in-data")):
        with pytest.raises(PreflightError, match=code):
            validate.check_mask_id(mask, target.embedding, tokens, tokenizer, [END])
    dead = target.embedding.clone()
    dead[MASK] = 0
    with pytest.raises(PreflightError, match="mask-row-dead"):
        validate.check_mask_id(MASK, dead, tokens, tokenizer, [END])
    found = validate.suggest_mask(target.embedding, tokens, tokenizer, [END])
    validate.check_mask_id(found, target.embedding, tokens, tokenizer, [END])


def test_another_target_tokenizer_template_or_mode(world: World, tmp_path: Path) -> None:
    tokens, tokenizer = TokenSet(world.train), load_tokenizer(world.target)
    mine = target_identity(world.target)
    validate.check_identity(tokens, mine, tokenizer, None)
    with pytest.raises(PreflightError, match="target-mismatch"):
        validate.check_identity(tokens, {**mine, "weights": "0"}, tokenizer, None)
    with pytest.raises(PreflightError, match="thinking-mismatch"):
        validate.check_identity(tokens, mine, tokenizer, {"enable_thinking": True})
    make_tokenizer(tmp_path, "{{ messages }}")
    with pytest.raises(PreflightError, match="template-mismatch"):
        validate.check_identity(tokens, mine, load_tokenizer(tmp_path), None)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"w5"', '"other"'))
    with pytest.raises(PreflightError, match="tokenizer-mismatch"):
        validate.check_identity(tokens, mine, load_tokenizer(tmp_path), None)


def test_rows_still_render_to_what_was_recorded(world: World, tmp_path: Path) -> None:
    from ddtree.training.prompts import load_prompts

    tokens = TokenSet(world.greedy)
    prompts = {p.id: p for p in load_prompts(world.work / "greedy-prompts")}
    validate.check_rows(tokens, prompts, load_tokenizer(world.target))
    make_tokenizer(tmp_path, "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}")
    with pytest.raises(PreflightError, match="template-round-trip"):
        validate.check_rows(tokens, prompts, load_tokenizer(tmp_path))


def test_bad_prompts_are_named() -> None:
    p = some_prompts(3)
    validate.check_prompts(p)
    for bad, code in (
        ([], "no-prompts"),
        ([*p, replace(p[0], id="again")], "duplicate-prompts"),
        ([*p, replace(p[0], id="e", messages=[{"role": "user", "content": " "}])], "empty-prompt"),
        ([*p, replace(p[1], messages=[{"role": "user", "content": "w"}])], "duplicate-prompts"),
    ):
        with pytest.raises(PromptError, match=code):
            validate.check_prompts(bad)


def test_evaluation_overlap_is_named(tmp_path: Path) -> None:
    text = " ".join(f"word{i}" for i in range(20))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    p = [Prompt("x", [{"role": "user", "content": f"Hello, {text}!"}])]
    with pytest.raises(PromptError, match="eval-overlap"):
        validate.check_prompts(p, [tmp_path / "eval.jsonl"])


def test_held_out_rows_are_not_trained_on(world: World, tmp_path: Path) -> None:
    job = TrainJob(world.target, [world.train], tmp_path / "run", smoke_config(4), [world.train], dtype="float32")
    with pytest.raises(DataError, match="held-out-overlap"):
        run_train(job)


def test_data_that_does_not_fit_the_target(world: World) -> None:
    tokens = TokenSet(world.train)
    with pytest.raises(PreflightError, match="token-id-range"):
        validate.check_data(tokens, 10, 160)
    tokens.index = tokens.index.copy()
    tokens.index["prompt"] = tokens.index["total"] - 1
    with pytest.raises(PreflightError, match="supervised-fraction"):
        validate.check_data(tokens, VOCAB, 160)


def test_layer_ids_and_ends(world: World) -> None:
    assert default_layer_ids(64) == (1, 16, 31, 46, 61) and default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(30) == (1, 8, 14, 20, 27)
    assert stop_ids(world.target, load_tokenizer(world.target)) == [END]
    with pytest.raises(PreflightError, match="layer-ids"):
        load_target(world.target, (0, 9), torch.float32, "cpu")
    with pytest.raises(PreflightError, match="target-missing"):
        target_identity(world.work)


# --------------------------------------------------------------------------------------------------- hybrid targets
def test_a_hybrid_target_captures_documents_apart() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("no hybrid architecture in this transformers")
    torch.manual_seed(0)
    c = transformers.Qwen3NextConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    target = Target(transformers.Qwen3NextForCausalLM(c), (0, 2))
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, 60, n) for n in (9, 17, 5)]
    padded = np.zeros((3, 32), np.int64)
    for i, d in enumerate(docs):
        padded[i, : len(d)] = d
    together = target.capture(torch.from_numpy(padded))
    for i, d in enumerate(docs):
        alone = target.capture(torch.from_numpy(d)[None])[0]
        torch.testing.assert_close(together[i, : len(d)], alone, rtol=1e-4, atol=1e-5)
    got = dict(
        TransformersBackend(target, [3], slots=2, rows=40).generate([d.tolist() for d in docs], Sampler(max_new=4))
    )
    assert sorted(got) == [0, 1, 2] and all(len(r.ids) <= 4 for r in got.values())


# ------------------------------------------------------------------------------------------------------ plan and CLI
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def test_plan_by_hand() -> None:
    s = plan.shapes(QWEN3_8B)
    layer = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
    assert abs(s.drafter - (5 * 4096**2 + 5 * layer)) < 0.001 * s.drafter
    assert 8.1e9 < s.target_parameters < 8.3e9
    one = plan.cost(s, 2048, 256, 16)
    rows = 256 * 16
    assert abs(one.head - 4 * 151936 * 4096 * 256 * 15) < 1
    assert one.blocks > 6 * 5 * layer * rows
    twice = plan.cost(s, 2048, 512, 16)
    assert twice.prefill == one.prefill and twice.head == 2 * one.head


def test_plan_agrees_with_what_an_h200_did() -> None:
    # measured: 8,972 tokens/s and 40.68 GB, capture 33,185 tokens/s (docs/results/training.md)
    s = plan.shapes(QWEN3_8B)
    p = plan.plan(QWEN3_8B, 1000, 2048, 1.0, gpus=1, anchors=256, width=2048)
    assert abs(p.tokens_per_s_per_gpu / 8972 - 1) < 0.25
    assert abs(plan.memory(s, 2048, 1, 256, 16).total / 40.68e9 - 1) < 0.10


def test_plan_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert main(["plan", "--target", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "tokens/s per GPU" in text and "TB of hidden states" in text and "disk" in text
    assert main(["plan", "--target", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 913_000
    assert main(["plan", "--target", str(tmp_path / "absent")]) == 2
    assert "target-missing" in capsys.readouterr().err


def test_generate_and_eval_commands(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = [
        "generate",
        "--target",
        str(world.target),
        "--prompts",
        str(world.work / "greedy-prompts"),
        "--out",
        str(tmp_path / "t"),
        "--temperature",
        "0",
        "--max-new",
        "20",
        "--max-len",
        "64",
        "--dtype",
        "float32",
    ]
    assert main(cli) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kept"] == len(TokenSet(tmp_path / "t"))
    assert main(cli) == 0  # nothing left to do
    assert main([*cli, "--thinking", "on"]) == 2
    assert "tokens-other-target" in capsys.readouterr().err


def test_recorded_conversations_become_rows(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": "w5 w6"},
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": "w8"},
    ]
    (tmp_path / "log.jsonl").write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"prompt": "w1"}) + "\n")
    cli = ["generate", "--backend", "recorded", "--target", str(world.target), "--prompts", str(tmp_path / "log.jsonl")]
    assert main([*cli, "--out", str(tmp_path / "t")]) == 0
    assert json.loads(capsys.readouterr().out) == {"conversations": 1, "rows": 2, "failed": 0, "rewriting": 0}
    tokens, tokenizer = TokenSet(tmp_path / "t"), load_tokenizer(world.target)
    texts = [tokenizer.decode(r.ids[r.prompt :]) for r in tokens.rows()]
    assert texts == ["w5 w6 <|end|>", "w8 <|end|>"]
    assert main([*cli, "--out", str(tmp_path / "t")]) == 2
    assert "tokens-exist" in capsys.readouterr().err


def test_train_checks_the_prompts_it_is_shown(world: World, tmp_path: Path) -> None:
    job = TrainJob(world.target, [world.train], tmp_path / "run", smoke_config(4), [], dtype="float32")
    stolen = tmp_path / "eval.jsonl"
    first = (world.work / "train-prompts" / "prompts-00000.jsonl").read_text().splitlines()[0]
    stolen.write_text(json.dumps({"prompt": json.loads(first)["messages"][0]["content"]}) + "\n")
    with pytest.raises(PromptError, match="eval-overlap"):
        run_train(replace(job, prompts=world.work / "train-prompts", evals=[stolen]))


def test_live_eval_command(
    world: World, trained: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = [
        "eval",
        "--drafter",
        str(trained[0] / "best"),
        "--target",
        str(world.target),
        "--tokens",
        str(world.greedy),
        "--budgets",
        "8",
        "--live",
        "4",
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "table.json"),
    ]
    assert main(cli) == 0
    live = json.loads((tmp_path / "table.json").read_text())["live"]
    assert abs(live["chain"]["difference"]) < 0.03 and abs(live["tree-8"]["difference"]) < 0.03
    assert "live chain" in capsys.readouterr().out


def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke"]) == 0
    assert "smoke passed" in capsys.readouterr().out
