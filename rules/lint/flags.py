"""``vllm serve`` flags as people write them, parsed without vLLM. What does not parse is shown with a caret."""

from __future__ import annotations

import io
import json
import re
import shlex
from typing import Any

from rules.lint.model import Serve

# Short and old spellings that vllm serve takes (vllm/engine/arg_utils.py), to the long name.
ALIASES = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "sc": "speculative-config",
    "spec-config": "speculative-config",
    "O": "optimization-level",
    "cc": "compilation-config",
    "q": "quantization",
    "ac": "attention-config",
    "asc": "async-scheduling",
    "m": "model",
}
JSON_FLAGS = frozenset(
    {
        "speculative-config",
        "hf-overrides",
        "compilation-config",
        "additional-config",
        "kv-transfer-config",
        "attention-config",
        "override-generation-config",
        "default-chat-template-kwargs",
    }
)


class FlagError(ValueError):
    """A flag that does not parse. ``str()`` is three lines: the reason, the command line, a caret under the place."""

    def __init__(self, text: str, position: int, reason: str) -> None:
        start = max(0, position - 60)
        shown = re.sub(r"\s", " ", ("..." if start else "") + text[start : position + 60])
        caret = " " * (position - start + (3 if start else 0)) + "^"
        super().__init__(f"{reason}\n  {shown}\n  {caret}")
        self.position = position


def parse_serve_args(text: str) -> Serve:
    """Parse one command line, with or without a leading ``vllm serve MODEL``. Raises FlagError.

    ``--a-b 1``, ``--a-b=1``, ``--a_b 1``, ``--no-a-b``, ``-tp 2``, ``--speculative-config '{...}'`` and the dotted form
    ``--speculative-config.method dflash`` are understood; numbers and JSON are converted, other values stay text."""
    tokens = _split(text)
    flags: dict[str, Any] = {}
    index = 0
    words = [token for token, _ in tokens]
    if words[:2] == ["vllm", "serve"]:
        index = 2
    elif words[:1] == ["serve"]:
        index = 1
    if index < len(tokens) and not words[index].startswith("-"):
        flags["model"] = words[index]
        index += 1
    while index < len(tokens):
        token, position = tokens[index]
        index += 1
        if not token.startswith("-") or token in ("-", "--"):
            raise FlagError(text, position, f"expected a flag here, found {token!r}")
        name, equals, value = token.lstrip("-").partition("=")
        name = (
            name.replace("_", "-")
            if "." not in name
            else name.split(".")[0].replace("_", "-") + name[name.index(".") :]
        )
        name = ALIASES.get(name, name)
        at = position + len(token) - len(value) if equals else position
        if not equals:
            if index < len(tokens) and not _is_flag(words[index]):
                value, at = tokens[index]
                index += 1
            elif name.startswith("no-"):
                flags[name.removeprefix("no-")] = False
                continue
            else:
                flags[name] = True
                continue
        _store(flags, name, value, text, at)
    return Serve(flags)


def _store(flags: dict[str, Any], name: str, value: str, text: str, position: int) -> None:
    head, dot, rest = name.partition(".")
    if dot:
        inner = flags.setdefault(head, {})
        if not isinstance(inner, dict):
            raise FlagError(text, position, f"--{head} is given both as a value and as --{name}")
        *path, last = rest.split(".")
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = _scalar(value)
        return
    if name in JSON_FLAGS:
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            found = text.find(value, position)
            where = (found if found >= 0 else position) + min(error.pos, max(0, len(value) - 1))
            # words that are not in the text as they stand have lost their quotes
            why = error.msg if found >= 0 else "the shell takes its quotes away, put '...' around it"
            raise FlagError(text, where, f"--{name} is not JSON: {why}") from None
        flags[name] = {**flags.get(name, {}), **parsed} if isinstance(parsed, dict) else parsed
        return
    flags[name] = _scalar(value)


def _scalar(value: str) -> Any:
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return {"true": True, "false": False}.get(value.lower(), value)


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or len(word) < 2:
        return False
    return not word[1:].replace(".", "", 1).isdigit()  # "-1" is a value


def _split(text: str) -> list[tuple[str, int]]:
    """Shell words, each with the position it starts at."""
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[tuple[str, int]] = []
    while True:
        before = stream.tell()
        while before < len(text) and text[before].isspace():
            before += 1
        try:
            word = lexer.get_token()
        except ValueError as error:
            raise FlagError(
                text, min(before, max(0, len(text) - 1)), f"the shell would not take this: {error}"
            ) from None
        if word is None:
            return words
        if word == "\\\n" or word == "\n":
            continue
        words.append((word, before))
