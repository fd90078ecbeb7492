"""What moved between two audits, and by which files: two hosts, two versions, before and after an upgrade. Reads like
release notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from reports import summary
from reports.links import place, sentence
from reports.model import LIST_IDS, VERDICT_IDS, Audit, Verdict
from reports.text import code, count, fold, listed, prose
from reports.words import meaning

How = Literal["changed", "now", "before"]  # the file's content moved; seen only now; seen only before
Direction = Literal["better", "worse", "other"]

# What makes an item of a list the same item in both audits, and what of it is compared.
_KEYS = {
    "verifiers": ("symbol", "file"),
    "spec-methods": ("method",),
    "plugins": ("distribution", "name", "group"),
    "runner-in-force": ("target",),
    "opaque-code": ("op",),
}
_COMPARED = {
    "verifiers": ("shape", "accepts", "runner", "reachable"),
    "runner-in-force": ("runner",),
    "opaque-code": ("state",),
}
_LIST_ORDER = ("verifiers", "runner-in-force", "spec-methods", "plugins", "opaque-code")
_LONG = 8  # entries of a list beyond which they are folded


@dataclass(frozen=True)
class Move:
    """A verdict that is not what it was. ``files``: the evidence's files, of those that are not the same in both:
    (path, how)."""

    id: str
    before: str  # an outcome, or "not judged"
    after: str
    direction: Direction
    summary: str
    files: tuple[tuple[str, How], ...] = ()


@dataclass(frozen=True)
class ListMove:
    """What came to a list, left it, or is now described differently; each entry as a line of text."""

    id: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diff:
    moved: tuple[Move, ...]
    lists: tuple[ListMove, ...]
    same: tuple[str, ...]  # ids whose outcome (or list) is what it was
    explained: tuple[str, ...]  # of those, ids whose summary changed all the same


def compare(before: Audit, after: Audit) -> Diff:
    """The verdicts of two audits side by side, in the report's order."""
    old, new = ({v.id: v for v in audit.verdicts} for audit in (before, after))
    ids = [id for id in VERDICT_IDS if id in old or id in new]
    ids += sorted((set(old) | set(new)) - set(VERDICT_IDS))
    moved, lists, same, explained = [], [], [], []
    for id in ids:
        a, b = old.get(id), new.get(id)
        change = _list_move(id, a, b) if id in LIST_IDS and a and b else None
        if (a.outcome if a else "") != (b.outcome if b else ""):
            moved.append(_move(id, a, b))
        if change and (change.added or change.removed or change.changed):
            lists.append(change)
        elif a and b and a.outcome == b.outcome:
            same.append(id)
            if a.summary != b.summary and id not in LIST_IDS:
                explained.append(id)
    return Diff(tuple(moved), tuple(lists), tuple(same), tuple(explained))


def _move(id: str, a: Verdict | None, b: Verdict | None) -> Move:
    before, after = (v.outcome if v else "not judged" for v in (a, b))
    rank = {"no": 0, "partial": 1, "yes": 2}
    direction: Direction = "other"
    if before in rank and after in rank:
        direction = "better" if rank[after] > rank[before] else "worse"
    elif after == "yes" and before == "n/a":
        direction = "better"
    elif after == "no" and before == "n/a":
        direction = "worse"
    said = b.summary if b else "this audit did not get to it"
    return Move(id, before, after, direction, said, _files(a, b))


def _files(a: Verdict | None, b: Verdict | None) -> tuple[tuple[str, How], ...]:
    old, new = ({e.file: e.sha256 for e in v.evidence} if v else {} for v in (a, b))
    found: list[tuple[str, How]] = []
    for file in sorted({*old, *new}):
        if file in old and file in new:
            if old[file] != new[file]:
                found.append((file, "changed"))
        else:
            found.append((file, "now" if file in new else "before"))
    return tuple(found)


def _list_move(id: str, a: Verdict, b: Verdict) -> ListMove:
    keys = _KEYS.get(id, ())

    def by_key(verdict: Verdict) -> dict[tuple[str, ...], dict[str, Any]]:
        return {tuple(str(item.get(k, "")) for k in keys or sorted(item)): item for item in verdict.items}

    old, new = by_key(a), by_key(b)
    changed = []
    for key in old.keys() & new.keys():
        fields = _COMPARED.get(id, ())
        parts = [
            f"{f} {_word(old[key], f)} → {_word(new[key], f)}" for f in fields if old[key].get(f) != new[key].get(f)
        ]
        if parts:
            changed.append(f"{_label(id, new[key])}: {', '.join(parts)}")
    return ListMove(
        id,
        tuple(sorted(_label(id, new[key]) for key in new.keys() - old.keys())),
        tuple(sorted(_label(id, old[key]) for key in old.keys() - new.keys())),
        tuple(sorted(changed)),
    )


def _label(id: str, item: dict[str, Any]) -> str:
    if id == "verifiers":
        reach = "" if item.get("reachable") else ", not reached"
        return (
            f"`{item.get('symbol', '')}` ({item.get('file', '')}:{item.get('line', '')}; {item.get('shape', '')}, "
            f"{item.get('accepts', '')}{reach})"
        )
    if id == "opaque-code" and item.get("op"):
        return f"`{item['op']}` ({item.get('state', '')})"
    named = [str(item[key]) for key in _KEYS.get(id, ()) if item.get(key)]
    return " ".join(named) or ", ".join(f"{key}: {item[key]}" for key in sorted(item))


def _word(item: dict[str, Any], field: str) -> str:
    value = item.get(field)
    return (
        {True: "yes", False: "no", None: "none"}.get(value, str(value))
        if isinstance(value, (bool, type(None)))
        else str(value)
    )


def render(before: Audit, after: Audit) -> str:
    """The difference as Markdown: what it means for tree verification first, then what is better, what is worse, what
    came and went."""
    diff = compare(before, after)
    names = _name(before, after), _name(after, before)
    blocks = [f"# From {prose(names[0])} to {prose(names[1])}", _opening(before, after, diff)]
    for title, direction in (("Better now", "better"), ("Worse now", "worse"), ("Different now", "other")):
        moves = [move for move in diff.moved if move.direction == direction]
        if moves:
            blocks.append(f"## {title}\n\n" + "\n".join(_move_line(before, after, move) for move in moves))
    lists = sorted(diff.lists, key=lambda change: _LIST_ORDER.index(change.id) if change.id in _LIST_ORDER else 99)
    blocks += [_list_block(before, after, change) for change in lists]
    blocks.append(_unchanged(after, diff))
    blocks.append(_basis(before, after))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _opening(before: Audit, after: Audit, diff: Diff) -> str:
    lines = [f"- **Before**: {prose(summary.headline(before))}", f"- **After**: {prose(summary.headline(after))}"]
    better, worse = (sum(move.direction == d for move in diff.moved) for d in ("better", "worse"))
    other = len(diff.moved) - better - worse
    moved = [f"{n} {word}" for n, word in ((better, "better"), (worse, "worse"), (other, "different")) if n]
    answers = f"{listed(moved)}, {len(diff.same)} unchanged" if moved else f"none of {len(diff.same)} moved"
    lines.append(f"- **Answers**: {answers}.")
    a, b = before.recommendation.path, after.recommendation.path
    path = f"{a} → **{b}**" if a != b else f"still {a}"
    lines.append(
        f"- **Recommended path**: {path}."
        + (f" {prose(_capital(after.recommendation.reasons[0]))}." if after.recommendation.reasons else "")
    )
    return "\n".join(lines)


def _move_line(before: Audit, after: Audit, move: Move) -> str:
    verdict = after.verdict(move.id) or before.verdict(move.id)
    means = meaning(verdict) if verdict else ""
    line = f"- **{prose(move.id)}**: {move.before} → {move.after}. {sentence(after, move.summary)}"
    if means:
        line += f"  \n  *“Yes” means: {prose(means)}.*"
    titles: tuple[tuple[How, str, Audit], ...] = (
        ("changed", "changed", after),
        ("before", "seen before in", before),
        ("now", "seen now in", after),
    )
    parts = []
    for how, title, audit in titles:
        files = [place(audit, file) for file, found in move.files if found == how]
        if files:
            parts.append(f"{title} {', '.join(files[:3])}" + (f" and {len(files) - 3} more" if len(files) > 3 else ""))
    if parts:
        line += f"  \n  Evidence: {'; '.join(parts)}."
    return line


def _list_block(before: Audit, after: Audit, change: ListMove) -> str:
    titles = {
        "verifiers": "Functions that accept tokens",
        "spec-methods": "Speculative methods",
        "plugins": "Plugins",
        "runner-in-force": "The runner in force",
        "opaque-code": "Code that cannot be read",
    }
    lines = []
    for word, entries, audit in (
        ("New", change.added, after),
        ("Gone", change.removed, before),
        ("Changed", change.changed, after),
    ):
        if not entries:
            continue
        if change.id == "spec-methods":
            lines.append(f"- **{word}** ({len(entries)}): {', '.join(code(entry) for entry in entries)}")
        else:
            lines += [f"- **{word}**: {sentence(audit, entry)}" for entry in entries]
    body = "\n".join(lines)
    if len(lines) > _LONG:
        numbers = ((len(change.added), "new"), (len(change.removed), "gone"), (len(change.changed), "changed"))
        body = fold(", ".join(f"{number} {word}" for number, word in numbers if number), body)
    return f"## {titles.get(change.id, prose(change.id))}\n\n{body}"


def _unchanged(after: Audit, diff: Diff) -> str:
    if not diff.same:
        return ""
    lines = [f"- {code(id)}: {_outcome(after, id)}" for id in diff.same if id not in diff.explained]
    for id in diff.explained:
        verdict = after.verdict(id)
        lines.append(
            f"- {code(id)}: {_outcome(after, id)}, now because {sentence(after, verdict.summary)}" if verdict else ""
        )
    return "## Unchanged\n\n" + "\n".join(lines)


def _outcome(audit: Audit, id: str) -> str:
    verdict = audit.verdict(id)
    if verdict is None:
        return "not judged"
    return count(len(verdict.items), "entry", "entries") if id in LIST_IDS else f"still {verdict.outcome}"


def _basis(before: Audit, after: Audit) -> str:
    lines = []
    for word, audit in (("Before", before), ("After", after)):
        lines.append(f"- **{word}**: {code(audit.target.spec)}, {prose(summary.integrity(audit))}")
    if before.install.manifest_sha256 and before.install.manifest_sha256 == after.install.manifest_sha256:
        lines.append("- Both installs hold the same files, byte for byte.")
    if before.made.rules_sha256 != after.made.rules_sha256:
        lines.append(
            "- The two audits were made by different rules: a move may come from the rules. Scan again to be sure."
        )
    return "## What was compared\n\n" + "\n".join(lines)


def _name(audit: Audit, other: Audit) -> str:
    """The version, or the target where the versions are the same."""
    version, theirs = audit.install.vllm_version, other.install.vllm_version
    return f"vLLM {version}" if version and version != theirs else audit.target.spec


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
