"""Facts and judgements kept between scans: one sqlite file (WAL), shared by every target and by scans that run at
the same time.

Nothing here may make a scan fail: a cache that can't be opened, read or written is left alone, and ``problem`` says
why."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: Facts of one file: unit id -> [hash of the unit's source, what it found].
Row = dict[str, list[Any]]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (sha TEXT PRIMARY KEY, facts TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, body TEXT NOT NULL, used REAL NOT NULL) WITHOUT ROWID;
"""
_KEEP_JUDGEMENTS = 200


class Cache:
    """``Cache(None)`` keeps nothing. Rows written under another unit hash are replaced unit by unit, not row by row."""

    def __init__(self, folder: Path | None) -> None:
        self.problem = ""
        self._db: sqlite3.Connection | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(folder / "facts.sqlite", timeout=10, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def rows(self, shas: Iterable[str]) -> dict[str, Row]:
        """The rows of these files, as far as there are any."""
        found: dict[str, Row] = {}
        wanted = list(shas)
        for start in range(0, len(wanted), 500):
            part = wanted[start : start + 500]
            marks = ",".join("?" * len(part))
            for sha, text in self._execute(f"SELECT sha, facts FROM files WHERE sha IN ({marks})", part):
                try:
                    found[sha] = json.loads(text)
                except ValueError:
                    continue  # a damaged row is a missing row
        return found

    def put(self, rows: Mapping[str, Row]) -> None:
        """Add what these rows say to what is there, in one transaction (two scans may write the same files)."""
        if self._db is None or not rows:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            present = self.rows(rows)
            self._db.executemany(
                "INSERT OR REPLACE INTO files VALUES (?, ?)",
                [
                    (sha, json.dumps({**present.get(sha, {}), **row}, separators=(",", ":")))
                    for sha, row in rows.items()
                ],
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._give_up(error)

    def judgement(self, key: str) -> Any | None:
        for (body,) in self._execute("SELECT body FROM judgements WHERE key = ?", [key]):
            try:
                return json.loads(body)
            except ValueError:
                return None
        return None

    def put_judgement(self, key: str, body: Any, now: float) -> None:
        self._execute(
            "INSERT OR REPLACE INTO judgements VALUES (?, ?, ?)", [key, json.dumps(body, separators=(",", ":")), now]
        )
        self._execute(
            "DELETE FROM judgements WHERE key NOT IN (SELECT key FROM judgements ORDER BY used DESC LIMIT ?)",
            [_KEEP_JUDGEMENTS],
        )

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _execute(self, sql: str, values: list[Any]) -> list[Any]:
        if self._db is None:
            return []
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            self._give_up(error)
            return []

    def _give_up(self, error: Exception) -> None:
        self.problem = f"{type(error).__name__}: {error}"
        if self._db is not None:
            self._db.close()
        self._db = None
