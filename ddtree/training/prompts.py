"""Prompts as people have them (JSON lines, Parquet, plain text, gzipped or not) as one record type.

Recognised fields: ``messages`` (role/content), ``conversations`` (from/value), ``prompt``, ``instruction`` (+
``input``), ``question``, ``query``, ``text``. A trailing assistant turn is dropped: the target writes its own. A
text file holds one prompt a line.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ddtree.training.errors import PromptError
from ddtree.training.files import digest

Message = dict[str, Any]
_SINGLE = ("prompt", "question", "query", "text", "content")
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Source:
    """One input file and what is known about all of its rows (a row's own fields win)."""

    path: Path
    category: str = "other"
    licence: str = "unknown"
    source: str = ""
    source_rev: str = ""
    lang: str = ""

    @staticmethod
    def parse(spec: str) -> Source:
        """``PATH[,category=code,licence=MIT,source=NAME,source_rev=REV,lang=en]``."""
        path, *pairs = spec.split(",")
        known = {"category", "licence", "source", "source_rev", "lang"}
        values = dict(pair.partition("=")[::2] for pair in pairs)
        if bad := sorted(set(values) - known):
            raise PromptError("source-spec", f"unknown keys {bad} in {spec!r}", f"keys are {sorted(known)}")
        if not Path(path).is_file():
            raise PromptError("source-missing", f"{path} is not a file")
        return Source(Path(path), **{"source": Path(path).name, **values})


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, with provenance. ``messages`` ends with a user (or tool) turn."""

    id: str
    messages: list[Message]
    source: str = ""
    source_rev: str = ""
    licence: str = "unknown"
    lang: str = ""
    category: str = "other"
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The words that duplicates and evaluation overlaps are looked for in."""
        return "\n".join(str(m.get("content") or "") for m in self.messages)

    @property
    def sha(self) -> str:
        """Content hash of the messages."""
        return digest(json.dumps(self.messages, ensure_ascii=False, sort_keys=True).encode())

    def to_json(self) -> str:
        """One JSON line, without what is empty."""
        row = {k: v for k, v in self.__dict__.items() if v not in ("", None, {})}
        return json.dumps({**row, "sha": self.sha}, ensure_ascii=False)


def messages_of(row: dict[str, Any]) -> list[Message] | None:
    """Messages of a row in any recognised spelling; None when there are none."""
    turns = row.get("messages") or row.get("conversations")
    if isinstance(turns, list) and turns:
        out = []
        for turn in turns:
            if not isinstance(turn, dict):
                return None
            role = str(turn.get("role") or turn.get("from") or "")
            content = turn.get("content", turn.get("value"))
            out.append({**{k: v for k, v in turn.items() if k not in ("from", "value")}})
            out[-1].update(role=_ROLES.get(role, role), content=content if content is not None else "")
        while out and out[-1]["role"] == "assistant":
            out.pop()
        return out if out and out[-1]["role"] in ("user", "tool") else None
    if isinstance(row.get("instruction"), str):
        extra = row.get("input")
        text = row["instruction"] + (f"\n\n{extra}" if isinstance(extra, str) and extra.strip() else "")
        return [{"role": "user", "content": text}]
    for name in _SINGLE:
        if isinstance(row.get(name), str):
            return [{"role": "user", "content": row[name]}]
    return None


def prompt_of(row: dict[str, Any], source: Source, number: int) -> Prompt | None:
    """The row's prompt, provenance filled in from its source; None when it holds no prompt."""
    messages = messages_of(row)
    if messages is None:
        return None

    def known(name: str, default: str) -> str:
        return str(row.get(name) or default)

    tools, kwargs = row.get("tools"), row.get("template_kwargs")
    return Prompt(
        id=known("id", f"{source.source or source.path.name}:{number}"),
        messages=messages,
        source=known("source", source.source or source.path.name),
        source_rev=known("source_rev", source.source_rev),
        licence=str(row.get("licence") or row.get("license") or source.licence),
        lang=known("lang", source.lang),
        category=known("category", source.category),
        tools=tools if isinstance(tools, list) else None,
        template_kwargs=kwargs if isinstance(kwargs, dict) else {},
    )


def open_binary(path: Path) -> IO[bytes]:
    """Open, through gzip when the name says so."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _kind(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    kinds = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".txt": "text", ".text": "text"}
    if suffix not in kinds:
        raise PromptError("source-format", f"{path} has an unknown suffix", "use .jsonl, .json, .parquet or .txt (.gz)")
    return kinds[suffix]


@dataclass(frozen=True)
class Span:
    """Rows [first, first + count) of a source; ``at`` is a byte offset (text) or a row group (Parquet)."""

    source: Source
    at: int
    first: int
    count: int


def spans(source: Source, rows: int) -> list[Span]:
    """Cut a source into spans of about ``rows`` rows that can be read on their own."""
    kind = _kind(source.path)
    if kind == "parquet":
        from pyarrow import parquet

        out, first = [], 0
        meta = parquet.ParquetFile(source.path).metadata
        for group in range(meta.num_row_groups):
            count = int(meta.row_group(group).num_rows)
            out.append(Span(source, group, first, count))
            first += count
        return out
    if kind == "json":
        with open_binary(source.path) as handle:
            return [Span(source, 0, 0, len(json.load(handle)))]
    starts, number, offset, last = [0], 0, 0, b""
    with open_binary(source.path) as handle:
        while block := handle.read(1 << 22):
            lines = block.count(b"\n")
            if number // rows != (number + lines) // rows:  # only here is the exact place of a line needed
                at = -1
                for _ in range(lines):
                    at = block.index(b"\n", at + 1)
                    number += 1
                    if number % rows == 0:
                        starts.append(offset + at + 1)
            else:
                number += lines
            offset, last = offset + len(block), block[-1:]
    total = number + (0 if last in (b"", b"\n") else 1)
    return [Span(source, s, i * rows, min(rows, max(total - i * rows, 0))) for i, s in enumerate(starts)]


def read_span(span: Span) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(row number, row) of a span; None for a row that cannot be parsed."""
    kind = _kind(span.source.path)
    if kind == "parquet":
        from pyarrow import parquet

        table = parquet.ParquetFile(span.source.path).read_row_group(span.at)
        for i, row in enumerate(table.to_pylist()):
            yield span.first + i, row
        return
    with open_binary(span.source.path) as handle:
        if kind == "json":
            for i, row in enumerate(json.load(handle)):
                yield i, row if isinstance(row, dict) else None
            return
        handle.seek(span.at)
        for i in range(span.count):
            line = handle.readline()
            if not line:
                return
            yield span.first + i, _parse_line(line, kind)


def _parse_line(line: bytes, kind: str) -> dict[str, Any] | None:
    try:
        if kind == "text":
            return {"text": line.decode().rstrip("\r\n")}
        row = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    return row if isinstance(row, dict) else None


def read_all(source: Source) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Every row of a source."""
    for span in spans(source, 1 << 16):
        yield from read_span(span)


def load_prompts(folder: Path) -> list[Prompt]:
    """Prompts of a curated folder (or one .jsonl file), in order. Raises PromptError when there are none."""
    files = sorted(folder.glob("prompts-*.jsonl")) if folder.is_dir() else [folder]
    out = []
    for file in files:
        source = Source(file, source=file.name)
        for number, row in read_all(source):
            prompt = prompt_of(row, source, number) if row else None
            if prompt is None:
                raise PromptError("prompt-unreadable", f"row {number} of {file} holds no prompt")
            out.append(prompt)
    if not out:
        raise PromptError("no-prompts", f"{folder} holds no prompts", "run curate first")
    return out
