"""The commands. Everything that takes time to import is imported where it is used: ``--help`` has to be instant."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from audit_cli import __version__, command_diff, command_lint, command_rules
from audit_cli.console import Console
from audit_cli.disk import drop_stdout, naming_stdout
from audit_cli.errors import DONE, FOUND, HOST, INCOMPLETE, INTERRUPTED, USAGE, DdauditError
from audit_cli.parameters import (
    Backend,
    Container,
    HostKey,
    Identity,
    Json,
    Models,
    Out,
    PythonPath,
    Redact,
    Rules,
    Sarif,
    SshConfig,
    Sudo,
    Targets,
    Venv,
    Verbose,
    options,
)

# typer carries a click of its own in new versions, and names only some of its errors.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="ddaudit",
    help="Audit a vLLM host for tree speculative decoding, with evidence, and run the path that fits.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DDAUDIT"},
)
cache_app = typer.Typer(help="What is kept on this machine to make scans fast.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(command_rules.app, name="rules")


def run(arguments: Sequence[str]) -> int:
    """Parse, run, and turn every end into an exit code."""
    as_json = "--json" in arguments
    console = Console(verbose=2 if "-vv" in arguments else 0)
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="ddaudit", standalone_mode=False)
        if code == INTERRUPTED:  # typer turns ^C into this exit code by itself
            raise KeyboardInterrupt
        with naming_stdout():
            sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except DdauditError as error:
        if console.verbose == 2:
            import traceback

            traceback.print_exc()
        return _fail(console, error, as_json)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
            return USAGE
        name = error.ctx.command_path if error.ctx else "ddaudit"
        why = "its form is `" + error.ctx.get_usage().removeprefix("Usage: ").strip() + "`" if error.ctx else ""
        return _fail(console, DdauditError("usage", error.format_message(), why, f"{name} --help", USAGE), as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted: what arrived is kept, nothing is left running", file=sys.stderr, flush=True)
        if threading.active_count() > 1:  # scans of other hosts: their links close with us
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        drop_stdout()
        return DONE
    except OSError as error:
        from audit_cli.disk import in_words

        if console.verbose == 2:
            raise
        if error.filename is None:  # print's
            drop_stdout()
        return _fail(console, in_words(error), as_json)
    except Exception as error:  # a bug of ours: exit 1 is for --fail-on, so it may not end with that
        if console.verbose == 2:
            raise
        why = f"{type(error).__name__}: {error}"[:300]
        return _fail(
            console, DdauditError("bug", "ddaudit failed", why, "-vv shows where; report it", INCOMPLETE), as_json
        )


def _fail(console: Console, error: DdauditError, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": error.to_json()}))
    console.error(error)
    return error.exit_code


def _version(value: bool) -> None:
    if value:
        print(f"ddaudit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def scan(
    targets: Targets = None,
    inventory: Annotated[
        Path | None, typer.Option("--inventory", help="A YAML file of targets, each with options of its own.")
    ] = None,
    venv: Venv = "",
    pythonpath: PythonPath = None,
    as_json: Json = False,
    sarif: Sarif = False,
    out: Out = None,
    redact: Redact = False,
    rules: Rules = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Leave the live probes out.")] = False,
    model: Models = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="ID=OUTCOME",
            help="Exit 1 on this answer: tree-walk=no, path=retrain (repeatable). An incomplete scan exits 4 all"
            " the same.",
        ),
    ] = None,
    identity: Identity = "",
    ssh_config: SshConfig = "",
    host_key: HostKey = "",
    ssh_backend: Backend = "paramiko",
    container: Container = "",
    sudo: Sudo = False,
    verbose: Verbose = 0,
) -> int:
    """What vLLM is there, what it can do with trees, and which path fits: a report with evidence."""
    from audit_cli import kept, paths
    from audit_cli.output import fails, output_form, show, show_fleet
    from audit_cli.scan import is_incomplete, scan_target, unheard
    from audit_cli.targets import parse

    console = Console(verbose, quiet=as_json and not sys.stderr.isatty() and not verbose)
    how = options(
        venv, pythonpath, identity, ssh_config, host_key, ssh_backend, container, sudo, not no_probe, tuple(model or ())
    )
    form = output_form(as_json, sarif)
    conditions = [fails(text) for text in fail_on or ()]
    wanted = [(parse(text), how) for text in targets or ()]
    if inventory is not None:
        from audit_cli.fleet import read_inventory

        wanted += read_inventory(inventory, how)
    if not wanted:
        raise DdauditError(
            "usage", "no target was given", "a scan looks at one or more", "pypi:vllm==0.33.0, or user@host"
        )
    if len(wanted) > 1 or inventory is not None:
        return show_fleet(wanted, console, tuple(rules or ()), conditions, form=form, out=out, redact=redact)
    audit = scan_target(*wanted[0], console, tuple(rules or ()))
    for line in unheard(audit):
        console.warn(line)
    saved = kept.keep_or_warn(audit, paths.state_dir() / "audits", console)
    show(audit, console, form=form, out=out, redact=redact, saved=saved)
    if is_incomplete(audit):
        return INCOMPLETE
    return FOUND if any(condition(audit) for condition in conditions) else DONE


@app.command()
def report(
    audit: Annotated[str, typer.Argument(help="A JSON file of --json, the id of a kept audit, or `last`.")] = "last",
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Results of a bench run (JSON): the recommendation weighs them."),
    ] = None,
    as_json: Json = False,
    sarif: Sarif = False,
    out: Out = None,
    redact: Redact = False,
) -> int:
    """Render an audit again: the same JSON gives the same report, byte for byte."""
    from audit_cli import kept, paths
    from audit_cli.output import output_form, show, with_runs

    path = kept.find(audit, paths.state_dir() / "audits")
    then = with_runs(kept.load(path), runs or [])
    show(then, Console(quiet=True), form=output_form(as_json, sarif), out=out, redact=redact)
    return DONE


@cache_app.command("info")
def cache_info(as_json: Json = False) -> int:
    """Where the cache is, and what it holds."""
    from audit_cli import caches

    return caches.info(as_json)


@cache_app.command("clear")
def cache_clear(
    wheels: Annotated[bool, typer.Option("--wheels", help="Remove the fetched wheels too.")] = False,
) -> int:
    """Remove everything that can be made again. Kept audits stay."""
    from audit_cli import caches

    return caches.clear(wheels)


@cache_app.command("warm")
def cache_warm(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="Releases or wheels: pypi:vllm==0.33.0, wheel:FILE")
    ],
    verbose: Verbose = 0,
) -> int:
    """Read these releases now, so that scans of hosts that run them are instant."""
    from audit_cli import caches

    return caches.warm(targets, Console(verbose))


@app.command()
def recheck(
    audit: Annotated[str, typer.Argument(help="A JSON file of --json, the id of a kept audit, or `last`.")],
    target: Annotated[str, typer.Argument(help="Where to look; by default, the audit's own target.")] = "",
    venv: Venv = "",
    pythonpath: PythonPath = None,
    as_json: Json = False,
    run_commands: Annotated[
        bool, typer.Option("--run", help="Run the commands of an audit that was not made here.")
    ] = False,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="changed", help="Exit 1 when something no longer holds.")
    ] = "",
    identity: Identity = "",
    ssh_config: SshConfig = "",
    host_key: HostKey = "",
    ssh_backend: Backend = "paramiko",
    verbose: Verbose = 0,
) -> int:
    """Does an audit still hold? Its evidence is hashed again, its commands are run where the install is on this
    machine."""
    from audit_cli import kept, paths
    from audit_cli.opening import open_target
    from audit_cli.recheck import lines
    from audit_cli.recheck import recheck as check
    from audit_cli.targets import parse

    if fail_on not in ("", "changed"):
        raise DdauditError(
            "usage", f"--fail-on {fail_on} says nothing here", "a recheck knows one condition", "--fail-on changed"
        )
    console = Console(verbose, quiet=as_json)
    folder = paths.state_dir() / "audits"
    path = kept.find(audit, folder)
    then = kept.load(path)
    if not target and then.target.kind in ("ssh", "local") and not venv:
        venv = then.target.python
    how = options(venv, pythonpath, identity, ssh_config, host_key, ssh_backend)
    opened = open_target(parse(target or then.target.spec), how, console)
    console.end_phase()
    ours = path.resolve().parent == folder.resolve()
    outcome = check(then, opened, run_commands=ours or run_commands)
    print(outcome.to_json() if as_json else "\n".join(lines(outcome)))
    return FOUND if fail_on and not outcome.holds else DONE


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(help="A host to look at too.")] = "",
    venv: Venv = "",
    identity: Identity = "",
    ssh_config: SshConfig = "",
    host_key: HostKey = "",
    ssh_backend: Backend = "paramiko",
    container: Container = "",
    sudo: Sudo = False,
    verbose: Verbose = 0,
) -> int:
    """What a scan needs, here and on a host: one line each, with what to do about it. Exit 3 when something is
    missing."""
    from audit_cli import doctor as checks
    from audit_cli.targets import parse

    how = options(venv, [], identity, ssh_config, host_key, ssh_backend, container, sudo)
    bad = False
    found = [checks.here()]
    if target:
        spec = parse(target)
        if spec.kind not in ("ssh", "local"):
            raise DdauditError(
                "usage", f"{target} is no host", "only a host can be looked at", "give user@host, or local"
            )
        found.append(checks.there(spec, how, Console(verbose, quiet=True)))
    for check in (check for group in found for check in group):
        print(check.line(), flush=True)
        bad = bad or check.state == "bad"
    return HOST if bad else DONE


app.command("lint")(command_lint.lint)
app.command("diff")(command_diff.diff)
