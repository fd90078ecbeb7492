"""An answer can't be surer than what was read: a file that no parser took, and that the rule would have looked at,
makes it unknown."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatch

from reports.model import Verdict
from rules.base import Context

Judge = Callable[[Context], Verdict]


def unless_unread(
    needles: Sequence[bytes] = (), paths: Sequence[str] = (), keep_yes: bool = False
) -> Callable[[Judge], Judge]:
    """Wraps a rule's ``judge``: with an unread file that matches the rule's NEEDLES and PATHS the outcome is
    ``unknown``. ``keep_yes`` is for questions that one place answers (the feature is there), which a file more can't
    undo."""

    def wrap(judge: Judge) -> Judge:
        @functools.wraps(judge)
        def careful(ctx: Context) -> Verdict:
            verdict = judge(ctx)
            if verdict.outcome == "unknown" or (keep_yes and verdict.outcome == "yes"):
                return verdict
            unread = [failed for failed in verdict.scope.files_failed if _matters(ctx, failed.file, needles, paths)]
            if not unread:
                return verdict
            first = f"{unread[0].file} could not be read ({unread[0].why})"
            more = f", nor could {len(unread) - 1} more" if len(unread) > 1 else ""
            summary = f"{first}{more}; without it the answer would be {verdict.outcome}: {verdict.summary}"
            return dataclasses.replace(verdict, outcome="unknown", summary=summary, confidence="low")

        return careful

    return wrap


def _matters(ctx: Context, path: str, needles: Sequence[bytes], paths: Sequence[str]) -> bool:
    if paths and not any(fnmatch(path, pattern) for pattern in paths):
        return False
    file = ctx.file(path)
    if file is None or not needles:
        return True
    try:
        source = ctx.tree.read(file.sha256)
    except OSError:
        return True
    return any(needle in source for needle in needles)
