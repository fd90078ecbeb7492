"""What is reachable from the samplers that the runners construct: the only code whose acceptance counts.

Roots: the methods of a runner that call a sampler, the classes that it constructs as samplers, what its sampler hook
returns, and
whatever a plugin (or any code that runs) puts in their place. From there calls, references (functions passed by
name), constructed
classes and named modules are followed through files, each edge with the conditions that it stands under."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rules.resolver import Key, Reached, Slice
from rules.slice_roots import RUNNERS, RootFinder

if TYPE_CHECKING:
    from rules.context import ScanContext


def make_slice(ctx: ScanContext) -> Slice:
    walker = Walker(ctx)
    walker.run()
    return walker.slice


def from_drafters(ctx: ScanContext) -> dict[Key, Reached]:
    """What the drafters that the runners construct can reach (classes with a method ``propose``: how runners call
    every drafter)."""
    walker = Walker(ctx)
    starts: list[tuple[Key, Reached]] = []
    for path, runner in RUNNERS.items():
        file = ctx.file(path)
        graph = walker.graph(file) if file is not None else None
        for cls, info in (graph["classes"] if graph is not None else {}).items():
            for attribute, values in info["a"].items():
                for text, _, under in values:
                    for made, name in walker.constructed(path, text):
                        if walker.method(made.path, name, "propose") is not None:
                            off = walker.off((path, f"{cls}.__init__"), under)
                            starts += [
                                (k, Reached(runner, (f"{cls}.{attribute}",), off))
                                for k in walker.all_methods(made.path, name)
                            ]
    for entry in ctx.tree.entry_points:
        target = walker.module(entry.value.partition(":")[0])
        if target is not None:
            where = walker.resolve(target.path, entry.value.partition(":")[2])
            starts += [
                (k, Reached("plugin", (entry.name,)))
                for k in (walker.functions_of(*where) if where is not None and where[1] else [])
            ]
    return walker.follow(starts, hops=5)


class Walker(RootFinder):
    """Follows calls from the roots."""

    def run(self) -> None:
        roots: list[str] = []
        starts: list[tuple[Key, Reached]] = []
        around: list[tuple[Key, Reached]] = []
        for path, runner in RUNNERS.items():
            file = self.ctx.file(path)
            if file is None:
                continue
            graph = self.graph(file)
            if graph is None:
                continue
            for cls, info in graph["classes"].items():
                if f"{cls}.execute_model" not in graph["functions"] and not any("sampler" in a for a in info["a"]):
                    continue
                self._runner(path, cls, runner, starts, around, roots)
        self._replacements(starts, roots)
        self.slice.reached = self.follow(starts)
        self.slice.step = {**self.follow(around, hops=3, narrow=True), **self.slice.reached}
        self.slice.roots = tuple(roots)
        self.slice.resolver = self
