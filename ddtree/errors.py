"""Errors of the engine: each has a code that programs can match, a message with the facts, and a hint what to do."""

from __future__ import annotations


class EngineError(Exception):
    """Something the caller can put right.

    Attributes:
        code: kebab-case name of what is wrong, stable across versions.
        message: what was found, with the numbers.
        hint: what to change; may be empty.
    """

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(f"{code}: {message}" + (f" ({hint})" if hint else ""))
        self.code, self.message, self.hint = code, message, hint


class BudgetError(EngineError):
    """A tree budget that is zero, negative, or larger than the tree can index."""


class CheckpointError(EngineError):
    """A drafter checkpoint that is unreadable, or does not fit its target."""


class TargetError(EngineError):
    """A target model whose layers or configuration the engine does not implement."""


class RequestError(EngineError):
    """A prompt or a sampling setting that cannot be served."""


class DeviceError(EngineError):
    """A device that is missing, or has too little memory."""
