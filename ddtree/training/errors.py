"""Named errors of the training stages. Each is raised before GPU time is spent where that is possible."""

from __future__ import annotations

from ddtree.errors import EngineError


class TrainingError(EngineError):
    """Base of every training error: ``code`` is stable, ``message`` has the numbers, ``hint`` says what to do."""


class PromptError(TrainingError):
    """Prompts that are empty, duplicated, or overlap an evaluation set."""


class DataError(TrainingError):
    """A shard or manifest that is missing, corrupt, or belongs to another target."""


class DiskError(TrainingError):
    """A disk that the next stage would fill."""


class PreflightError(TrainingError):
    """A check of target, template, mask id or drafter failed before training."""


class ResumeError(TrainingError):
    """A checkpoint that does not belong to this run."""
