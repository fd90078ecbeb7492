"""The summary that a terminal shows: one screen, the answer on top. What comes from the host is text, never markup."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports import summary
from reports.model import LIST_IDS, Audit, Verdict
from reports.text import brief, one_line
from reports.words import STAGE_IDS, STAGES

_STYLE = {"yes": "green", "no": "red", "partial": "yellow", "unknown": "magenta", "n/a": "dim"}


def render(audit: Audit) -> RenderableType:
    """The audit as one rich renderable for a console of 80 columns or more."""
    headline, basis, advice = summary.lines(audit)
    parts: list[RenderableType] = [
        Text(headline, style=f"bold {_tone(audit)}"),
        Text(basis),
        Text(advice, style="bold"),
        Text(),
        _stages(audit),
    ]
    functions = _functions(audit)
    if functions is not None:
        parts += [Text(), functions]
    others = [v for v in audit.verdicts if v.id not in STAGE_IDS and v.id != "verifiers"]
    if others:
        parts += [Text(), _verdicts(others)]
    if audit.errors:
        parts += [
            Text(),
            *(Text(one_line(f"! {error.get('message', '')}"), style="yellow") for error in audit.errors[:5]),
        ]
        if len(audit.errors) > 5:
            parts.append(Text(f"! and {len(audit.errors) - 5} more: see the report", style="yellow"))
    return Group(*parts)


def _tone(audit: Audit) -> str:
    walk = audit.verdict("tree-walk")
    # A "no" is an answer, not a failure; what wants attention is an answer that could not be had.
    return "magenta" if walk is None or walk.outcome == "unknown" else "green" if walk.outcome == "yes" else "cyan"


def _stages(audit: Audit) -> Table:
    table = _table()
    for id, name, _ in STAGES:
        verdict = audit.verdict(id)
        if verdict is None:
            table.add_row(Text(name), Text("not judged", style="dim"), Text())
        else:
            table.add_row(Text(name, style="bold"), _outcome(verdict), Text(_plain(brief(verdict.summary))))
    return table


def _functions(audit: Audit) -> Table | None:
    verdict = audit.verdict("verifiers")
    if verdict is None or not verdict.items:
        return None
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title="Every verifier found", title_justify="left"
    )
    for head in ("function", "shape", "accepts", "runner", "reached"):
        table.add_column(head, overflow="fold")
    for item in sorted(verdict.items, key=lambda item: not item.get("reachable")):
        where = Text(_plain(str(item.get("symbol", ""))))
        where.append(f"\n{_plain(str(item.get('file', '')))}:{item.get('line', '')}", style="dim")
        reached = Text("yes") if item.get("reachable") else Text("no", style="yellow")
        table.add_row(where, *(Text(_plain(str(item.get(key, "")))) for key in ("shape", "accepts", "runner")), reached)
    return table


def _verdicts(verdicts: list[Verdict]) -> Table:
    table = _table()
    for verdict in verdicts:
        table.add_row(Text(_plain(verdict.id), style="bold"), _outcome(verdict), Text(_plain(brief(verdict.summary))))
    return table


def _table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _outcome(verdict: Verdict) -> Text:
    if verdict.id in LIST_IDS and verdict.outcome == "yes":
        return Text(f"{len(verdict.items)} listed")
    return Text(verdict.outcome, style=_STYLE[verdict.outcome])


def _plain(text: str) -> str:
    return one_line(text).replace("`", "")
