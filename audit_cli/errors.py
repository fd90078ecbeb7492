"""Errors for people: what happened, why, what to try; and the exit code each belongs to."""

from __future__ import annotations

DONE, FOUND, USAGE, HOST, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 4, 130


class DdauditError(Exception):
    """One line what, one line why, one line what to try. ``code`` names it in JSON, ``exit_code`` is one of the
    constants above. ``picture``: lines to show below the why as they stand."""

    def __init__(
        self, code: str, what: str, why: str = "", hint: str = "", exit_code: int = USAGE, picture: tuple[str, ...] = ()
    ) -> None:
        super().__init__(what)
        self.picture = picture
        self.code, self.what, self.why, self.hint, self.exit_code = code, what, why, hint, exit_code

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "message": f"{self.what}: {self.why}" if self.why else self.what, "hint": self.hint}


def usage(what: str, why: str = "", hint: str = "") -> DdauditError:
    return DdauditError("usage", what, why, hint, USAGE)


def host(code: str, what: str, why: str = "", hint: str = "") -> DdauditError:
    return DdauditError(code, what, why, hint, HOST)


def incomplete(code: str, what: str, why: str = "", hint: str = "") -> DdauditError:
    return DdauditError(code, what, why, hint, INCOMPLETE)
