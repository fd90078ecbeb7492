"""Several audits at once: one row a target, then the questions on which they differ. A target that failed is a row
too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from reports.model import LIST_IDS, VERDICT_IDS, Audit
from reports.text import code, count, one_line, prose, table
from reports.words import STAGES, meaning

_HEAD = ("Target", "vLLM", "Files", *(name for _, name, _ in STAGES), "Path")


def render(audits: Sequence[Audit], failures: Mapping[str, str] = {}) -> str:
    """The matrix as Markdown. ``failures``: target as it was typed -> why there is no audit of it."""
    done = f"{count(len(audits), 'target')} audited"
    title = f"# {done}, {len(failures)} failed" if failures else f"# {done}"
    rows = [
        (
            code(audit.target.spec),
            code(audit.install.vllm_version),
            _files(audit),
            *_stages(audit),
            audit.recommendation.path,
        )
        for audit in audits
    ]
    blocks = [title, table(_HEAD, rows) if rows else ""]
    differing = [f"- **{prose(id)}** ({prose(means)}): {groups}" for id, means, groups in _differences(audits)]
    if differing:
        blocks.append("## Where they differ\n\n" + "\n".join(differing))
    elif len(audits) > 1:
        blocks.append("They answer every question alike.")
    if failures:
        lines = [f"- {code(spec)}: {prose(why)}" for spec, why in failures.items()]
        blocks.append("## No audit of these\n\n" + "\n".join(lines))
    return "\n\n".join(block for block in blocks if block) + "\n"


def terminal(audits: Sequence[Audit], failures: Mapping[str, str] = {}) -> Table:
    """The same rows for a console; a host's words are text, never markup."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in _HEAD:
        shown.add_column(head, overflow="fold")
    style = {"yes": "green", "no": "red", "partial": "yellow", "unknown": "magenta"}
    for audit in audits:
        cells = [Text(one_line(audit.target.spec)), Text(one_line(audit.install.vllm_version)), Text(_files(audit))]
        cells += [Text(outcome, style=style.get(outcome, "dim")) for outcome in _stages(audit)]
        shown.add_row(*cells, Text(audit.recommendation.path))
    for spec, why in failures.items():
        shown.add_row(Text(one_line(spec)), Text(f"failed: {one_line(why)}", style="red"))
    return shown


def _files(audit: Audit) -> str:
    record = audit.install.record
    if record.status != "changed":
        return {"clean": "as released", "unknown": "not compared"}[record.status]
    return f"{len(record.changed) + len(record.orphans) + len(record.missing)} differ"


def _stages(audit: Audit) -> list[str]:
    return [verdict.outcome if (verdict := audit.verdict(id)) else "not judged" for id, _, _ in STAGES]


def _differences(audits: Sequence[Audit]) -> list[tuple[str, str, str]]:
    """(id, what a yes means, "outcome: targets; ...") of every question that is not answered alike."""
    found = []
    ids = [*VERDICT_IDS, *sorted({v.id for audit in audits for v in audit.verdicts} - set(VERDICT_IDS))]
    for id in ids:
        groups: dict[str, list[str]] = {}
        means = ""
        for audit in audits:
            verdict = audit.verdict(id)
            means = meaning(verdict) or verdict.question if verdict else means
            groups.setdefault(_answer(audit, id), []).append(audit.target.spec)
        if len(groups) > 1:
            parts = [f"{prose(answer)} on {', '.join(map(code, specs))}" for answer, specs in groups.items()]
            found.append((id, means, "; ".join(parts)))
    return found


def _answer(audit: Audit, id: str) -> str:
    verdict = audit.verdict(id)
    if verdict is None:
        return "not judged"
    if id == "runner-in-force":
        return " / ".join(f"{item.get('target', '')} {item.get('runner', '')}".strip() for item in verdict.items)
    return count(len(verdict.items), "entry", "entries") if id in LIST_IDS else verdict.outcome
