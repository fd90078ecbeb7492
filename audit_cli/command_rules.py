"""``ddaudit rules``: list, show, test, new."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from audit_cli.disk import naming
from audit_cli.errors import DONE, FOUND, usage
from audit_cli.parameters import Rules

app = typer.Typer(help="The questions that a scan asks, and how to add your own.", no_args_is_help=True)


def _authoring(call: str, *arguments: Any) -> Any:
    """A function of ``rules.authoring``, its errors as ours."""
    from rules import authoring

    try:
        return getattr(authoring, call)(*arguments)
    except KeyError as error:
        raise usage("there is no such rule", str(error.args[0]), "`ddaudit rules list` names them") from None
    except ValueError as error:
        raise usage("that is no rule", str(error), "`ddaudit rules show tree-walk` shows what one looks like") from None


@app.command("list")
def list_rules(rules: Rules = None) -> int:
    """Every question, one a line."""
    sys.stdout.write(_authoring("list_text", rules or []))
    return DONE


@app.command()
def show(rule: Annotated[str, typer.Argument(metavar="ID")], rules: Rules = None) -> int:
    """A rule for its user: the question, what it looks for, what would change the answer."""
    sys.stdout.write(_authoring("show_text", rule, rules or []))
    return DONE


@app.command()
def test(ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...")] = None, rules: Rules = None) -> int:
    """Judge the examples of these rules (all of them when none is named). Exit 1 when one fails."""
    results = _authoring("run_examples", ids or [], rules or [])
    sys.stdout.write(_authoring("results_text", results))
    return FOUND if any(result.problem for result in results) else DONE


@app.command()
def new(
    rule: Annotated[str, typer.Argument(metavar="ID")],
    folder: Annotated[Path, typer.Option("--in", help="Where to write it.", file_okay=False)] = Path(),
) -> int:
    """A rule file to start from. Use it with `scan --rules FOLDER`."""
    text = _authoring("new_rule", rule)
    path = folder / _authoring("file_name", rule)
    if path.exists():
        raise usage(
            f"{path} is there already", "it is not overwritten", "choose another id, or another folder with --in"
        )
    with naming(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{path}: edit it, then `ddaudit rules test {rule} --rules {folder}`")
    return DONE
