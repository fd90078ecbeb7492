"""Links to the published source, given only where the bytes on the host are the bytes of the release."""

from __future__ import annotations

import re

from reports.model import Audit
from reports.text import code, one_line, prose

_PLACE = re.compile(r"`?(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.py)(?::(\d{1,7})(?:-(\d{1,7}))?)?(?![\w/-])`?", re.ASCII)
_UPSTREAM = "https://github.com/vllm-project/vllm/blob"
_RELEASE = re.compile(r"\d+(\.\d+)+(rc\d+|\.post\d+)?")
# In the wheel, not in the tagged repository: made or vendored while the wheel is built.
_MADE_BY_BUILD = re.compile(r"vllm/(_version\.py|vllm_flash_attn/|third_party/|grpc/.*_pb2|.*_pb2(_grpc)?\.py)")


def upstream(audit: Audit, file: str, line: int = 0, end_line: int = 0) -> str:
    """The address of a file at the release's tag, or "" where the file is not known to be what that tag holds.

    A file counts as the release's when RECORD could be checked and lists this very content: not changed, not an orphan.
    A local version (``0.33.0+fork``) has no tag.
    """
    record, version = audit.install.record, audit.install.vllm_version
    if record.status == "unknown" or file in record.changed or file in record.orphans or file in _elsewhere(audit):
        return ""
    if not _RELEASE.fullmatch(version) or not re.fullmatch(r"vllm/[\w./-]+\.py", file, re.ASCII) or ".." in file:
        return ""
    if _MADE_BY_BUILD.match(file):
        return ""
    anchor = f"#L{line}" + (f"-L{end_line}" if end_line > line else "") if line else ""
    return f"{_UPSTREAM}/v{version}/{file}{anchor}"


def _elsewhere(audit: Audit) -> frozenset[str]:
    """Files of which a plugin or a PYTHONPATH folder brings its own copy: a sentence that names one may mean that
    copy."""
    evidence = (e.file for v in audit.verdicts for e in v.evidence if e.origin != "vllm")
    items = (str(i.get("file")) for v in audit.verdicts for i in v.items if i.get("origin", "vllm") != "vllm")
    return frozenset((*evidence, *items))


def place(audit: Audit, file: str, line: int = 0, end_line: int = 0, stock: bool = True) -> str:
    """``file:line`` as Markdown, linked where ``upstream`` gives an address and the caller knows of no other copy of
    the file."""
    shown = code(f"{file}:{line}" if line else file)
    address = upstream(audit, file, line, end_line) if stock else ""
    return f"[{shown}]({address})" if address else shown


def sentence(audit: Audit, text: str) -> str:
    """``reports.text.prose``, with every ``folder/file.py:line`` in it as a place."""
    text = one_line(text)
    parts, end = [], 0
    for match in _PLACE.finditer(text):
        whole = match.group()
        if whole.startswith("`") != whole.endswith("`") or text[end : match.start()].count("`") % 2:
            continue  # part of a longer code span
        file, line, last = match.groups()
        parts += [_between(text[end : match.start()]), place(audit, file, int(line or 0), int(last or 0))]
        end = match.end()
    return "".join([*parts, _between(text[end:])]) if parts else prose(text)


def _between(text: str) -> str:
    """``prose`` that keeps the spaces at the ends."""
    left = " " if text.startswith(" ") else ""
    right = " " if text.endswith(" ") and text.strip() else ""
    return f"{left}{prose(text)}{right}"
