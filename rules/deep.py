"""Accept loops whose step is a function of another file: the loop is read again, with that file's function in its
place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rules.base import Fact
from rules.facts.flow import Flow
from rules.facts.module import Function, Module, read_module
from rules.facts.shapes import as_fact
from rules.facts.walks import judge
from rules.tree import SourceFile

if TYPE_CHECKING:
    from rules.context import ScanContext
    from rules.resolver import Resolver


def across_files(ctx: ScanContext, resolver: Resolver, file: SourceFile, qual: str) -> list[Fact]:
    """The walks of one function, helpers of other files included; [] when a file can't be read."""
    modules: dict[str, Module | None] = {}

    def module(of: SourceFile) -> Module | None:
        if of.path not in modules:
            try:
                modules[of.path] = read_module.__wrapped__(ctx.tree.read(of.sha256))
                modules[of.path].path = of.path  # type: ignore[union-attr]
            except (OSError, SyntaxError, ValueError, RecursionError):
                modules[of.path] = None
        return modules[of.path]

    def resolve(asking: Module, name: str) -> tuple[Module, Function] | None:
        where = resolver.resolve(asking.path, name)
        inside = module(where[0]) if where is not None and where[1] else None
        if where is None or inside is None:
            return None
        function = next((f for f in inside.functions if f.qual == where[1]), None)
        return (inside, function) if function is not None else None

    own = module(file)
    function = next((f for f in own.functions if f.qual == qual), None) if own is not None else None
    if own is None or function is None:
        return []
    return [as_fact(function, walk) for walk in judge(Flow(own, function, resolve=resolve)) if walk.shape != "chain"]
