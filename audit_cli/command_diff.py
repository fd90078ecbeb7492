"""``ddaudit diff``: which answers moved between two kept audits."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from audit_cli.errors import DONE
from audit_cli.parameters import Json, Out, Redact


def diff(
    before: Annotated[str, typer.Argument(help="A JSON file of --json, or the id of a kept audit.")],
    after: Annotated[str, typer.Argument(help="The same; `last` is the newest.")] = "last",
    as_json: Json = False,
    out: Out = None,
    redact: Redact = False,
) -> int:
    """Which answers moved between two audits (two hosts, two versions, before and after an upgrade), and by which
    files."""
    from audit_cli import kept, paths
    from audit_cli.output import put
    from reports import diff as difference
    from reports.model import SCHEMA_VERSION
    from reports.redact import redact as without_names

    folder = paths.state_dir() / "audits"
    old, new = (kept.load(kept.find(name, folder)) for name in (before, after))
    if redact:
        old, new = without_names(old), without_names(new)
    if as_json:
        found = dataclasses.asdict(difference.compare(old, new))
        body = {"schema_version": SCHEMA_VERSION, "before": old.target.spec, "after": new.target.spec, **found}
        text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    else:
        text = difference.render(old, new)
    put(text, out)
    return DONE
