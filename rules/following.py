"""Calls, references and constructed classes followed from function to function, each with its conditions."""

from __future__ import annotations

from typing import Any

from rules.resolver import Key, Reached, Resolver
from rules.tree import SourceFile

_MAX_HOPS = 9
_MAX_FUNCTIONS = 4000


class Follower(Resolver):
    """What a set of functions can reach."""

    def follow(
        self, starts: list[tuple[Key, Reached]], imports: bool = False, hops: int = _MAX_HOPS, narrow: bool = False
    ) -> dict[Key, Reached]:
        """Breadth first; what can be reached without passing a condition that is off is found before what can't."""
        reached: dict[Key, Reached] = {}
        for off_pass in (False, True):
            todo = [(k, r) for k, r in starts if bool(r.off) == off_pass]
            if off_pass:
                todo += [(k, r) for k, r in self._edges_of(reached, imports, narrow) if r.off and k not in reached]
            while todo and len(reached) < _MAX_FUNCTIONS:
                later: list[tuple[Key, Reached]] = []
                for key, how in todo:
                    if key in reached or how.hops > hops:
                        continue
                    reached[key] = how
                    later += [
                        (k, r)
                        for k, r in self._edges(key, how, imports, narrow)
                        if k not in reached and (off_pass or not r.off)
                    ]
                todo = later
        return reached

    def _edges_of(self, reached: dict[Key, Reached], imports: bool, narrow: bool) -> list[tuple[Key, Reached]]:
        return [edge for key, how in list(reached.items()) for edge in self._edges(key, how, imports, narrow)]

    def _edges(self, key: Key, how: Reached, imports: bool, narrow: bool) -> list[tuple[Key, Reached]]:
        path, qual = key
        file = self.ctx.file(path)
        graph = self.graph(file) if file is not None else None
        if file is None or graph is None or qual not in graph["functions"]:
            return []
        function = graph["functions"][qual]
        for op in function.get("o", ()):
            self.slice.ops.setdefault(op, (key, file.origin == "vllm" and file.stock))
        if function.get("x") and not imports:
            self.slice.executed.setdefault(key, function["x"])
        edges: list[tuple[Key, Reached]] = []
        verbs = {name[2:] for name, _, _ in function["c"] if name.startswith("?.")} | {
            "__init__",
            "__call__",
            "forward",
        }
        calls = len(function["c"])
        for number, (name, _, under) in enumerate([*function["c"], *function["r"]]):
            targets = self._targets(path, qual, name, graph)
            if number >= calls and how.hops > 1 and len(targets) > 1:
                continue  # a class that is only named, far from the sampler: a backend's, a config's
            if narrow and len(targets) > 1:  # a class: around acceptance, only what is called on it here
                if any(q.endswith(".propose") for _, q in targets):
                    continue
                targets = [t for t in targets if t[1].rsplit(".", 1)[-1] in verbs]
            if not targets:
                continue
            off = how.off or self.off(key, under)
            edges += [(t, Reached(how.runner, (*how.via, qual)[-6:], off, how.hops + 1)) for t in targets if t != key]
        if imports and qual == "":
            for origin in graph["imports"].values():
                module = self.absolute(path, origin.partition(":")[0])
                target = self.module(module)
                if target is not None and target.origin != "vllm":
                    edges.append(((target.path, ""), Reached(how.runner, how.via, how.off, how.hops + 1)))
        return edges

    def _targets(self, path: str, qual: str, name: str, graph: dict[str, Any]) -> list[Key]:
        """Functions that a name in this function leads to; each is asked for many times in one scan."""
        key = ("targets", path, qual, name)
        if key not in self.ctx.links:
            self.ctx.links[key] = self._find_targets(path, qual, name, graph)
        found: list[Key] = self.ctx.links[key]
        return found

    def _find_targets(self, path: str, qual: str, name: str, graph: dict[str, Any]) -> list[Key]:
        if name.startswith("'"):
            text = name[1:].replace(":", ".")
            where = (
                self._in_module(text, 4)
                if text.split(".")[0] == "vllm" or self.module(text.rpartition(".")[0])
                else None
            )
            return self.functions_of(*where) if where is not None and where[1] else []
        cls = next((part for part in qual.split(".") if part in graph["classes"]), "")
        parts = name.split(".")
        if len(parts) == 1 and parts[0] in ("self", "cls", "super"):
            return []
        if parts[0] in ("self", "cls") and cls:
            if len(parts) == 2:
                found = self.method(path, cls, parts[1])
                if found is not None:
                    return [found]
            attribute = parts[1]
            if _is_drafter_or_model(attribute):
                return []
            verb = parts[2] if len(parts) == 3 else ""
            targets: list[Key] = []
            for place, text, _ in self.attribute(path, cls, attribute):
                for made, owner in self.constructed(place, text):
                    for one in (verb,) if verb else ("__call__", "forward"):
                        method = self.method(made.path, owner, one)
                        if method is not None:
                            targets.append(method)
                if not verb:
                    resolved = self.resolve(place, text) if text.replace(".", "").isidentifier() else None
                    if resolved is not None and resolved[1]:
                        targets += self.functions_of(*resolved)
            return targets
        if parts[0] == "super" and cls:
            for base in graph["classes"][cls]["b"]:
                found = self.method(path, base, parts[1])
                if found is not None:
                    return [found]
            return []
        if parts[0] == "?":  # a method of something: of a class that this file defines or imports
            found_methods = [
                self.method(path, c, parts[1]) for c in graph["classes"] if f"{c}.{parts[1]}" in graph["functions"]
            ]
            return [m for m in found_methods if m is not None and m != (path, qual)]
        local = self._local(path, qual, parts[0])
        if local is not None and len(parts) == 1:
            return [(local[0].path, local[1])]
        where = self.resolve(path, name)
        return self.functions_of(*where) if where is not None and where[1] else []

    def _local(self, path: str, qual: str, name: str) -> tuple[SourceFile, str] | None:
        file = self.ctx.file(path)
        graph = self.graph(file) if file is not None else None
        while graph is not None and qual:
            if f"{qual}.{name}" in graph["functions"] and file is not None:
                return file, f"{qual}.{name}"
            qual = qual.rpartition(".")[0]
        return None

    def functions_of(self, file: SourceFile, name: str) -> list[Key]:
        graph = self.graph(file)
        if graph is None:
            return []
        if name in graph["classes"]:
            return self.all_methods(file.path, name)
        return [(file.path, name)] if name in graph["functions"] else []

    def all_methods(self, path: str, cls: str) -> list[Key]:
        keys: dict[str, Key] = {}
        for file, owner in self.mro(path, cls):
            for qual in self.graph(file)["functions"]:
                if qual.startswith(f"{owner}.") and qual.count(".") == 1:
                    keys.setdefault(qual.split(".")[1], (file.path, qual))
        return list(keys.values())


def _is_drafter_or_model(attribute: str) -> bool:
    return attribute in ("drafter", "speculator", "model", "_model_forward", "proposer")
