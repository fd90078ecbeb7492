"""Where acceptance starts: samplers that runners construct, what hooks supply, what running code puts there instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rules.following import Follower
from rules.resolver import Key, Reached
from rules.tree import SourceFile

if TYPE_CHECKING:
    from rules.context import ScanContext

#: The files that hold the runners (V1, V2) in every vLLM since 0.19.
RUNNERS = {"vllm/v1/worker/gpu_model_runner.py": "V1", "vllm/v1/worker/gpu/model_runner.py": "V2"}


class RootFinder(Follower):
    """``family``: the classes that runners construct as samplers."""

    def __init__(self, ctx: ScanContext) -> None:
        super().__init__(ctx)
        self.family: set[tuple[str, str]] = set()

    def _runner(
        self,
        path: str,
        cls: str,
        runner: str,
        starts: list[tuple[Key, Reached]],
        around: list[tuple[Key, Reached]],
        roots: list[str],
    ) -> None:
        file = self.ctx.file(path)
        assert file is not None
        graph = self.graph(file)
        attributes = {a for a in graph["classes"][cls]["a"] if "sampler" in a}
        direct: set[str] = set()
        for qual, function in graph["functions"].items():
            if qual.startswith(f"{cls}.") and any(
                c[0].startswith("self.") and c[0].split(".")[1] in attributes for c in function["c"]
            ):
                direct.add(qual)
        for attribute in sorted(attributes):
            for where, text, under in self.attribute(path, cls, attribute):
                line = next((v[1] for v in graph["classes"][cls]["a"].get(attribute, ()) if v[0] == text), 0)
                off = self.off((path, f"{cls}.__init__"), under)
                found = self.constructed(where, text)
                hooks = self._hooks(text, graph, cls)
                if not found and not hooks and text != "None":
                    found = self._chosen_at_run_time(path, cls, graph)
                for made, name in found:
                    self.family.add((made.path, name))
                    roots.append(f"{path}:{line} {name}")
                    for key in self.all_methods(made.path, name):
                        starts.append((key, Reached(runner, (f"{cls}.{attribute}",), off)))
                for hook in hooks:
                    starts += [
                        (key, Reached(runner, (f"{cls}.{attribute} from {hook}",), off)) for key in self._hooked(hook)
                    ]
        samplers = {q for q in direct if not any(part in q for part in ("dummy", "profile", "capture", "warm"))}
        for qual in sorted(direct):
            reached = Reached(runner, (qual,))
            (starts if self._accepts(graph["functions"][qual], attributes) and qual in samplers else around).append(
                ((path, qual), reached)
            )
        for qual, function in graph["functions"].items():
            if qual.startswith(f"{cls}.") and any(
                c[0] == f"self.{q.split('.')[-1]}" for c in function["c"] for q in samplers
            ):
                around.append(((path, qual), Reached(runner, (qual,))))

    @staticmethod
    def _accepts(function: dict[str, Any], attributes: set[str]) -> bool:
        """The method hands logits to a sampler (calls it, not just one of its helpers) and returns what comes back."""
        return any(c[0].removeprefix("self.") in attributes for c in function["c"]) and len(function["c"]) < 60

    def _hooks(self, text: str, graph: dict[str, Any], cls: str) -> list[str]:
        """Method names of hooks that supply a sampler: x.hook(...), directly or through a name assigned just before."""
        names = [text]
        if text.isidentifier():
            names += [
                c[0]
                for f in (v for q, v in graph["functions"].items() if q.startswith(f"{cls}."))
                for c in f["c"]
                if "sampler" in c[0]
            ]
        return sorted(
            {
                n.split("(")[0].rsplit(".", 1)[-1]
                for n in names
                if "sampler" in n.split("(")[0].rsplit(".", 1)[-1] and "custom" in n
            }
        )

    def _hooked(self, hook: str) -> list[Key]:
        """What classes with such a method return: everything that those methods construct."""
        found: list[Key] = []
        for file, facts in self.ctx.facts("shapes"):
            for fact in facts:
                if fact["k"] == "hook" and fact["m"] == hook:
                    found.append((file.path, f"{fact['c']}.{hook}"))
        return found

    def _chosen_at_run_time(self, path: str, cls: str, graph: dict[str, Any]) -> list[tuple[SourceFile, str]]:
        """Classes that can be called, among those that the runner's file names without constructing: a table."""
        found: list[tuple[SourceFile, str]] = []
        near = [f for qual, f in graph["functions"].items() if not qual or qual.startswith(f"{cls}.")]
        for name in {r[0] for function in near for r in function["r"] if not r[0].startswith(("'", "self"))}:
            where = self.resolve(path, name)
            if where is None or not where[1] or not self._is_class(*where):
                continue
            if any(self.method(where[0].path, where[1], verb) for verb in ("__call__", "forward")):
                found.append(where)
        return sorted(found, key=lambda w: (w[0].path, w[1]))

    def _replacements(self, starts: list[tuple[Key, Reached]], roots: list[str]) -> None:
        """Attributes that running code sets on the runner, on a sampler class or on their modules: setattr, a.b = c,
        in plugins first."""
        loaded: dict[Key, Reached] = {}
        entries: list[tuple[Key, Reached]] = []
        for entry in self.ctx.tree.entry_points:
            module, _, name = entry.value.partition(":")
            target = self.module(module)
            if target is None:
                continue
            reached = Reached("plugin", (f"entry point {entry.group}:{entry.name}",))
            entries.append(((target.path, ""), reached))
            where = self.resolve(target.path, name) if name else None
            if where is not None:
                entries += [(key, reached) for key in self.functions_of(*where)]
        for file in self.ctx.tree.files:
            if file.origin.startswith("pythonpath") and file.path in ("sitecustomize.py", "usercustomize.py"):
                entries.append(((file.path, ""), Reached("plugin", (file.path,))))
        loaded = self.follow(entries, imports=True) if entries else {}
        for path, qual in loaded:  # a runner or a sampler of a plugin's own, named where it is entered
            cls = qual.split(".")[0]
            if qual.count(".") == 1 and self._is_kin(path, cls):
                starts.append(((path, qual), Reached("plugin", loaded[path, qual].via, loaded[path, qual].off)))
        inner = self.follow(starts)
        modules = {path for path, _ in inner} | set(RUNNERS)
        for file, facts in self.ctx.facts("shapes"):
            for fact in facts:
                if fact["k"] != "set":
                    continue
                key = (file.path, fact["f"])
                how = loaded.get(key) or inner.get(key)
                if how is None and file.origin == "vllm" and fact["f"] == "" and file.path in modules:
                    how = Reached("V1", (file.path,))
                if how is None:
                    continue
                self._replace(file, fact, how, modules, starts, roots)

    def _replace(
        self,
        file: SourceFile,
        fact: dict[str, Any],
        how: Reached,
        modules: set[str],
        starts: list[tuple[Key, Reached]],
        roots: list[str],
    ) -> None:
        target = self.resolve(file.path, fact["o"])
        if target is None:
            return
        if target[0].path not in modules and not any(self._is_kin(file.path, name) for name in fact["v"]):
            return
        what = f"{fact['o']}.{fact['a']}"
        off = how.off or self.off((file.path, fact["f"]), fact.get("u", []))
        for name in fact["v"]:
            nested = self._local(file.path, fact["f"], name)
            where = nested or self.resolve(file.path, name)
            if where is None or not where[1]:
                continue
            for key in self.functions_of(*where):
                starts.append(
                    (key, Reached("plugin" if file.origin != "vllm" else how.runner, (*how.via, f"sets {what}"), off))
                )
                self.slice.replaced.append((key, what))
            roots.append(f"{file.path}:{fact['l']} {name} in place of {what}")

    def _is_kin(self, path: str, name: str) -> bool:
        """The class is a runner or a sampler that a runner constructs, or inherits from one."""
        return any((f.path in RUNNERS and "Runner" in c) or (f.path, c) in self.family for f, c in self.mro(path, name))
