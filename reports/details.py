"""The long half of the Markdown report: what each answer rests on, the trail, what was dismissed, the scope, how to
check it by hand."""

from __future__ import annotations

import json
import re
from typing import Any

from reports.links import place, sentence
from reports.model import Audit, Evidence, Scope, Verdict
from reports.text import COMMAND_LIMIT, code, count, fence, fold, html, listed, prose, table
from reports.words import STAGES, mark, meaning

_ROWS = 12  # a table longer than this is folded
#: What no static scan sees; said in every report, beside what this scan left out.
_NEVER_SEEN = (
    "the inside of compiled code: of a library only the operators that it declares are read",
    "what is compiled or generated at run time (Triton, inductor and CuTe kernels come from the Python that was read)",
    "flags and variables of a server that is not running: code behind a switch is judged as shipped",
)
_FEW = 8  # roots, plugins or ops named in the scope; the JSON has them all
_NAMED = 5  # dismissed places shown for one reason; the rest are folded
_SNIPPETS = 6  # snippets shown for one verdict; the rest are named
_SAFE_PATH = re.compile(r"[\w.+/-]+", re.ASCII)


def anchor(id: str) -> str:
    """The link target of a verdict's details."""
    return "v-" + re.sub(r"[^a-z0-9]+", "-", id.lower())


def anchored(audit: Audit) -> frozenset[str]:
    return frozenset(v.id for v in audit.verdicts)


def verdicts(audit: Audit) -> str:
    """One folded block per verdict: evidence, dismissed look-alikes, the check by hand."""
    blocks = [_verdict(audit, verdict) for verdict in audit.verdicts]
    if not blocks:
        return ""
    return "\n\n".join(["## Details, one question each", *blocks])


def _verdict(audit: Audit, verdict: Verdict) -> str:
    asked = verdict.question or next((q for id, _, q in STAGES if id == verdict.id), "")
    parts = (
        [f"*{prose(asked)}*" if asked else f"“Yes” means: {prose(meaning(verdict))}."]
        if asked or meaning(verdict)
        else []
    )
    parts.append(f"{sentence(audit, verdict.summary)} (confidence: {verdict.confidence})")
    if verdict.items and verdict.id != "verifiers":
        parts.append(items(verdict.items))
    ways = [item for item in verdict.items if verdict.id == "verifiers" and item.get("via")]
    if ways:
        parts.append(
            "Reached through:\n\n" + "\n".join(f"- {code(str(i.get('symbol')))}: {_way(i['via'])}" for i in ways)
        )
    parts += [_evidence(audit, evidence) for evidence in verdict.evidence[:_SNIPPETS]]
    if len(verdict.evidence) > _SNIPPETS:
        rest = (place(audit, e.file, e.line, e.end_line, e.origin == "vllm") for e in verdict.evidence[_SNIPPETS:])
        parts.append(f"Also: {', '.join(rest)}.")
    if verdict.dismissed:
        parts.append(f"{count(len(verdict.dismissed), 'look-alike')} dismissed: see [below](#dismissed).")
    parts.append(f"Scope: {_scope_line(verdict.scope)}.")
    if verdict.recheck:
        parts.append(
            "Check it by hand ([what it should print](#recheck)):\n\n" + fence(verdict.recheck, "sh", COMMAND_LIMIT)
        )
    if verdict.changes_if:
        parts.append(f"Would change this answer: {sentence(audit, verdict.changes_if)}")
    title = f"<b>{html(verdict.id)}</b>: {html(mark(verdict))}"
    body = "\n\n".join(parts)
    return f'<a id="{anchor(verdict.id)}"></a>\n<details><summary>{title}</summary>\n\n{body}\n\n</details>'


def _way(via: Any) -> str:
    return " → ".join(code(str(step)) for step in (via if isinstance(via, (list, tuple)) else [via]))


def _evidence(audit: Audit, evidence: Evidence) -> str:
    where = place(audit, evidence.file, evidence.line, evidence.end_line, evidence.origin == "vllm")
    whose = "" if evidence.origin == "vllm" else f" of {code(evidence.origin)}"
    symbol = f", {code(evidence.symbol)}" if evidence.symbol else ""
    head = f"{where}{whose}{symbol} (sha256 {code(evidence.sha256[:12])})"
    language = "python" if evidence.file.endswith(".py") else ""
    return f"{head}\n\n{fence(evidence.snippet, language)}" if evidence.snippet.strip() else head


def items(rows: tuple[dict[str, Any], ...]) -> str:
    """A verdict's items as a table: their keys are the columns, in the order in which they first come."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    body = table(
        tuple(prose(column.replace("_", " ")) for column in columns),
        [tuple(_cell(row.get(column)) for column in columns) for row in rows],
    )
    return body if len(rows) <= _ROWS else fold(count(len(rows), "entry", "entries"), body)


def _cell(value: Any) -> str:
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return prose(value) if " " in value or value.isalpha() else code(value)
    if isinstance(value, (list, tuple)) and all(isinstance(part, (str, int, float)) for part in value):
        return ", ".join(_cell(part) for part in value)
    return code(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True))


def probes(audit: Audit) -> str:
    """What was measured on the host, or why it was not."""
    if not audit.probes:
        return ""
    rows = [(code(p.id), p.status, f"{p.seconds:.1f} s" if p.seconds else "", prose(p.why)) for p in audit.probes]
    facts = [fold(f"{p.id}: what it found", _facts(p.facts)) for p in audit.probes if p.facts]
    return "\n\n".join(["## Measured on the host", table(("Probe", "Status", "Took", "Why"), rows), *facts])


def _facts(facts: dict[str, Any]) -> str:
    """Facts as a table; one that is itself a list of records gets a table of its own."""
    records = {key: value for key, value in facts.items() if _is_records(value)}
    plain = tuple({"fact": key, "value": value} for key, value in facts.items() if key not in records)
    parts = [items(plain)] if plain else []
    parts += [f"**{prose(key.replace('_', ' '))}**\n\n{items(tuple(value))}" for key, value in records.items()]
    return "\n\n".join(parts)


def _is_records(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, dict) and row for row in value)


def findings(audit: Audit) -> str:
    """What the lint of models and flags found, errors first."""
    if not audit.findings:
        return ""
    order = {"error": 0, "warning": 1, "info": 2}
    sign = {"error": "**error**", "warning": "warning", "info": "note"}
    rows = []
    for finding in sorted(audit.findings, key=lambda f: order.get(str(f.get("severity")), 3)):
        evidence = finding.get("evidence") or ()
        shown = [sentence(audit, str(line)) for line in ([evidence] if isinstance(evidence, str) else evidence)]
        said = sentence(audit, str(finding.get("summary", "")))
        if finding.get("source"):
            said += f" ({sentence(audit, str(finding['source']))})"
        severity = str(finding.get("severity", ""))
        rows.append(
            (
                sign.get(severity, prose(severity)),
                f"{code(str(finding.get('id', '')))} {said}",
                "<br>".join(shown),
                sentence(audit, str(finding.get("fix", ""))),
            )
        )
    head = ("Severity", "Finding", "Seen in", "Fix")
    return "\n\n".join(["## Models and flags", table(head, rows)])


def assumptions(audit: Audit) -> str:
    """What people take for granted, each with the test and its result."""
    if not audit.assumptions:
        return ""
    sign = {"yes": "yes", "no": "**no**", "unknown": "cannot tell"}
    rows = [
        (
            prose(a.assumption),
            sign[a.holds],
            sentence(audit, a.test),
            sentence(audit, a.result) + _see(audit, a.evidence),
        )
        for a in audit.assumptions
    ]
    return "\n\n".join(["## Assumptions tested", table(("Assumption", "Holds", "Test", "Result"), rows)])


def _see(audit: Audit, evidence: tuple[Evidence, ...]) -> str:
    places = [place(audit, e.file, e.line, e.end_line, e.origin == "vllm") for e in evidence[:3]]
    return f" See {listed(places)}." if places else ""


def trail(audit: Audit) -> str:
    """The search as a person would have made it, scope by scope."""
    if not audit.trail:
        return ""
    intro = (
        "What a person finds with grep, scope by scope, and why none of it settles the question by itself. "
        "The commands run in the folder that holds `vllm/`."
    )
    blocks = []
    for number, step in enumerate(audit.trail, 1):
        found = f"{count(step.hits, 'line')} in {count(step.files, 'file')}" if step.hits else "nothing"
        head = f"**{number}. {prose(step.scope)}**: {prose(step.question)} It prints {found}."
        tail = f"*That alone proves:* {sentence(audit, step.proves)}"
        if step.adds:
            tail += f"\n*The next step adds:* {sentence(audit, step.adds)}"
        more = step.hits - len(step.sample)
        shown = [
            f"$ {step.command}",
            *step.sample,
            *([f"… and {count(more, 'more line', 'more lines')}"] if more > 0 else []),
        ]
        blocks.append(
            f"{head}\n\n{fence(chr(10).join(shown), 'console')}\n\n{tail}".replace("\n*The next", "  \n*The next")
        )
    return "\n\n".join(["## The trail", intro, *blocks])


def dismissed(audit: Audit) -> str:
    """Everything that looked like the thing asked for and is not it, by the reason; where people look first comes
    first."""
    groups: dict[tuple[str, str], dict[tuple[str, int, str], list[str]]] = {}
    for verdict in audit.verdicts:
        for d in verdict.dismissed:
            places = groups.setdefault((d.looked_like, d.why), {})
            places.setdefault((d.file, d.line, d.symbol), []).append(verdict.id)
    if not groups:
        return ""
    blocks = []
    for (looked_like, why), places in sorted(groups.items(), key=lambda group: min(map(_nearness, group[1]))):
        ids = sorted({id for found in places.values() for id in found})
        weighed = ", ".join(prose(id) for id in ids)
        head = f"Looked like **{prose(looked_like)}** (weighed for {weighed}): {sentence(audit, why)}."
        lines = [
            f"- {place(audit, file, line)} {code(symbol)}"
            for file, line, symbol in sorted(places, key=lambda place: (_nearness(place), place))
        ]
        body = "\n".join(lines[:_NAMED])
        if len(lines) > _NAMED:
            body += "\n\n" + fold(f"{len(lines) - _NAMED} more", "\n".join(lines[_NAMED:]))
        blocks.append(f"{head}\n\n{body}")
    return '<a id="dismissed"></a>\n\n## Seen and dismissed\n\n' + "\n\n".join(blocks)


def _nearness(place: tuple[str, int, str]) -> int:
    """How close to acceptance a file is by its folder: 0 is next to it."""
    near = ("vllm/v1/sample/", "vllm/v1/spec_decode/", "vllm/v1/worker/", "vllm/v1/")
    return next((rank for rank, folder in enumerate(near) if place[0].startswith(folder)), len(near))


def scope(audit: Audit) -> str:
    """What was looked at and what was not: what a "no" is worth."""
    widest = max(audit.verdicts, key=lambda v: (v.id == "tree-walk", v.scope.files_seen), default=None)
    if widest is None:
        return ""
    s = widest.scope
    rows = [
        ("Files", f"{s.files_seen:,} seen, {s.files_parsed:,} parsed, {len(s.files_failed):,} failed"),
        ("Functions examined", f"{s.functions_examined:,}"),
    ]
    for name, entries in (
        ("Roots of the slice", s.roots),
        ("Plugins", s.plugins),
        ("Compiled ops called in the slice", s.binary_ops),
    ):
        rows.append((name, _few(entries)))
    blocks = ["## Scope", "\n".join(f"- **{name}**: {value}" for name, value in rows)]
    failed = sorted({(f.file, f.why) for v in audit.verdicts for f in v.scope.files_failed})
    if failed:
        body = "\n".join(f"- {code(file)}: {prose(why)}" for file, why in failed)
        title = f"{count(len(failed), 'file')} that could not be read or parsed"
        blocks.append(f"**{title}**\n{body}" if len(failed) <= _ROWS else fold(title, body))
    unseen = [*dict.fromkeys(entry for v in audit.verdicts for entry in v.scope.not_examined), *_NEVER_SEEN]
    blocks.append("**Not looked at**\n" + "\n".join(f"- {prose(entry)}" for entry in unseen))
    return "\n\n".join(blocks)


def _few(entries: tuple[str, ...]) -> str:
    shown = ", ".join(code(entry) for entry in entries[:_FEW])
    more = f" and {len(entries) - _FEW} more" if len(entries) > _FEW else ""
    return f"{len(entries)}: {shown}{more}" if entries else "none"


def _scope_line(s: Scope) -> str:
    parts = [
        f"{count(s.files_seen, 'file')} seen",
        "all parsed" if s.files_parsed == s.files_seen else f"{s.files_parsed:,} parsed",
    ]
    if s.files_failed:
        parts.append(f"{len(s.files_failed)} failed")
    if s.functions_examined:
        parts.append(f"{count(s.functions_examined, 'function')} examined")
    return ", ".join(parts)


def recheck(audit: Audit) -> str:
    """One script that checks every finding by hand, hashes first, with nothing of this tool."""
    hashes = sorted(
        {
            (e.file, e.sha256)
            for v in audit.verdicts
            for e in v.evidence
            if e.origin == "vllm" and len(e.sha256) == 64 and _SAFE_PATH.fullmatch(e.file)
        }
    )
    lines = []
    if hashes:
        lines += ["# Is this the code that was judged? Every line should say OK.", "sha256sum -c <<'END'"]
        lines += [f"{sha}  {file}" for file, sha in hashes] + ["END"]
    for verdict in audit.verdicts:
        if not verdict.recheck:
            continue
        expected = verdict.recheck_expect.rstrip("\n") or f"({_prints(verdict)})"
        lines += ["", f"# {verdict.id}: {verdict.outcome}", verdict.recheck]
        lines += [f"#= {line}" for line in expected.split("\n")]
    if not lines:
        return ""
    text = (
        "In the folder that holds `vllm/`, with nothing but a shell; lines after `#=` are what it prints, or in "
        "parentheses how much."
    )
    if audit.target.site_packages:
        text += f" Here that is {code(audit.target.site_packages)}."
    count_ = sum(1 for v in audit.verdicts if v.recheck)
    body = fold(
        f"{count(count_, 'check')} and {count(len(hashes), 'hash', 'hashes')}",
        fence("\n".join(lines).strip("\n"), "sh", COMMAND_LIMIT),
    )
    return f'<a id="recheck"></a>\n\n## Check every finding by hand\n\n{text}\n\n{body}'


def _prints(verdict: Verdict) -> str:
    """What a command whose output the rule did not write down prints, in half a sentence."""
    if match := re.fullmatch(r"sed -n (\d+),(\d+)p \S+", verdict.recheck):
        first, last = map(int, match.groups())
        return f"prints {count(last - first + 1, 'line')}: {first} to {last} of the file"
    if verdict.id == "verifiers":
        return f"prints {count(len(verdict.evidence), 'line')}, one a function listed above"
    if verdict.id == "tree-mask":
        return "prints nothing" if verdict.outcome == "partial" else "prints a line for each place that passes a mask"
    if verdict.id == "tree-commit":
        return "prints a line for each place that commits by count"
    if verdict.id == "record-integrity":
        return "prints one line of totals over the .py files, then the paths that differ, if any do"
    return "what it prints was not written down: compare it with the details above"


def changes(audit: Audit) -> str:
    """What would change the answers, alike reasons named once."""
    merged: dict[str, list[str]] = {}
    for verdict in audit.verdicts:
        if verdict.changes_if:
            merged.setdefault(verdict.changes_if, []).append(verdict.id)
    if not merged:
        return ""
    rows = [f"- {listed([code(id) for id in ids])}: {sentence(audit, why)}" for why, ids in merged.items()]
    body = "\n".join(rows)
    return "## What would change these answers\n\n" + (
        body if len(rows) <= _ROWS else fold("Question by question", body)
    )
