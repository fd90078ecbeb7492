"""Curate, tokens, templates, caches: what goes in is what was meant, and a kill or a flipped bit is noticed."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.training.cache import DiskCached, StateStore
from ddtree.training.curate import CurateConfig, curate, parse_mix
from ddtree.training.errors import DataError, DiskError, PreflightError, PromptError, ResumeError
from ddtree.training.features import Cached, Synthetic, VllmStates
from ddtree.training.files import require_space
from ddtree.training.prompts import Prompt, Source, load_prompts, messages_of, spans
from ddtree.training.synthetic import END, make_tokenizer
from ddtree.training.template import check_history, render, rewrites_history, turn_rows
from ddtree.training.textsig import near_duplicates, normalise_words, signatures, word_grams
from ddtree.training.tokens import FINISHED, Row, TokenSet, TokenWriter, is_looping

from .test_trainer import ENV


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(f"{rng.choice('bcdfglmnprst')}{rng.choice('aeiou')}{rng.randint(0, 400)}" for _ in range(words))


def test_gram_hashes_do_not_depend_on_place() -> None:
    grams = word_grams(["a b c d", "", "hello", "x a b c d", "b c d"], 3)
    parts = [set(grams.hashes[a:b].tolist()) for a, b in zip(grams.bounds, grams.bounds[1:], strict=False)]
    assert len(parts[0]) == 2 and parts[1] == set() and len(parts[2]) == 1
    assert parts[0] < parts[3] and parts[4] < parts[0]
    assert grams.owner.tolist() == [0, 0, 2, 3, 3, 3, 4]


def test_near_duplicates_are_found_and_others_kept() -> None:
    rng = random.Random(1)
    base = [sentence(rng, rng.randint(25, 120)) for _ in range(1500)]
    planted = []
    for text in base[:300]:
        words = text.split()
        for _ in range(max(1, len(words) // 25)):
            words[rng.randrange(len(words))] = "changed"
        planted.append("  ".join(words).upper() + " Please.")
    texts = [normalise_words(t) for t in base + planted]
    leader = near_duplicates(signatures(texts), np.arange(len(texts)), 0.6)
    found = (leader[1500:] == np.arange(300)).mean()
    assert found >= 0.95
    assert (leader[:1500] == np.arange(1500)).all(), "no two different texts are joined"


def test_curate_end_to_end(tmp_path: Path) -> None:
    rng = random.Random(2)
    texts = [sentence(rng, 30) for _ in range(60)]
    stolen = sentence(rng, 20)
    rows: list[dict[str, Any]] = [{"prompt": t, "category": "code" if i % 2 else "math"} for i, t in enumerate(texts)]
    rows += [
        {"messages": [{"role": "user", "content": f"Please: {stolen} thanks"}]},
        {"conversations": [{"from": "human", "value": texts[0].upper()}, {"from": "gpt", "value": "ok"}]},
        {"prompt": "hi"}, {"prompt": ""}, {"other": 1}, {"prompt": "x" * 30_000},
        {"prompt": texts[1].replace(texts[1].split()[3], "new")},
    ]  # fmt: skip
    source = jsonl(tmp_path / "in.jsonl", rows)
    with source.open("a") as handle:
        handle.write("{broken\n")
    evals = tmp_path / "eval.jsonl.gz"
    with gzip.open(evals, "wt") as zipped:
        zipped.write(json.dumps({"prompt": stolen}) + "\n")
    manifest = curate(
        [Source.parse(f"{source},licence=MIT,source=toy")], tmp_path / "out", CurateConfig(workers=1), [evals]
    )
    counts = manifest["counts"]
    assert counts == {"kept": 60, "eval-overlap": 1, "exact-duplicate": 1, "near-duplicate": 1, "too-short": 2,
                      "no-prompt": 1, "too-long": 1, "unparsed": 1}  # fmt: skip
    prompts = load_prompts(tmp_path / "out")
    assert len(prompts) == 60 and {p.licence for p in prompts} == {"MIT"} and prompts[0].source == "toy"
    assert prompts[0].id == "toy:0" and manifest["evals"][0]["path"] == str(evals)
    again = curate(
        [Source.parse(f"{source},licence=MIT,source=toy")], tmp_path / "out", CurateConfig(workers=1), [evals]
    )
    assert again["counts"] == counts
    with pytest.raises(ResumeError, match="curate-other-run"):
        curate([Source.parse(str(source))], tmp_path / "out", CurateConfig(workers=1))
    mixed = curate([Source.parse(str(source))], tmp_path / "mix",
                   CurateConfig(workers=1, n=20, mix=parse_mix("code:.7,math:.3")))  # fmt: skip
    kept = load_prompts(tmp_path / "mix")
    assert mixed["counts"]["kept"] == 20 and sum(p.category == "code" for p in kept) == 14


def test_all_formats_read_alike(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"instruction": f"do thing number {i}", "input": "with care" if i % 2 else ""} for i in range(50)]
    jsonl(tmp_path / "a.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=16)
    (tmp_path / "c.json").write_text(json.dumps(rows))
    texts = [messages_of(r)[0]["content"] for r in rows]  # type: ignore[index]
    (tmp_path / "d.txt").write_text("\n".join(t.replace("\n", " ") for t in texts))
    for name in ("a.jsonl", "b.parquet", "c.json", "d.txt"):
        curate(
            [Source.parse(str(tmp_path / name))],
            tmp_path / name.replace(".", "-"),
            CurateConfig(workers=1, threshold=1.1),
        )
        got = load_prompts(tmp_path / name.replace(".", "-"))
        assert [normalise_words(p.text) for p in got] == [normalise_words(t) for t in texts], name
    cut = spans(Source(tmp_path / "a.jsonl"), 7)
    assert [s.count for s in cut] == [7] * 7 + [1]
    with pytest.raises(PromptError, match="source-format"):
        curate(
            [Source.parse(str(shutil.copy(tmp_path / "a.jsonl", tmp_path / "a.csv")))], tmp_path / "x", CurateConfig()
        )


def test_curate_goes_on_after_a_kill(tmp_path: Path) -> None:
    rng = random.Random(3)
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": sentence(rng, 60)} for _ in range(4000)])
    code = (
        "import sys; from pathlib import Path; from ddtree.training.curate import *;"
        "from ddtree.training.prompts import Source;"
        "curate([Source.parse(sys.argv[1])], Path(sys.argv[2]), CurateConfig(workers=1, span_rows=100))"
    )
    out = tmp_path / "out"
    cli = [sys.executable, "-c", code, str(source), str(out)]
    process = subprocess.Popen(cli, env=ENV, stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while len(list(out.glob("scan/span-*.npz"))) < 5 and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {p: p.stat().st_mtime_ns for p in out.glob("scan/span-*.npz")}
    assert done and not (out / "manifest.json").exists()
    subprocess.run(cli, env=ENV, check=True, stderr=subprocess.DEVNULL)
    assert all(p.stat().st_mtime_ns == t for p, t in done.items()), "finished spans are not done again"
    assert len(load_prompts(out)) == 4000


def test_named_errors_of_bad_input(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no-prompts"):
        curate(
            [Source.parse(str(jsonl(tmp_path / "e.jsonl", [{"prompt": ""}])))], tmp_path / "e", CurateConfig(workers=1)
        )
    with pytest.raises(PromptError, match="source-missing"):
        Source.parse(str(tmp_path / "absent.jsonl"))
    with pytest.raises(PromptError, match="source-spec"):
        Source.parse(f"{tmp_path / 'e.jsonl'},colour=red")
    with pytest.raises(PromptError, match="mix-shares"):
        parse_mix("a:.5,b:.6")
    with pytest.raises(PromptError, match="eval-set-empty"):
        curate([Source.parse(str(tmp_path / "e.jsonl"))], tmp_path / "f", CurateConfig(), [tmp_path / "e.jsonl"])
    with pytest.raises(DiskError, match=r"disk-would-fill.*rows x"):
        require_space(tmp_path, 10**16, "a million rows x 10 GB")


def test_token_shards(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "t", {"target": {"weights": "a"}}, shard_rows=3)
    rows = [Row(np.arange(i + 4, dtype=np.int32), 2, FINISHED, {"prompt": f"p{i}"}) for i in range(7)]
    for row in rows:
        writer.add(row)
    assert TokenSet(tmp_path / "t").index.shape == (6,), "what is not yet a shard does not exist"
    writer.flush()
    tokens = TokenSet(tmp_path / "t")
    assert len(tokens) == 7 and [m["prompt"] for m in tokens.meta] == [f"p{i}" for i in range(7)]
    assert all((a.ids == b.ids).all() and a.prompt == b.prompt for a, b in zip(tokens.rows(), rows, strict=True))
    with pytest.raises(DataError, match="tokens-other-target"):
        TokenWriter(tmp_path / "t", {"target": {"weights": "b"}})
    shard = tmp_path / "t" / "shard-00001.ids"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="shard-corrupt"):
        TokenSet(tmp_path / "t")
    shard.unlink()
    with pytest.raises(DataError, match="shard-missing"):
        TokenSet(tmp_path / "t")


@pytest.mark.parametrize(
    ("ids", "looping"),
    [([1, 2, 3] * 9, True), ([5] * 24, True), ([5] * 20, False), (list(range(100)), False), ([], False),
     ([*range(30), *[7, 8, 9, 10, 11] * 6], True), ([*[1, 2, 3] * 9, 4], False)],
)  # fmt: skip
def test_looping(ids: list[int], looping: bool) -> None:
    assert is_looping(ids) is looping


STRIPPING = (
    "{% for m in messages %}<|{{ m['role'] }}|> "
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split(' w9 ')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def test_a_template_that_rewrites_history(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path, STRIPPING)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    talk = [
        {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w5 w6 w9 w7"},
        {"role": "user", "content": "w3"}, {"role": "assistant", "content": "w8 w9 w4"},
    ]  # fmt: skip
    first, second = turn_rows(tokenizer, talk)
    decode = tokenizer.decode
    # each answer is whole in its own row; in the next row's prompt the first answer is cut, as the server will see it
    assert decode(first.ids[first.prompt :]) == "w5 w6 w9 w7 <|end|>" and first.finished
    assert "w5" not in decode(second.ids[: second.prompt]) and "w7" in decode(second.ids[: second.prompt])
    assert second.ids[: second.prompt].tolist() == render(tokenizer, talk[:3])
    assert decode(second.ids[second.prompt :]) == "w8 w9 w4 <|end|>"
    assert rewrites_history(tokenizer, talk) == 1
    with pytest.raises(PreflightError, match="template-rewrites-history"):
        check_history(tokenizer, [talk])
    make_tokenizer(tmp_path / "plain")
    check_history(AutoTokenizer.from_pretrained(tmp_path / "plain"), [talk])
    # ids as the engine returned them are kept, whatever the text would tokenise to
    recorded = [talk[0], {"role": "assistant", "content": "w5", "token_ids": [50, 51, END]}]
    assert turn_rows(tokenizer, recorded)[0].ids[-3:].tolist() == [50, 51, END]


def token_set(folder: Path, rows: int = 10) -> TokenSet:
    writer = TokenWriter(folder, {"target": {}})
    rng = np.random.default_rng(0)
    for i in range(rows):
        writer.add(Row(rng.integers(8, 90, 12 + i).astype(np.int32), 4))
    writer.flush()
    return TokenSet(folder)


def test_cached_features_are_the_sources(tmp_path: Path) -> None:
    tokens = token_set(tmp_path / "t")
    source = Synthetic(tokens, 6, 96, torch.float32, "cpu")
    lengths = tokens.index["total"].astype(np.int64)
    calls: list[int] = []

    class Counting:
        def features(self, rows: Any, lengths: Any) -> torch.Tensor:
            calls.extend(rows)
            return source.features(rows, lengths)

    small = Cached(Counting(), int(lengths[:4].sum()) * 6 * 4, 6, torch.float32, "cpu")
    for wanted in ([0, 2, 3], [3, 2, 9], [9, 0, 1], [1, 3, 2, 0]):
        got = small.features(wanted, lengths[wanted].tolist())
        assert torch.equal(got, source.features(wanted, lengths[wanted].tolist()))
    assert small.used <= len(small.store) and calls.count(0) == 1 and calls.count(9) == 2
    full = Cached(Counting(), 10**6, 6, torch.float32, "cpu")
    assert full.fill(lengths, batch_tokens=30) == len(tokens)
    before = len(calls)
    assert torch.equal(full.features([5, 1], [10, 13]), source.features([5, 1], [10, 13]))
    assert len(calls) == before
    with pytest.raises(DataError, match="state-budget"):
        Cached(source, 8, 6, torch.float32, "cpu")


def test_states_that_vllm_saved(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tokens = token_set(tmp_path / "t", 3)
    expected = []
    for r in range(3):
        ids = torch.from_numpy(tokens.ids(r))
        seen = ids[:-1] if r == 1 else ids  # some versions save no state for the last token
        states = torch.randn(len(seen), 2, 3)
        save_file({"hidden_states": states, "token_ids": seen.long()}, tmp_path / f"request-{9 - r}.safetensors")
        expected.append(torch.cat([states.flatten(1), torch.zeros(len(ids) - len(seen), 6)]))
    source = VllmStates(tmp_path, tokens, 6, "cpu")
    got = source.features([2, 0, 1], tokens.index["total"][[2, 0, 1]].tolist())
    assert torch.equal(got, torch.cat([expected[2], expected[0], expected[1]]))
    with pytest.raises(DataError, match="states-width"):
        VllmStates(tmp_path, tokens, 9, "cpu").features([0], [5])
    (tmp_path / "request-9.safetensors").unlink()
    with pytest.raises(DataError, match="states-missing"):
        VllmStates(tmp_path, tokens, 6, "cpu").features([0], [5])


def test_prompt_text_is_all_turns() -> None:
    p = Prompt("x", [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    assert p.text == "a\nb" and len(p.sha) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_on_disk_within_a_budget(tmp_path: Path, dtype: torch.dtype) -> None:
    tokens = token_set(tmp_path / "t")
    source = Synthetic(tokens, 6, 96, dtype, "cpu")
    lengths = tokens.index["total"].astype(int).tolist()
    identity = {"tokens": "a", "layer_ids": [0, 1]}
    room = sum(lengths[:6]) * 6 * dtype.itemsize

    def store(**changes: Any) -> StateStore:
        return StateStore(tmp_path / "s", 6, dtype, **{"budget": room, "identity": identity, **changes})

    cached = DiskCached(source, store(), "cpu")
    for rows in ([0, 1, 2], [3, 2, 4], [5, 6, 7], [0, 9, 5]):
        got = cached.features(rows, [lengths[r] for r in rows])
        assert torch.equal(got, source.features(rows, [lengths[r] for r in rows]))
    cached.store.flush()
    assert sorted(cached.store.at) == [0, 1, 2, 3, 4, 5] and cached.store.used == room
    assert sum(f.stat().st_size for f in (tmp_path / "s").glob("*.bin")) == room
    again = store()  # another process finds them
    assert torch.equal(again.get(4, 5), source.features([4], [5]))  # type: ignore[arg-type]
    assert again.get(9, 5) is None and not again.put(9, torch.zeros(5, 6))
    with pytest.raises(DataError, match="states-other-run"):
        store(identity={"tokens": "b", "layer_ids": [0, 1]})
    with pytest.raises(DiskError, match=r"disk-would-fill.*state budget"):
        store(budget=10**16)
    shard = next((tmp_path / "s").glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[7] ^= 4
    shard.write_bytes(data)
    with pytest.raises(DataError, match="shard-corrupt"):
        store()


def test_a_crash_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(tmp_path / "s", 6, torch.float32, 10**6, {})
    store.put(0, torch.ones(4, 6))
    store.flush()
    store.put(1, torch.ones(5, 6))
    store.put(2, torch.ones(5, 6))
    written: list[int] = []
    honest = torch.Tensor.numpy

    def dies(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        written.append(1)
        if len(written) == 2:
            raise KeyboardInterrupt
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "numpy", dies)
    with pytest.raises(KeyboardInterrupt):
        store.flush()
    monkeypatch.undo()
    assert [f.name for f in (tmp_path / "s").glob("shard*")] == ["shard-00000.bin"]
    again = StateStore(tmp_path / "s", 6, torch.float32, 10**6, {})
    assert sorted(again.at) == [0] and again.get(1, 5) is None
