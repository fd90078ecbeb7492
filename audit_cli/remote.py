"""Our scripts on a host: sent on standard input, answered in a frame."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
import secrets
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from audit_cli.errors import DdauditError, host
from audit_cli.refusals import refusal
from audit_cli.transport.base import LOST, Limits, Result, Sink, Transport

#: Reads the script's length from its first argument, so that the input can stay open while the script runs: it ends
# when that closes.
_BOOT = 'import sys;i=getattr(sys.stdin,"buffer",sys.stdin);exec(i.read(int(sys.argv[1])))'
#: Runs on any Python, so that one that is too old can say so.
_GATE = """\
import sys
if sys.version_info < (3, 8):
    sys.stdout.write("\\x1eDD%(nonce)s old %%d.%%d\\n" %% sys.version_info[:2])
    sys.stdout.flush()
else:
    exec(compile(%(source)s, "<ddaudit>", "exec"), {"__name__": "ddaudit"})
"""
_OUR_IMPORT = re.compile(r"^from probes\.\w+ import (?:\([^)]*\)|[^(\n]*)\n", re.M)
MAX_ANSWER = 256 << 20


def script(nonce: str, seconds: float, names: Sequence[str], call: str) -> bytes:
    """The text to send: the modules of ``probes`` named, one after the other, then ``call``."""
    parts = [
        importlib.resources.files("probes").joinpath(f"{name}.py").read_text("utf-8") for name in ("frame", *names)
    ]
    future = "from __future__ import annotations\n"
    parts = [_OUR_IMPORT.sub("", part) for part in parts]  # they travel in one text
    body = (
        future
        + "\n".join(part.replace(future, "") for part in parts)
        + f"\nend_with_link({int(seconds)})\n{call}\nimport os\nos._exit(0)\n"
    )
    return (_GATE % {"nonce": nonce, "source": ascii(body)}).encode()


def ask(
    transport: Transport,
    python: str,
    names: Sequence[str],
    call: str,
    known: Collection[str] = (),
    limits: Limits = Limits(),
) -> tuple[Any, str]:
    """Run ``answer(nonce, <call>)`` on the host's Python. Returns (value, its sha256); value is None when the sha256
    is in ``known``."""
    nonce = secrets.token_hex(8)
    text = script(nonce, limits.total, names, f"answer({nonce!r}, {call}, {list(known)!r})")
    result = transport.run([python, "-I", "-B", "-c", _BOOT, str(len(text))], text, limits)
    return _open(result, nonce, transport, python, known)


def stream(transport: Transport, python: str, names: Sequence[str], call: str, sink: Sink, limits: Limits) -> Result:
    """Run ``call`` (which may use NONCE) on the host's Python, its output going to ``sink`` as it comes."""
    text = script("", limits.total, names, call)
    return transport.run([python, "-I", "-B", "-c", _BOOT, str(len(text))], text, limits, sink)


def _open(result: Result, nonce: str, transport: Transport, python: str, known: Collection[str]) -> tuple[Any, str]:
    mark = f"\x1eDD{nonce} ".encode()
    start = result.out.find(mark)
    if start < 0:
        raise failed(result, transport, python)
    end = result.out.find(b"\n", start)
    head = result.out[start + len(mark) : end].decode("ascii", "replace").split()
    if head[:1] == ["old"]:
        raise host(
            "old-python",
            f"{python} is Python {' '.join(head[1:])}",
            "the inventory needs 3.8 or newer",
            "name the venv that runs vLLM with --venv",
        )
    try:
        length, digest = int(head[0]), head[1]
        body = result.out[end + 1 : end + 1 + length]
        if len(body) != length or f"\n\x1eDD{nonce}\n".encode() not in result.out[end + 1 + length :]:
            raise ValueError(f"{len(body)} bytes of {length}")
        if not length and digest in known:
            return None, digest
        opened = zlib.decompressobj()
        data = opened.decompress(body, MAX_ANSWER)
        if not opened.eof:
            raise ValueError(f"it unpacks to more than {MAX_ANSWER} bytes")
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("its sha256 is another")
        return json.loads(data), digest
    except (ValueError, IndexError, zlib.error) as error:
        if result.code == LOST:
            raise failed(result, transport, python) from None
        raise host(
            "bad-answer",
            f"{transport.name} gave a damaged answer",
            str(error),
            "try again; a second time, look with -vv",
        ) from None


def failed(result: Result, transport: Transport, python: str) -> DdauditError:
    """Why a script gave no answer, from what the command said."""
    said = last_line(result.err)
    if result.stopped == "bytes":
        return host(
            "too-much",
            f"{transport.name} sent without end",
            "the answer passed its limit and was dropped",
            "look at what the login shell prints",
        )
    if result.stopped:
        limit = "it said nothing for a minute" if result.stopped == "idle" else "it passed the time allowed"
        return host(
            "timeout",
            f"{transport.name} did not answer in time",
            limit,
            "a hanging network mount? try again, or look with -vv",
        )
    refused = refusal(result, transport.name)
    if refused is not None:
        return refused
    if result.code in (126, 127) or re.search(r"No such file|not found|Permission denied", said):
        return host(
            "no-python",
            f"no Python runs at {python} on {transport.name}",
            said,
            "name the folder that holds bin/python with --venv",
        )
    if b"Unknown option: -I" in result.err:
        return host(
            "old-python",
            f"{python} is Python 2",
            "the inventory needs 3.8 or newer",
            "name the venv that runs vLLM with --venv",
        )
    if result.code == LOST:
        return host(
            "lost",
            f"the link to {transport.name} was lost",
            said or "the command was ended",
            "try again: what arrived is kept",
        )
    return host(
        "script-failed",
        f"the inventory failed on {transport.name}",
        said or f"exit status {result.code}",
        "look with -vv",
    )


def last_line(err: bytes) -> str:
    from audit_cli.inventory import shown

    lines = [line.strip() for line in err.decode("utf-8", "backslashreplace").splitlines() if line.strip()]
    return shown(lines[-1])[:300] if lines else ""


def literal(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """``value`` as a Python expression of plain ASCII."""
    return ascii(json.loads(json.dumps(value)))
