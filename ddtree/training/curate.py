"""Curate: normalise, filter, deduplicate exactly and nearly, decontaminate against evaluation sets, mix.

Three passes, each resumable because every file it leaves is whole: scan (parallel; per span of rows: verdict, hashes,
MinHash), select (global, in memory), write (one output file per span). 3-word-shingle MinHash finds near duplicates,
shared 13-word n-grams mark an overlap with an evaluation set.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ddtree.training.errors import PromptError, ResumeError
from ddtree.training.files import MANIFEST, atomic, digest, fingerprint, read_json, write_json, write_manifest
from ddtree.training.prompts import Prompt, Source, Span, messages_of, prompt_of, read_all, read_span, spans
from ddtree.training.textsig import (
    BANDS,
    PERMUTATIONS,
    Signatures,
    mix64,
    near_duplicates,
    normalise_words,
    signatures,
    word_grams,
)

VERDICTS = ("kept", "unparsed", "no-prompt", "too-short", "too-long", "control-characters", "eval-overlap",
            "exact-duplicate", "near-duplicate", "over-quota")  # fmt: skip
OK, UNPARSED, NO_PROMPT, SHORT, LONG, CONTROL, OVERLAP, EXACT, NEAR, QUOTA = range(len(VERDICTS))
GRAM = 13
MIN_GRAM = 6  # a shorter evaluation text is too common to mark an overlap
_ANSWERS = ("canonical_solution", "solution", "answer", "completion", "response")


@dataclass(frozen=True)
class CurateConfig:
    """What curate does; part of the identity of its output."""

    min_chars: int = 12
    max_chars: int = 24_000
    threshold: float = 0.6  # estimated Jaccard similarity of 3-word shingles
    n: int = 0  # rows to keep at most; 0 keeps all
    mix: dict[str, float] = field(default_factory=dict)  # category -> share of n
    seed: int = 0
    span_rows: int = 20_000
    workers: int = 2


def parse_mix(spec: str) -> dict[str, float]:
    """``math:.3,code:.7`` -> shares. Raises PromptError unless they are positive and sum to 1."""
    pairs = (part.partition(":") for part in spec.split(",") if part)
    try:
        mix = {name: float(share) for name, _, share in pairs}
    except ValueError:
        raise PromptError("mix-spec", f"{spec!r} is not name:share,name:share") from None
    if mix and (abs(sum(mix.values()) - 1) > 1e-6 or min(mix.values()) <= 0):
        raise PromptError("mix-shares", f"shares of {spec!r} sum to {sum(mix.values()):g}", "they must sum to 1")
    return mix


def eval_grams(paths: Iterable[Path]) -> dict[int, NDArray[np.uint64]]:
    """Sorted n-gram hashes of evaluation prompts and answers, by n: 13 words, or all of a text of 6 to 12 words."""
    texts: dict[int, list[str]] = {}
    for path in paths:
        found = 0
        for _, row in read_all(Source(path)):
            parts = [str(m.get("content") or "") for m in (messages_of(row) or [])] if row else []
            parts += [row[name] for name in _ANSWERS if isinstance(row.get(name), str)] if row else []
            for words in filter(None, map(normalise_words, parts)):
                found += 1
                texts.setdefault(min(GRAM, words.count(" ") + 1), []).append(words)
        if not found:
            raise PromptError("eval-set-empty", f"{path} holds no evaluation prompts", "it would protect nothing")
    return {n: np.unique(word_grams(t, n).hashes) for n, t in texts.items() if n >= MIN_GRAM}


def overlaps(words: Sequence[str], grams: dict[int, NDArray[np.uint64]]) -> NDArray[np.bool_]:
    """Which of the normalised texts share an n-gram with an evaluation set."""
    hit = np.zeros(len(words), bool)
    for n, known in grams.items():
        g = word_grams(words, n)
        at = np.minimum(np.searchsorted(known, g.hashes), len(known) - 1)
        hit[g.owner[known[at] == g.hashes]] = True
    return hit


def _verdict(prompt: Prompt | None, row: dict[str, Any] | None, config: CurateConfig) -> int:
    if row is None:
        return UNPARSED
    if prompt is None:
        return NO_PROMPT
    text = prompt.text
    if len(text.strip()) < config.min_chars:
        return SHORT
    if len(text) > config.max_chars:
        return LONG
    if "\x00" in text or "�" in text:
        return CONTROL
    return OK


def scan_span(span: Span, config: CurateConfig, grams: dict[int, NDArray[np.uint64]], out: Path) -> None:
    """Scan one span and leave its verdicts, hashes and signatures in ``out`` (npz)."""
    verdicts, words, categories = [], [], []
    for number, row in read_span(span):
        prompt = prompt_of(row, span.source, number) if row else None
        verdict = _verdict(prompt, row, config)
        text = normalise_words(prompt.text) if verdict == OK and prompt else ""
        verdicts.append(SHORT if verdict == OK and not text else verdict)
        if text:
            words.append(text)
            categories.append(prompt.category if prompt else "")
    verdict_array = np.array(verdicts, np.uint8)
    good = np.flatnonzero(verdict_array == OK)
    if len(words):
        exact = np.array([int(digest(w.encode())[:16], 16) for w in words], np.uint64)
        sigs = signatures(words)
        verdict_array[good[overlaps(words, grams)]] = OVERLAP
    else:
        exact = np.zeros(0, np.uint64)
        sigs = Signatures(np.zeros((0, BANDS), np.uint64), np.zeros((0, PERMUTATIONS), np.uint8))
    with atomic(out) as tmp, tmp.open("wb") as handle:
        np.savez(handle, verdicts=verdict_array, rows=good, exact=exact, bands=sigs.bands, low=sigs.low,
                 categories=np.array(categories, dtype=np.str_))  # fmt: skip


@dataclass(frozen=True)
class _Job:
    span: Span
    config: CurateConfig
    grams: dict[int, NDArray[np.uint64]]
    out: Path


def _run(job: _Job) -> int:
    scan_span(job.span, job.config, job.grams, job.out)
    return job.span.count


def select(parts: list[dict[str, NDArray[Any]]], config: CurateConfig) -> list[NDArray[np.uint8]]:
    """Final verdict of every row of every span: duplicates marked, quotas applied."""
    sizes = [len(p["rows"]) for p in parts]
    exact = np.concatenate([p["exact"] for p in parts])
    alive = np.concatenate([p["verdicts"][p["rows"]] for p in parts])
    order = np.flatnonzero(alive == OK)
    _, first = np.unique(exact[order], return_index=True)
    unique = order[np.sort(first)]
    alive[order] = EXACT
    alive[unique] = OK
    sigs = Signatures(np.concatenate([p["bands"] for p in parts])[unique],
                      np.concatenate([p["low"] for p in parts])[unique])  # fmt: skip
    leader = near_duplicates(sigs, np.arange(len(unique)), config.threshold)
    alive[unique[leader != np.arange(len(unique))]] = NEAR

    kept = np.flatnonzero(alive == OK)
    if config.n:
        categories = np.concatenate([p["categories"] for p in parts])[kept]
        place = mix64(exact[kept] ^ np.uint64(config.seed))
        take = np.zeros(len(kept), bool)
        quotas = {c: round(s * config.n) for c, s in config.mix.items()} or {"": config.n}
        for category, quota in quotas.items():
            of = np.flatnonzero(categories == category) if config.mix else np.arange(len(kept))
            take[of[np.argsort(place[of])][:quota]] = True
        alive[kept[~take]] = QUOTA
    out, at = [], 0
    for part, size in zip(parts, sizes, strict=True):
        verdicts = part["verdicts"].copy()
        verdicts[part["rows"]] = alive[at : at + size]
        out.append(verdicts)
        at += size
    return out


def _write_span(span: Span, verdicts: NDArray[np.uint8], out: Path) -> None:
    with atomic(out) as tmp, tmp.open("w", encoding="utf-8") as handle:
        for (number, row), verdict in zip(read_span(span), verdicts, strict=True):
            if verdict == OK and row:
                prompt = prompt_of(row, span.source, number)
                assert prompt is not None  # it was one when the span was scanned
                handle.write(prompt.to_json() + "\n")


def curate(sources: list[Source], out: Path, config: CurateConfig, evals: list[Path] | None = None) -> dict[str, Any]:
    """Run curate and return its manifest. The same command goes on where a killed one stopped.

    Raises:
        PromptError: nothing was kept, or an evaluation set is empty.
        ResumeError: ``out`` holds a run with other inputs or settings.
    """
    identity = {
        "inputs": [{**asdict(s), "path": str(s.path), "fingerprint": fingerprint(s.path)} for s in sources],
        "evals": [{"path": str(p), "fingerprint": fingerprint(p)} for p in evals or []],
        "config": {k: v for k, v in asdict(config).items() if k != "workers"},
    }
    key = digest(json.dumps(identity, sort_keys=True).encode())
    started = out / "scan" / "identity.json"
    if started.exists() and read_json(started)["key"] != key:
        raise ResumeError("curate-other-run", f"{out} was begun with other inputs or settings", "use another --out")
    if (out / MANIFEST).exists():
        return dict(read_json(out / MANIFEST))
    write_json(started, {"key": key, **identity})

    grams = eval_grams(evals or [])
    all_spans = [span for source in sources for span in spans(source, config.span_rows) if span.count]
    files = [out / "scan" / f"span-{i:05d}.npz" for i in range(len(all_spans))]
    todo = [_Job(s, config, grams, f) for s, f in zip(all_spans, files, strict=True) if not f.exists()]
    total = sum(s.count for s in all_spans)
    with tqdm(total=total, initial=total - sum(j.span.count for j in todo), desc="scan", unit="row") as bar:
        if config.workers > 1 and len(todo) > 1:
            with multiprocessing.get_context("spawn").Pool(config.workers) as pool:
                for count in pool.imap_unordered(_run, todo):
                    bar.update(count)
        else:
            for job in todo:
                bar.update(_run(job))

    parts = []
    for file in files:
        with np.load(file) as data:
            parts.append({name: data[name] for name in data.files})
    if not sum(len(p["rows"]) for p in parts):
        raise PromptError("no-prompts", f"{total:,} rows read, none of them holds a usable prompt")
    final = select(parts, config)
    counts: Counter[str] = Counter()
    by_source: dict[str, Counter[str]] = {}
    for span, verdicts in zip(all_spans, final, strict=True):
        here = Counter({VERDICTS[v]: int(n) for v, n in zip(*np.unique(verdicts, return_counts=True), strict=True)})
        counts += here
        by_source.setdefault(span.source.source or span.source.path.name, Counter()).update(here)
    if not counts["kept"]:
        raise PromptError("no-prompts", f"none of {total:,} rows was kept: {dict(counts)}")
    for i, (span, verdicts) in enumerate(zip(tqdm(all_spans, desc="write", unit="span"), final, strict=True)):
        target = out / f"prompts-{i:05d}.jsonl"
        if not target.exists():
            _write_span(span, verdicts, target)
    with atomic(out / "verdicts.npz") as tmp, tmp.open("wb") as handle:
        np.savez_compressed(handle, *final)
    write_manifest(out, "prompts", {**identity, "key": key, "counts": dict(counts), "verdict_names": VERDICTS,
                                    "by_source": {k: dict(v) for k, v in by_source.items()}})  # fmt: skip
    return dict(read_json(out / MANIFEST))
