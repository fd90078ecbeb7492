"""``ddaudit sarif``: a kept audit as SARIF 2.1.0, for code-scanning dashboards."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from audit_cli.errors import DONE, usage
from audit_cli.parameters import Out, Redact
from reports.model import Audit


def sarif(
    audit: Annotated[str, typer.Argument(help="A JSON file of --json, the id of a kept audit, or `last`.")] = "last",
    out: Out = None,
    redact: Redact = False,
) -> int:
    """An audit as SARIF 2.1.0: every rule is listed, also one that found nothing."""
    from audit_cli import kept, paths
    from audit_cli.store import write_atomic

    found = kept.load(kept.find(audit, paths.state_dir() / "audits"))
    if redact:
        from reports.redact import redact as without_names

        found = without_names(found)
    data = text_of(found).encode("utf-8", "backslashreplace")
    if out is not None:
        write_atomic(out, data, mode=0o644)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    return DONE


def text_of(audit: Audit) -> str:
    """The SARIF log. Raises DdauditError (exit 2) where its library is not installed."""
    from reports import sarif as writer

    try:
        return writer.render(audit)
    except ModuleNotFoundError as error:
        raise usage("SARIF needs a library that is not here", str(error), "install the extra: ddaudit[sarif]") from None
