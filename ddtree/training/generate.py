"""The target's own responses to the prompts: the only text a drafter should learn from.

Backends: ``transformers`` (decode.py's continuous batching where it fits, else the model's own generate), ``vllm``
(offline engine) and ``openai`` (any compatible endpoint). Token ids are stored as the engine returned them; text is
tokenised only for an endpoint that returns no ids, and the row says so. Whole shards are kept, so the same command
goes on after a kill; a prompt that failed is kept in ``failed.jsonl`` with its reason, and tried again by
``retry_failed``.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from ddtree.training.decode import Response, Sampler, SlotGenerator, supports_slots
from ddtree.training.errors import DataError
from ddtree.training.files import MANIFEST, require_space
from ddtree.training.prompts import Prompt
from ddtree.training.target import Target
from ddtree.training.template import Tokenizer, render_text
from ddtree.training.tokens import FINISHED, LOOPING, Row, TokenSet, TokenWriter, failed_path, is_looping


class Backend(Protocol):
    """Responses to token-id prompts, in any order, as (index, response)."""

    name: str

    def generate(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[tuple[int, Response]]: ...


class TransformersBackend:
    """In process. Attention-only targets decode in slots; others through ``generate``, prompts of one length a
    batch."""

    name = "transformers"

    def __init__(self, target: Target, stop: Sequence[int], slots: int = 64, rows: int = 2048) -> None:
        self.target, self.stop, self.slots, self.rows = target, list(stop), slots, rows

    def generate(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[tuple[int, Response]]:
        """See Backend."""
        if supports_slots(self.target):
            yield from SlotGenerator(self.target, self.stop, self.slots, self.rows).generate(prompts, sampler)
            return
        # No padding at all: what a recurrent layer does with padding differs between implementations.
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(i)
        torch.manual_seed(sampler.seed)
        for group in by_length.values():
            for at in range(0, len(group), self.slots):
                yield from self._batch([(i, prompts[i]) for i in group[at : at + self.slots]], sampler)

    def _batch(self, part: list[tuple[int, Sequence[int]]], sampler: Sampler) -> Iterator[tuple[int, Response]]:
        ids = torch.tensor([list(p) for _, p in part], device=self.target.device)
        if not ids.shape[1] or ids.shape[1] >= self.rows:
            yield from ((i, Response([], f"error: prompt of {ids.shape[1]} tokens, {self.rows} rows")) for i, _ in part)
            return
        sampled = {"temperature": sampler.temperature, "top_p": sampler.top_p, "top_k": sampler.top_k}
        out = self.target.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(sampler.max_new, self.rows - ids.shape[1]),
            do_sample=sampler.temperature > 0, eos_token_id=self.stop, pad_token_id=self.stop[0],
            **(sampled if sampler.temperature > 0 else {}),
        )  # fmt: skip
        for (i, _), row in zip(part, out[:, ids.shape[1] :].tolist(), strict=True):
            end = next((k for k, t in enumerate(row) if t in self.stop), None)
            yield i, Response(row if end is None else row[: end + 1], "length" if end is None else "stop")


class VllmBackend:
    """vLLM's offline engine. Options are passed to ``vllm.LLM``."""

    name = "vllm"

    def __init__(self, model: Path, stop: Sequence[int], **options: Any) -> None:
        from vllm import LLM

        self.stop = list(stop)
        self.engine = LLM(model=str(model), skip_tokenizer_init=True, **options)

    def generate(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[tuple[int, Response]]:
        """See Backend. ``detokenize`` is off: ids are what is wanted."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=sampler.temperature, top_p=sampler.top_p, top_k=sampler.top_k or -1, max_tokens=sampler.max_new,
            seed=sampler.seed if sampler.temperature > 0 else None, stop_token_ids=self.stop, detokenize=False,
        )  # fmt: skip
        outputs = self.engine.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        for i, output in enumerate(outputs):
            first = output.outputs[0]
            yield i, Response(list(first.token_ids), str(first.finish_reason or "error: no finish reason"))


class OpenAIBackend:
    """An OpenAI-compatible ``/v1/completions`` endpoint that takes token-id prompts (vLLM, SGLang, llama.cpp do).

    Asks for token ids (``return_token_ids``, vLLM). An endpoint that returns text alone has it tokenised.

    Args:
        attempts: tries per request; the wait between them doubles.
        give_up_after: consecutive failures after which the server counts as dead.
    """

    name = "openai"

    def __init__(
        self, url: str, model: str, tokenizer: Tokenizer, stop: Sequence[int], key: str = "", workers: int = 32,
        attempts: int = 4, timeout: float = 600.0, give_up_after: int = 32,
    ) -> None:  # fmt: skip
        self.url, self.model, self.tokenizer, self.stop = url.rstrip("/"), model, tokenizer, list(stop)
        self.key, self.workers, self.attempts, self.timeout = key, workers, attempts, timeout
        self.give_up_after = give_up_after

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/completions",
            data=json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {self.key}"} if self.key else {}),
            },
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            return dict(json.load(reply))

    def _one(self, prompt: Sequence[int], sampler: Sampler, number: int) -> Response:
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": sampler.max_new,
            "temperature": sampler.temperature, "top_p": sampler.top_p, "seed": sampler.seed + number,
            "return_token_ids": True, "skip_special_tokens": False,
            "stop_token_ids": self.stop, **({"top_k": sampler.top_k} if sampler.top_k else {}),
        }  # fmt: skip
        error = ""
        for attempt in range(self.attempts):
            try:
                choice = self._post(body)["choices"][0]
                reason = str(choice.get("finish_reason") or "length")
                ids = choice.get("token_ids")
                if ids is None:  # the engine kept its ids to itself: the text's own tokenisation is the next best
                    ids = self.tokenizer.encode(choice["text"], add_special_tokens=False)
                    if reason == "stop" and (not ids or ids[-1] not in self.stop):
                        ids = [*ids, self.stop[0]]
                return Response(list(ids), reason)
            except urllib.error.HTTPError as problem:
                error = f"HTTP {problem.code}"
                if problem.code < 500 and problem.code != 429:
                    break
            except (OSError, ValueError, KeyError, IndexError) as problem:
                error = f"{type(problem).__name__}: {problem}"
            time.sleep(min(2.0**attempt * 0.25, 30))
        return Response([], f"error: {error}")

    def generate(self, prompts: Sequence[Sequence[int]], sampler: Sampler) -> Iterator[tuple[int, Response]]:
        """See Backend. Raises DataError when the server seems dead, instead of failing every row."""
        failures = 0
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {pool.submit(self._one, p, sampler, i): i for i, p in enumerate(prompts)}
            for future in as_completed(futures):
                response = future.result()
                failures = failures + 1 if response.reason.startswith("error") else 0
                if failures >= self.give_up_after:
                    for other in futures:
                        other.cancel()
                    raise DataError("endpoint-dead", f"{failures} requests in a row failed: {response.reason}",
                                    "the rows so far are kept: start the server and run the same command")  # fmt: skip
                yield futures[future], response


def _done(folder: Path) -> tuple[set[str], set[str]]:
    """Ids of the prompts that have a response, and of those that failed."""
    tokens = begun(folder)
    done = {str(m["prompt"]) for m in tokens.meta} if tokens else set()
    failed: set[str] = set()
    if failed_path(folder).exists():
        for line in failed_path(folder).read_text().splitlines():
            try:
                failed.add(str(json.loads(line)["prompt"]))
            except ValueError:  # cut by a kill: the prompt is tried again
                continue
    return done, failed


def begun(folder: Path) -> TokenSet | None:
    """The rows so far; None before the first shard."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        return TokenSet(folder, verify=False)
    except DataError as error:
        if error.code == "tokens-empty":
            return None
        raise


def generate(
    prompts: Sequence[Prompt],
    backend: Backend,
    tokenizer: Tokenizer,
    sampler: Sampler,
    out: Path,
    identity: dict[str, Any],
    template_kwargs: dict[str, Any] | None = None,
    shard_rows: int = 4096,
    retry_failed: bool = False,
) -> dict[str, Any]:
    """Generate one response a prompt into a token folder; returns counts.

    Args:
        identity: of target, tokenizer and template; the folder refuses another.
    Raises:
        DataError: the folder was begun with another target, template or sampler; a dead endpoint.
        DiskError: the folder's disk has no room for the responses (four bytes a token, at most max_new each).
    """
    need = len(prompts) * (sampler.max_new * 4 + 700)
    require_space(out, need, f"{len(prompts):,} rows x {sampler.max_new:,} tokens x 4 B, and provenance")
    writer = TokenWriter(out, {**identity, "sampler": asdict(sampler), "engine": backend.name}, shard_rows)
    done, failed = _done(out)
    if retry_failed:
        failed_path(out).unlink(missing_ok=True)
        failed = set()
    todo = [p for p in prompts if p.id not in done and p.id not in failed]
    counts: Counter[str] = Counter(kept=len(done), failed=len(failed))
    started, tokens = time.perf_counter(), 0
    out.mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(prompts), initial=len(prompts) - len(todo), desc="generate", unit="row") as bar:
        for at in range(0, len(todo), 4 * shard_rows):  # bounds what a kill can lose, and what is rendered at once
            part = todo[at : at + 4 * shard_rows]
            kwargs = [{**(template_kwargs or {}), **p.template_kwargs} for p in part]
            texts = [render_text(tokenizer, p.messages, k, p.tools) for p, k in zip(part, kwargs, strict=True)]
            rendered = [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
            for i, response in backend.generate(rendered, sampler):
                prompt = part[i]
                bar.update(1)
                if not response.ids or response.reason.startswith("error"):
                    with failed_path(out).open("a") as handle:
                        handle.write(json.dumps({"prompt": prompt.id, "reason": response.reason}) + "\n")
                    counts["failed"] += 1
                    continue
                flags = (FINISHED if response.reason == "stop" else 0) | (LOOPING if is_looping(response.ids) else 0)
                meta = {
                    "prompt": prompt.id, "sha": prompt.sha, "source": prompt.source, "licence": prompt.licence,
                    "category": prompt.category, "reason": response.reason, "template_kwargs": kwargs[i],
                }  # fmt: skip
                writer.add(Row(np.array([*rendered[i], *response.ids], np.int32), len(rendered[i]), flags, meta))
                counts["kept"] += 1
                counts[response.reason] += 1
                tokens += len(response.ids)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):,.0f} tok/s", refresh=False)
            writer.flush()
    writer.flush()
    seconds = time.perf_counter() - started
    return {
        **counts,
        "response_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
    }
