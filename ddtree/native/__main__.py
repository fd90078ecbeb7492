"""``python -m ddtree.native check`` says which adapter fits a vLLM; ``overlay DIR`` writes the plugin's folder."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from ddtree.native.adapters import Fit, fit, fit_of_installed, load_adapters
from ddtree.native.overlay import write_overlay


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 an adapter fits (proven, or --unproven), 1 none does, 2 usage, 3 no vLLM found."""
    parser = argparse.ArgumentParser(prog="python -m ddtree.native", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="which adapter fits, and why")
    check.add_argument("--site", type=Path, help="a site-packages folder (default: the vLLM of this Python)")
    check.add_argument("--unproven", action="store_true", help="accept an adapter that was not run on a GPU")
    check.add_argument("--json", action="store_true")
    overlay = commands.add_parser("overlay", help="write a folder to put first on PYTHONPATH")
    overlay.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.command == "overlay":
        try:
            print(write_overlay(args.folder).resolve())
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    try:
        result = fit(args.site) if args.site else fit_of_installed()
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(json.dumps(asdict(result)) if args.json else render(result))
    return 0 if result.line is not None and (result.proven or args.unproven) else 1


def render(result: Fit) -> str:
    """The answer in words."""
    if result.line is None:
        known = ", ".join(a.line for a in load_adapters())
        lines = [f"vLLM {result.version}: no adapter fits (adapters: {known}). The nearest one misses:"]
        return "\n".join([*lines, *(f"  - {m}" for m in result.missing)])
    state = "run on a GPU with this release" if result.proven else "its code was not run on a GPU with this release"
    hint = "" if result.proven else ' (add "unproven": true to the speculative config to use it)'
    return f"vLLM {result.version}: adapter {result.line} fits, all {result.checked} seams are in place; {state}{hint}"


if __name__ == "__main__":
    sys.exit(main())
