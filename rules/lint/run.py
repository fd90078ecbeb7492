"""Run every check of a case. A check that raises is a finding of its own, never a crashed lint."""

from __future__ import annotations

from rules.lint import drafter, hybrid, layers, memory, serving
from rules.lint.model import Case, Finding

CHECKS = (*drafter.CHECKS, *layers.CHECKS, *serving.CHECKS, *hybrid.CHECKS, *memory.CHECKS)
ORDER = {"error": 0, "warning": 1, "info": 2}


def lint(case: Case) -> tuple[Finding, ...]:
    """All findings, errors first, then by id."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found.extend(check(case))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            found.append(
                Finding(
                    "check-failed",
                    "warning",
                    f"the check {check.__name__} could not read these configs: {error}",
                    (),
                    "Look at the model folders by hand; please report this.",
                )
            )
    return tuple(sorted(found, key=lambda f: (ORDER[f.severity], f.id, f.summary)))
