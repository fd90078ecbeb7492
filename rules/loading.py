"""Finding rule modules and hashing what their answers depend on. Hashing imports nothing, so that a warm scan stays
fast."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from rules.base import Rule

HERE = Path(__file__).parent
_IS_RULE = re.compile(rb"^ID(: *\w+)? *= *", re.M)
_IMPORTS = re.compile(
    rb"^\s*(?:from rules\.([\w.]+) import|import rules\.([\w.]+))|^\s*from rules import ([\w, ]+)", re.M
)
#: Data files that a rule reads besides its own source: an answer changes with them.
_DATA = {"native_adapter": sorted((HERE.parent / "ddtree" / "native").glob("seams*.json"))}
#: Modules that only ``judge`` and the examples use: what they say can't change what ``extract`` sees in one file.
_NO_FACTS = frozenset(
    {
        "base",
        "tree",
        "slice",
        "slice_roots",
        "following",
        "resolver",
        "acceptance",
        "examples",
        "examples_walks",
        "reach",
        "opaque",
        "deep",
        "conditions",
        "recheck",
    }
)


def rule_files(extra: Sequence[Path] = ()) -> tuple[list[Path], list[Path]]:
    """(built-in rule files, rule files of the user's folders), sorted by name."""
    built_in = [path for path in sorted(HERE.glob("*.py")) if _IS_RULE.search(path.read_bytes())]
    mine: list[Path] = []
    for place in extra:
        found = sorted(place.glob("*.py")) if place.is_dir() else [place]
        mine += [path for path in found if _is_rule(path)]
    return built_in, mine


def _is_rule(path: Path) -> bool:
    """Whether a user's file is a rule and not a helper beside one. Raises ValueError when it does not parse: a question
    that is silently not asked reads like an answer."""
    source = path.read_bytes()
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} does not parse: {error}") from None
    return _IS_RULE.search(source) is not None


def load_rules(extra: Sequence[Path] = ()) -> list[Rule]:
    """Every rule, built-in ones first. Raises ValueError when a rule file lacks a name that rules.base asks for, or
    repeats an ID."""
    built_in, mine = rule_files(extra)
    rules = [_rule(importlib.import_module(f"rules.{path.stem}"), path, "builtin") for path in built_in]
    rules += [_rule(_load(path), path, str(path.parent)) for path in mine]
    seen: dict[str, str] = {}
    for rule in rules:
        if rule.id in seen:
            raise ValueError(f"two rules answer {rule.id!r}: {seen[rule.id]} and {rule.origin}")
        seen[rule.id] = rule.origin
    return rules


def rules_sha256(extra: Sequence[Path] = ()) -> str:
    """Hash of everything that an answer depends on besides the install: all of ``rules``, the model, the user's
    rules."""
    paths: list[Path] = sorted(HERE.rglob("*.py")) + [HERE.parent / "reports" / "model.py"] + rule_files(extra)[1]
    paths += [path for data in _DATA.values() for path in data]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def unit_sha(path: Path) -> str:
    """Hash of one module's source and of the modules of ``rules`` that it imports, however deep (16 hex digits)."""
    digest = hashlib.sha256()
    for part in [*sorted(_closure(path)), *(_DATA.get(path.stem, ()) if path.parent == HERE else ())]:
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _closure(path: Path) -> frozenset[Path]:
    todo, done = [path], set()
    while todo:
        current = todo.pop()
        if current in done:
            continue
        done.add(current)
        for match in _IMPORTS.finditer(current.read_bytes()):
            names = [g.decode() for g in match.groups() if g]
            for name in names[0].replace(" ", "").split(",") if names else []:
                module = HERE.joinpath(*name.split(".")).with_suffix(".py")
                if module.exists() and module.stem not in _NO_FACTS:
                    todo.append(module)
    return frozenset(done)


def _load(path: Path) -> ModuleType:
    name = f"ddaudit_user_rule_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} can't be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _rule(module: ModuleType, path: Path, origin: str) -> Rule:
    missing = [
        name for name in ("ID", "QUESTION", "CHANGES_IF", "VALID", "INVALID", "judge") if not hasattr(module, name)
    ]
    if missing or not module.__doc__:
        raise ValueError(f"{path}: a rule needs {', '.join(missing) or 'a docstring'} (see rules/base.py)")
    return Rule(
        id=module.ID,
        question=module.QUESTION,
        doc=module.__doc__,
        changes_if=module.CHANGES_IF,
        valid=tuple(module.VALID),
        invalid=tuple(module.INVALID),
        judge=module.judge,
        extract=getattr(module, "extract", None),
        needles=_tuple(getattr(module, "NEEDLES", ())),
        paths=_tuple(getattr(module, "PATHS", ())),
        source_sha256=unit_sha(path),
        origin=origin,
        extra={"module": module.__name__, "path": str(path)},
    )


def _tuple(value: Iterable[bytes] | Iterable[str]) -> tuple:  # type: ignore[type-arg]
    return tuple(value)
