"""What a rule's ``judge`` may ask: cached facts, files, evidence, scope. Nothing here parses except ``graph`` (files
a slice visits)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from reports.model import Evidence, Failed, Scope, Verdict
from rules.base import Fact
from rules.cache import Cache, Row
from rules.extraction import Unit, extract_one, failure, graph_unit, is_known
from rules.resolver import Slice
from rules.slice import make_slice
from rules.tree import InstallTree, SourceFile

_SNIPPET_LINES = 40


class ScanContext:
    """The Context of one scan (rules.base.Context, and what the detector's own rules need besides: ``slice``,
    ``graph``)."""

    def __init__(
        self, tree: InstallTree, rows: dict[str, Row], cache: Cache, unreadable: list[tuple[str, str]]
    ) -> None:
        self.tree = tree
        self.verdicts: Mapping[str, Verdict] = {}
        self._rows = rows
        self._cache = cache
        self._unreadable = [*tree.unreadable, *unreadable]
        self._by_path: dict[str, SourceFile] = {}
        for file in sorted(tree.files, key=lambda f: not f.origin.startswith("pythonpath")):
            self._by_path.setdefault(file.path, file)
        self._sorted = sorted(tree.files, key=lambda f: (f.origin == "vllm" and f.stock, f.path))
        self._text: dict[str, list[str]] = {}
        self._new_graphs: dict[str, Row] = {}
        self.links: dict[Any, Any] = {}  # what rules.resolver and rules.following found, for all that ask again

    def facts(self, rule_id: str) -> list[tuple[SourceFile, list[Fact]]]:
        """Facts of that unit ("shapes" is stage 1), only of files that Python would import, plugins and changed
        files first."""
        found = []
        for file in self._sorted:
            entry = self._rows.get(file.sha256, {}).get(rule_id)
            if entry and entry[1] and isinstance(entry[1], list) and self._by_path[file.path] is file:
                found.append((file, entry[1]))
        return found

    def bug(self, rule_id: str) -> str:
        """Where and how that rule's own ``extract`` failed, or "" (a file that does not parse is no bug)."""
        for file in self.tree.files:
            entry = self._rows.get(file.sha256, {}).get(rule_id)
            if entry and isinstance(entry[1], dict) and entry[1].get("bug"):
                return f"extract failed on {file.path}: {entry[1]['failed']}"
        return ""

    def file(self, path: str) -> SourceFile | None:
        return self._by_path.get(path)

    def lines(self, file: SourceFile) -> list[str]:
        """The file's lines; empty when its bytes can't be had."""
        if file.sha256 not in self._text:
            try:
                self._text[file.sha256] = self.tree.read(file.sha256).decode("utf-8", "replace").splitlines()
            except OSError:
                self._text[file.sha256] = []
        return self._text[file.sha256]

    def evidence(self, file: SourceFile, line: int, end_line: int, symbol: str) -> Evidence:
        end_line = max(line, end_line)
        part = self.lines(file)[line - 1 : min(end_line, line - 1 + _SNIPPET_LINES)]
        return Evidence(file.path, line, end_line, symbol, file.sha256, "\n".join(part), file.origin)

    @cached_property
    def failed(self) -> tuple[Failed, ...]:
        """Files that no parser here could read, and files whose bytes could not be had."""
        failures = dict(self._unreadable)
        for file in self.tree.files:
            entry = self._rows.get(file.sha256, {}).get("shapes")
            if entry and failure(entry[1]):
                failures.setdefault(file.path, failure(entry[1]))
        return tuple(Failed(path, why) for path, why in sorted(failures.items()))

    @cached_property
    def _scope(self) -> Scope:
        seen = {f.path for f in self.tree.files} | {path for path, _ in self._unreadable}
        functions = sum(fact["n"] for _, facts in self.facts("shapes") for fact in facts if fact["k"] == "size")
        return Scope(
            files_seen=len(seen),
            files_parsed=len(seen) - len(self.failed),
            files_failed=self.failed,
            functions_examined=functions,
            roots=self.slice.roots,
            plugins=tuple(
                sorted({f.origin.removeprefix("plugin:") for f in self.tree.files if f.origin.startswith("plugin:")})
            ),
            binary_ops=tuple(sorted(self.slice.ops)),
            not_examined=self.slice.not_examined,
        )

    def scope(self, **changes: Any) -> Scope:
        return dataclasses.replace(self._scope, **changes)

    @cached_property
    def slice(self) -> Slice:
        """What is reachable from the samplers that the runners construct."""
        return make_slice(self)

    @cached_property
    def _graph_unit(self) -> Unit:
        return graph_unit()

    def graph(self, file: SourceFile) -> Any:
        """The file's functions, classes, calls, imports and constants (rules.facts.graph), made now if they are not
        cached; None
        when the file can't be read or parsed."""
        row = self._rows.get(file.sha256)
        if not is_known(row, self._graph_unit):
            try:
                source = self.tree.read(file.sha256)
            except OSError:
                return None
            entry = [self._graph_unit.sha, extract_one(self._graph_unit, file.path, source)]
            self._rows.setdefault(file.sha256, {})["graph"] = entry
            self._new_graphs[file.sha256] = {"graph": entry}
        facts = self._rows[file.sha256]["graph"][1]
        return None if failure(facts) else facts[0]

    def close(self) -> None:
        """Keep what the slice made."""
        self._cache.put(self._new_graphs)
