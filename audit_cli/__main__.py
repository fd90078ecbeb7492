"""``ddaudit`` and ``python -m audit_cli``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run the command line; exits with the code of the contract."""
    try:
        _refuse_foreign_packages()
        from audit_cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command line could take it
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _refuse_foreign_packages() -> None:
    """``rules``, ``reports`` and ``probes`` are common names: with another distribution's in front, nothing here may
    run."""
    ours = Path(__file__).resolve().parent.parent
    for name in ("rules", "reports", "probes"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found != ours / name / "__init__.py":
            print(f"error: the package {name!r} that Python finds is not ddaudit's", file=sys.stderr)
            print(f"  why: it is {found or 'not there'}, not in {ours}", file=sys.stderr)
            print("  try: install ddaudit into an environment of its own (pipx, uv tool)", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
