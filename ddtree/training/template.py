"""Chat templates: prompts as token ids, conversations as one row per assistant turn.

A template may rewrite earlier turns (Qwen strips their thinking), so a conversation rendered whole is not what the
server sees at turn t. Each assistant turn therefore gets its own row: the prefix rendered exactly as serving
renders it, then the response's own token ids, verbatim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ddtree.training.errors import PreflightError
from ddtree.training.files import digest
from ddtree.training.tokens import FINISHED, Row

Message = dict[str, Any]


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: str | None
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def __call__(self, text: list[str], add_special_tokens: bool = ...) -> Any: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash of the vocabulary: which string is which id."""
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode())


def template_hash(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> str:
    """Hash of the chat template and the arguments it is called with (thinking on or off is one of them)."""
    return digest(json.dumps([tokenizer.chat_template, sorted(kwargs.items())], default=str).encode())


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    kwargs: Mapping[str, Any] | None = None,
    tools: list[Any] | None = None,
    reply: bool = True,
) -> list[int]:
    """Token ids of a conversation; with ``reply`` up to where the assistant's answer starts.

    Raises:
        PreflightError: the tokenizer has no chat template.
    """
    return list(tokenizer.encode(render_text(tokenizer, messages, kwargs, tools, reply), add_special_tokens=False))


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    kwargs: Mapping[str, Any] | None = None,
    tools: list[Any] | None = None,
    reply: bool = True,
) -> str:
    """The text that ``render`` tokenises. Raises PreflightError ``template-missing``."""
    if not tokenizer.chat_template:
        raise PreflightError("template-missing", "the tokenizer has no chat template")
    return str(tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=reply, **({"tools": tools} if tools else {}),
        **(kwargs or {}),
    ))  # fmt: skip


def turn_rows(
    tokenizer: Tokenizer, messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None,
    tools: list[Any] | None = None,
) -> list[Row]:  # fmt: skip
    """One row per assistant turn of a recorded conversation.

    A turn's ``token_ids`` (as the engine returned them) are taken verbatim; text is tokenised as the template's own
    continuation of the prefix, end-of-turn token included.

    Raises:
        PreflightError: the template's rendering of a turn does not continue its rendering of the prefix.
    """
    rows = []
    for t, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        prefix = render(tokenizer, messages[:t], kwargs, tools)
        if "token_ids" in message:
            answer = list(message["token_ids"])
        else:
            answer = _continuation(tokenizer, messages[: t + 1], prefix, kwargs, tools)
        ids = np.array([*prefix, *answer], np.int32)
        finished = bool(answer) and answer[-1] == tokenizer.eos_token_id
        rows.append(Row(ids, len(prefix), FINISHED if finished else 0, {"turn": t}))
    return rows


def _continuation(
    tokenizer: Tokenizer, messages: Sequence[Message], prefix: list[int], kwargs: Mapping[str, Any] | None,
    tools: list[Any] | None,
) -> list[int]:  # fmt: skip
    whole = render(tokenizer, messages, kwargs, tools, reply=False)
    if whole[: len(prefix)] != prefix:
        raise PreflightError(
            "template-breaks-turn",
            f"turn {len(messages) - 1}: the rendered answer does not continue the rendered prompt",
            "record token ids instead of text",
        )
    answer = whole[len(prefix) :]
    if tokenizer.eos_token_id in answer:  # templates add a newline after the end of turn that no engine generates
        answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
    return answer


def rewrites_history(
    tokenizer: Tokenizer, messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """First assistant turn whose tokens change once later turns follow it; None when the template keeps history."""
    whole = render(tokenizer, messages, kwargs, reply=messages[-1]["role"] != "assistant")
    for row in turn_rows(tokenizer, messages, kwargs):
        if whole[: len(row.ids)] != row.ids.tolist():
            return int(row.meta["turn"])
    return None


def check_history(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Message]], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuse to train on whole conversations as single rows when the template rewrites them.

    Raises:
        PreflightError: ``template-rewrites-history``.
    """
    for i, messages in enumerate(conversations):
        turn = rewrites_history(tokenizer, messages, kwargs)
        if turn is not None:
            raise PreflightError(
                "template-rewrites-history",
                f"conversation {i}: turn {turn} renders differently once later turns follow",
                "use one row per assistant turn",
            )
