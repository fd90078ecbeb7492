"""A wheel brings a RECORD with the hash of every file. A file that differs from it, isn't in it, or is missing means
that this install is not what was released: every other answer is then about *these* files and no longer about the
version number. Files that a patch created survive ``pip install --force-reinstall``.

``yes``: every ``.py`` of vLLM has the hash that RECORD lists and there is no other. ``no`` names what differs.
``unknown``: no RECORD (an editable install, a source tree).
"""

from __future__ import annotations

import base64
import hashlib

from reports.model import Outcome, Verdict
from rules.base import Context, Example
from rules.recheck import Recheck

ID = "record-integrity"
QUESTION = "Is every file of vLLM what the release published, and is there no other?"
CHANGES_IF = "a file under vllm/ is edited, added or removed, or the release is installed anew into an empty folder"
_MOST = 40
_SCRIPT = """import base64, csv, glob, hashlib, pathlib
records = glob.glob("vllm-*.dist-info/RECORD")
rows = {r[0]: r[1][7:] for r in csv.reader(open(records[0], newline="")) if r} if records else {}
rows = {p: h for p, h in rows.items() if p.startswith("vllm/") and p.endswith(".py")}
here = {p.as_posix(): p for p in pathlib.Path("vllm").rglob("*.py")}
digest = lambda p: base64.urlsafe_b64encode(hashlib.sha256(p.read_bytes()).digest()).decode().rstrip("=")
lists = {"changed": sorted(p for p in rows if p in here and digest(here[p]) != rows[p]),
         "missing": sorted(set(rows) - set(here)), "not in RECORD": sorted(set(here) - set(rows))}
print(len(here), "files,", ", ".join(f"{len(v)} {k}" for k, v in lists.items()))
for kind, paths in lists.items():
    for path in paths:
        print(kind, path)
"""


def judge(ctx: Context) -> Verdict:
    record = ctx.tree.record
    lists = (("changed", record.changed), ("missing", record.missing), ("not in RECORD", record.orphans))
    items = tuple({"file": path, "what": what} for what, paths in lists for path in paths)
    evidence = []
    for path in [*record.changed, *record.orphans][:_MOST]:
        file = ctx.file(path)
        if file is not None:
            evidence.append(ctx.evidence(file, 1, 3, "<file>"))
    if record.status == "unknown":
        return Verdict(
            ID,
            "unknown",
            "there is no RECORD to compare with: an editable install or a source tree",
            "low",
            scope=ctx.scope(),
            changes_if=CHANGES_IF,
            question=QUESTION,
            **Recheck(ctx).shell("ls -d vllm-*.dist-info/RECORD").done(),
        )
    expected = f"{record.files} files, {', '.join(f'{len(paths)} {what}' for what, paths in lists)}\n"
    expected += "".join(f"{what} {path}\n" for what, paths in lists for path in sorted(paths))
    python_only = all(path.startswith("vllm/") and path.endswith(".py") for _, paths in lists for path in paths)
    check = Recheck(ctx).python(_SCRIPT, prints=expected if python_only else None)
    outcome: Outcome
    if not items:
        outcome, summary = "yes", f"{record.files:,} files, each as published"
    else:
        counted = ", ".join(f"{len(paths)} {what}" for what, paths in lists if paths)
        outcome, summary = "no", f"of {record.files:,} files: {counted}; the first is {items[0]['file']}"
    return Verdict(
        ID,
        outcome,
        summary,
        evidence=tuple(evidence),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=items[:500],
        **check.done(),
    )


def _record(*published: tuple[str, str]) -> dict[str, str]:
    """A RECORD that lists these (path, text)."""
    rows = [f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in published]
    return {"vllm-1.0.dist-info/RECORD": "".join(rows) + "vllm-1.0.dist-info/RECORD,,\n"}


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


VALID = (
    Example("a file with its hash", {"vllm/a.py": "x = 1\n", **_record(("vllm/a.py", "x = 1\n"))}, "yes", items=0),
    Example("one file", {"vllm/__init__.py": "x = 1\n"}, "yes", items=0),
    Example(
        "a plugin beside it",
        {"vllm/__init__.py": "", "other/__init__.py": ""},
        "yes",
        entry_points=(("vllm.general_plugins", "a", "other:b"),),
    ),
    Example("an empty file", {"vllm/empty.py": ""}, "yes", items=0),
)
INVALID = (
    Example("a byte was changed", {"vllm/a.py": "x = 2\n", **_record(("vllm/a.py", "x = 1\n"))}, "no", items=1),
    Example(
        "a file that a patch left behind",
        {"vllm/a.py": "", "vllm/b.py": "", **_record(("vllm/a.py", ""))},
        "no",
        items=1,
    ),
    Example("a file is missing", {"vllm/a.py": "", **_record(("vllm/a.py", ""), ("vllm/b.py", ""))}, "no", items=1),
    Example(
        "no RECORD: an editable install", {"vllm/a.py": "", "vllm-1.0.dist-info/METADATA": "Name: vllm\n"}, "unknown"
    ),
)
