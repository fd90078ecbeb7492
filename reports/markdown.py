"""An audit as Markdown, for an engineer who was not there.

``render`` is a pure function: the same audit gives the same bytes, and only the line that says when the audit was made
differs between two scans of one install. Everything in an audit is data from a host: it goes through ``reports.text``
before it is printed.
"""

from __future__ import annotations

from typing import Any

from reports import details, summary
from reports.links import place, sentence, upstream
from reports.model import Audit, Record, Verdict
from reports.text import brief, code, count, fence, fold, listed, prose, table
from reports.words import GLOSSARY, STAGE_IDS, STAGES, mark, meaning

_NAMED = 20  # changed, missing or orphan files shown before the list is folded


def render(audit: Audit) -> str:
    """The report. The answer stands in its first three lines."""
    sections = (
        _answer(audit),
        _recommendation(audit),
        _install(audit),
        _stages(audit),
        _verifiers(audit),
        _others(audit),
        details.findings(audit),
        details.probes(audit),
        details.verdicts(audit),
        details.assumptions(audit),
        details.trail(audit),
        details.dismissed(audit),
        details.scope(audit),
        details.recheck(audit),
        details.changes(audit),
        _errors(audit),
        _glossary(),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _answer(audit: Audit) -> str:
    return "\n".join(
        [
            f"# {prose(summary.headline(audit))}",
            f"- {prose(summary.basis(audit))}",
            f"- **{prose(summary.advice(audit))}**",
            "",
            _made(audit),
        ]
    )


def _made(audit: Audit) -> str:
    made = audit.made
    parts = [f"Audit of {code(audit.target.spec)}"]
    if made.at:
        parts.append(
            f"made {prose(made.at.replace('+00:00', 'Z'))}" + (f" in {made.seconds:.1f} s" if made.seconds else "")
        )
    parts.append(f"by ddaudit {prose(audit.ddaudit)}".rstrip())
    if made.rules_sha256:
        tested = f", {prose(made.examples)}" if made.examples else ""
        parts.append(f"rules {code(made.rules_sha256[:12])}{tested}")
    if made.facts:
        parts.append("facts known" if made.facts == "known" else f"{count(made.files_parsed_now, 'file')} parsed now")
    if made.provisional:
        parts.append("**provisional: only the files that usually decide were read so far**")
    return " · ".join(parts)


def _recommendation(audit: Audit) -> str:
    recommendation = audit.recommendation
    blocks = [f"## Recommendation: {recommendation.path}"]
    for title, points in (
        ("Why", recommendation.reasons),
        ("What speaks against it", recommendation.against),
        (
            "Not known yet" if recommendation.path == "none" else "Not known yet: measure this first",
            recommendation.needs,
        ),
    ):
        if points:
            blocks.append(f"**{title}**\n" + "\n".join(f"- {prose(point)}" for point in points))
    if recommendation.next:
        where = ""
        if recommendation.next.startswith("python -m ddtree."):
            where = (
                " (on the host, in an environment of its own that has `ddaudit[engine]`; "
                "`ddaudit report AUDIT bench.json` then weighs what was measured)"
            )
        blocks.append(f"**Next**{where}\n\n" + fence(recommendation.next, "sh"))
    return "\n\n".join(blocks)


def _install(audit: Audit) -> str:
    target, record = audit.target, audit.install.record
    rows = [
        ("Integrity", prose(summary.integrity(audit))),
        ("vLLM", _version(audit)),
        ("Target", code(target.spec) + f" ({target.kind})"),
    ]
    rows += [
        (name, code(value))
        for name, value in (("Host", target.host), ("Python", target.python), ("Folder read", target.site_packages))
        if value
    ]
    for id, name in (("runner-in-force", "Runner in force"), ("plugins", "Plugins"), ("opaque-code", "Opaque code")):
        verdict = audit.verdict(id)
        if verdict is not None:
            rows.append((name, sentence(audit, brief(verdict.summary))))
    if audit.install.manifest_sha256:
        rows.append(
            ("Manifest", code(audit.install.manifest_sha256[:16]) + " (sha256 over every path and content hash)")
        )
    note = (
        "What is said of this install is said by the host itself; the hashes of the published release are the one "
        "witness from outside."
        if target.kind == "ssh"
        else ""
    )
    named = _record_files(record)
    return "\n\n".join(
        part
        for part in (
            "## The install and its integrity",
            "\n".join(f"- **{name}**: {value}" for name, value in rows),
            named,
            note,
        )
        if part
    )


def _version(audit: Audit) -> str:
    version = code(audit.install.vllm_version)
    example = upstream(audit, "vllm/__init__.py")
    return (
        f"[{version}]({example.split('/blob/')[0]}/tree/{example.split('/blob/')[1].split('/')[0]})"
        if example
        else version
    )


def _record_files(record: Record) -> str:
    blocks = []
    for title, files in (
        ("Changed after the release (read with the same rules, named first below)", record.changed),
        ("In the install, not in the release", record.orphans),
        ("In the release, missing here", record.missing),
    ):
        if not files:
            continue
        body = "\n".join(f"- {code(file)}" for file in files)
        blocks.append(
            f"**{title}**\n{body}" if len(files) <= _NAMED else fold(f"{title}: {count(len(files), 'file')}", body)
        )
    return "\n\n".join(blocks)


def _stages(audit: Audit) -> str:
    rows = []
    for id, name, question in STAGES:
        verdict = audit.verdict(id)
        if verdict is None:
            rows.append((f"**{name}**", question, "not judged", ""))
        else:
            rows.append((f"**{name}**", question, mark(verdict), sentence(audit, verdict.summary)))
    text = (
        "Tree verification needs all four: with a mask and no walk a tree is accepted as a chain, with a walk and no "
        "commit the cache holds the wrong tokens."
    )
    return "\n\n".join(["## The four stages", text, table(("Stage", "Question", "Answer", "What was found"), rows)])


def _verifiers(audit: Audit) -> str:
    verdict = audit.verdict("verifiers")
    if verdict is None:
        return ""
    rows = [
        (
            code(str(item.get("symbol", ""))) + "<br>" + _where(audit, item),
            f"**{prose(str(item.get('shape', '')))}**" if item.get("shape") != "chain" else "chain",
            prose(", ".join([str(item.get("accepts", "")), *map(str, item.get("also_accepts") or ())])),
            prose(str(item.get("runner", ""))),
            _reached(item),
        )
        for item in sorted(verdict.items, key=lambda item: (not item.get("reachable"), str(item.get("file", ""))))
    ]
    text = sentence(audit, verdict.summary)
    if not rows:
        return f"## Every verifier found\n\n{text}"
    linked = (
        "Links lead to the release's own source: the file's hash here is the release's."
        if any("](" in row[0] for row in rows)
        else ""
    )
    head = ("Function", "Shape", "Accepts by", "Runner", "Reached")
    return "\n\n".join(part for part in ("## Every verifier found", text, table(head, rows), linked) if part)


def _reached(item: dict[str, Any]) -> str:
    if item.get("reachable"):
        return "yes"
    return f"only if {code(str(item['off']))}, which is off" if item.get("off") else "**no**"


def _where(audit: Audit, item: dict[str, Any]) -> str:
    origin = str(item.get("origin", "vllm"))
    where = place(audit, str(item.get("file", "")), _int(item.get("line")), stock=origin == "vllm")
    return where if origin == "vllm" else f"{where} **({prose(origin)})**"


def _others(audit: Audit) -> str:
    rows = [
        (
            f"[{prose(v.id)}](#{_anchor(v)})" if v.id in details.anchored(audit) else prose(v.id),
            mark(v),
            sentence(audit, brief(v.summary)),
            prose(meaning(v) or v.question),
        )
        for v in audit.verdicts
        if v.id not in STAGE_IDS and v.id != "verifiers"
    ]
    if not rows:
        return ""
    doubtful = [v for v in audit.verdicts if v.confidence != "high"]
    note = f"Less than sure: {listed([f'{code(v.id)} ({v.confidence})' for v in doubtful])}." if doubtful else ""
    head = ("Question", "Answer", "What was found", "“Yes” means (a list: what it lists)")
    return "\n\n".join(part for part in ("## The other questions", table(head, rows), note) if part)


def _anchor(verdict: Verdict) -> str:
    return details.anchor(verdict.id)


def _errors(audit: Audit) -> str:
    if not audit.errors:
        return ""
    lines = [
        f"- {code(str(error.get('code', '')))} {prose(str(error.get('message', '')))}"
        + (f" Try: {prose(str(error['hint']))}" if error.get("hint") else "")
        for error in audit.errors
    ]
    return "## What went wrong during the audit\n\n" + "\n".join(lines)


def _glossary() -> str:
    return "## Glossary\n\n" + "\n".join(f"- **{term}**: {_starred(text)}" for term, text in GLOSSARY)


def _starred(text: str) -> str:
    return text.replace("_", "\\_")


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
