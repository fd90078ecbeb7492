"""Conversations that the target already wrote (a server's log) as token rows: one row per assistant turn.

A template that rewrites earlier turns is no obstacle here, since each turn's prompt is rendered as the server
rendered it; training on such conversations whole would be, and ``template.check_history`` refuses that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ddtree.training.errors import DataError, PreflightError
from ddtree.training.files import digest
from ddtree.training.prompts import Source, read_all
from ddtree.training.template import Tokenizer, rewrites_history, turn_rows
from ddtree.training.tokens import LOOPING, TokenWriter, failed_path, is_looping


def record(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    out: Path,
    identity: dict[str, Any],
    template_kwargs: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Write every assistant turn of the conversations (``messages``, with ``token_ids`` on a turn where the engine gave
    them) into a token folder. Turns that the template cannot reproduce are kept in ``failed.jsonl``.

    Returns:
        Counts: conversations, rows, failed, rewriting (conversations whose earlier turns the template rewrites).
    Raises:
        DataError: ``no-conversations``; ``tokens-exist`` when ``out`` has rows already (there is nothing to resume: it
            takes seconds).
    """
    writer = TokenWriter(out, {**identity, "sampler": {"recorded": True}, "engine": "recorded"})
    if writer.shards:
        raise DataError("tokens-exist", f"{out} holds rows already", "use another --out")
    counts = {"conversations": 0, "rows": 0, "failed": 0, "rewriting": 0}
    out.mkdir(parents=True, exist_ok=True)
    for source in sources:
        for number, row in tqdm(read_all(source), desc="record", unit="row"):
            messages = row.get("messages") if row else None
            if not row or not isinstance(messages, list) or not any(m.get("role") == "assistant" for m in messages):
                continue
            counts["conversations"] += 1
            kwargs = {**(template_kwargs or {}), **(row.get("template_kwargs") or {})}
            name = str(row.get("id") or f"{source.source}:{number}")
            sha = digest(json.dumps(messages, sort_keys=True).encode())
            try:
                rows = turn_rows(tokenizer, messages, kwargs, row.get("tools"))
                counts["rewriting"] += rewrites_history(tokenizer, messages, kwargs) is not None
            except PreflightError as error:
                counts["failed"] += 1
                with failed_path(out).open("a") as handle:
                    handle.write(json.dumps({"prompt": name, "reason": str(error)}) + "\n")
                continue
            for one in rows:
                meta = {"prompt": f"{name}:{one.meta['turn']}", "sha": sha, "source": source.source,
                        "licence": source.licence, "category": str(row.get("category") or source.category),
                        "template_kwargs": kwargs}  # fmt: skip
                flags = one.flags | (LOOPING if is_looping(one.ids[one.prompt :]) else 0)
                writer.add(replace(one, flags=flags, meta=meta))
                counts["rows"] += 1
    if not counts["rows"]:
        raise DataError("no-conversations", "no conversation with an assistant turn was found")
    writer.flush()
    return counts
