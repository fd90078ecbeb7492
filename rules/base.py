"""What a rule file is: a module with the names below. There is no registry: ``rules.loading`` finds the modules.

    \"\"\"What the rule looks for, for the user: shown by ``ddaudit rules show ID``.\"\"\"
    ID = "aux-layer-offset"            the verdict id it answers
    QUESTION = "..."                   one line
    CHANGES_IF = "..."                 what would change the answer
    VALID = (Example(...), ...)        miniature installs whose outcome is "yes" (or the list is complete)
    INVALID = (Example(...), ...)      miniature installs with the outcome they state
    NEEDLES = (b"target_layer_ids",)   optional: a file is extracted only if it holds one of these. Never used to
                                       bound a negative about shapes: those rest on stage 1, which has no needles.
    PATHS = ("vllm/v1/worker/**",)     optional: fnmatch patterns on the path, likewise

    def extract(path: str, source: bytes) -> list[Fact]
                                       optional, stage 2: facts of one file, plain JSON. Cached by the file's sha256 and
                                       the hash of this module, so it sees one file only. May import libcst, inside
                                       the function: the warm path never runs it.
    def judge(ctx: Context) -> Verdict
                                       the answer, from cached facts alone: no libcst here, and fast (milliseconds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from reports.model import Evidence, Outcome, Scope, Verdict
from rules.tree import InstallTree, SourceFile

Fact = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A miniature install (path -> source) and the outcome that the rule must give on it."""

    name: str
    files: Mapping[str, str]
    outcome: Outcome
    vllm_version: str = "0.0.0"
    entry_points: tuple[tuple[str, str, str], ...] = ()  # (group, name, value)
    items: int | None = None  # how many items the verdict must have, when that is the point


class Context(Protocol):
    """What ``judge`` may ask."""

    tree: InstallTree
    verdicts: Mapping[str, Verdict]  # answers of the rules that ran before (the order is reports.model.VERDICT_IDS)

    def facts(self, rule_id: str) -> list[tuple[SourceFile, list[Fact]]]:
        """Facts that ``extract`` of that rule gave, by path; plugins and changed files first."""

    def file(self, path: str) -> SourceFile | None:
        """The file that Python would import for this path (--pythonpath folders win over site-packages)."""

    def evidence(self, file: SourceFile, line: int, end_line: int, symbol: str) -> Evidence:
        """Evidence with its snippet (at most 40 lines) read from the file."""

    def scope(self, **changes: Any) -> Scope:
        """The scope of the whole-install pass, with fields replaced."""


@dataclass(frozen=True)
class Rule:
    """A loaded rule module."""

    id: str
    question: str
    doc: str
    changes_if: str
    valid: tuple[Example, ...]
    invalid: tuple[Example, ...]
    judge: Callable[[Context], Verdict]
    extract: Callable[[str, bytes], list[Fact]] | None = None
    needles: tuple[bytes, ...] = ()
    paths: tuple[str, ...] = ()
    source_sha256: str = ""
    origin: str = "builtin"  # or the folder given with --rules
    extra: Mapping[str, Any] = field(default_factory=dict)
