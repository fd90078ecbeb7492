"""What is reachable from the samplers that the runners construct: the only code whose acceptance counts.

Roots: the methods of a runner that call a sampler, the classes that it constructs as samplers, what its sampler hook
returns, and
whatever a plugin (or any code that runs) puts in their place. From there calls, references (functions passed by
name), constructed
classes and named modules are followed through files, each edge with the conditions that it stands under."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rules.conditions import switched_off
from rules.tree import SourceFile

if TYPE_CHECKING:
    from rules.context import ScanContext

#: The files that hold the runners (V1, V2) in every vLLM since 0.19.
RUNNERS = {"vllm/v1/worker/gpu_model_runner.py": "V1", "vllm/v1/worker/gpu/model_runner.py": "V2"}
_MAX_HOPS = 9
_MAX_FUNCTIONS = 4000
Key = tuple[str, str]  # (path, qualified name)


@dataclass(frozen=True)
class Reached:
    """How a function is reached. ``off``: the condition that stands in the way as shipped ("" when none does)."""

    runner: str
    via: tuple[str, ...]
    off: str = ""
    hops: int = 0


@dataclass
class Slice:
    """``reached`` are functions that acceptance can pass through; ``step`` also those that a step of the runner
    calls around it (not
    through a drafter or a model)."""

    roots: tuple[str, ...] = ()
    reached: dict[Key, Reached] = field(default_factory=dict)
    step: dict[Key, Reached] = field(default_factory=dict)
    ops: dict[str, tuple[Key, bool]] = field(default_factory=dict)  # op -> (who calls it, whether that file is stock)
    executed: dict[Key, list[int]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)  # files in the way that could not be read or parsed
    not_examined: tuple[str, ...] = ()
    resolver: Resolver | None = None
    across: dict[Key, list[Any]] = field(default_factory=dict)  # walks that show only with another file's functions
    replaced: list[tuple[Key, str]] = field(
        default_factory=list
    )  # what plugins put in place: (function, what it replaces)


def make_slice(ctx: ScanContext) -> Slice:
    walker = _Walker(ctx)
    walker.run()
    return walker.slice


def from_drafters(ctx: ScanContext) -> dict[Key, Reached]:
    """What the drafters that the runners construct can reach (classes with a method ``propose``: how runners call
    every drafter)."""
    walker = _Walker(ctx)
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


class Resolver:
    """Names to places: modules, re-exports, classes and what they inherit, attributes, conditions."""

    def __init__(self, ctx: ScanContext) -> None:
        self.ctx = ctx
        self.slice = Slice()
        self._module_of: dict[str, SourceFile | None] = {}
        self._consts: dict[tuple[str, str], str | None] = {}

    # ---- names to files

    def module(self, name: str) -> SourceFile | None:
        if name not in self._module_of:
            base = name.replace(".", "/")
            self._module_of[name] = self.ctx.file(f"{base}.py") or self.ctx.file(f"{base}/__init__.py")
        return self._module_of[name]

    def absolute(self, path: str, module: str) -> str:
        """A module name as an import in ``path`` means it (leading dots are relative)."""
        level = len(module) - len(module.lstrip("."))
        if not level:
            return module
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        if not path.endswith("__init__.py"):
            level += 0
            parts = parts[: len(parts) - level]
        else:
            parts = parts[: len(parts) - level + 1]
        rest = module.lstrip(".")
        return ".".join([*parts, *([rest] if rest else [])])

    def resolve(self, path: str, name: str, hops: int = 6) -> tuple[SourceFile, str] | None:
        """Where a (dotted) name of a file is defined: (file, name in it), name "" for a module. Follows re-exports."""
        file = self.ctx.file(path)
        graph = self.graph(file) if file is not None else None
        if file is None or graph is None or hops == 0:
            return None
        first, _, rest = name.partition(".")
        if first in graph["classes"] or first in graph["functions"]:
            return file, name
        origin = graph["imports"].get(first)
        if origin is None:
            return None
        module, _, attribute = origin.partition(":")
        module = self.absolute(path, module)
        if not attribute:  # import a.b [as c]
            full = f"{module}.{rest}" if rest else module
            return self._in_module(full, hops)
        found = self.module(f"{module}.{attribute}")
        if found is not None:
            return self.resolve(found.path, rest, hops - 1) if rest else (found, "")
        target = self.module(module)
        if target is None:
            return None
        return self.resolve(target.path, f"{attribute}.{rest}" if rest else attribute, hops - 1)

    def _in_module(self, full: str, hops: int) -> tuple[SourceFile, str] | None:
        parts = full.split(".")
        for cut in range(len(parts), 0, -1):
            target = self.module(".".join(parts[:cut]))
            if target is not None:
                rest = ".".join(parts[cut:])
                return self.resolve(target.path, rest, hops - 1) if rest else (target, "")
        return None

    def graph(self, file: SourceFile) -> Any:
        graph = self.ctx.graph(file)
        if graph is None:
            self.slice.unread.add(file.path)
        return graph

    # ---- classes

    def mro(self, path: str, name: str, hops: int = 6) -> list[tuple[SourceFile, str]]:
        found = self.resolve(path, name)
        if found is None or hops == 0:
            return []
        file, cls = found
        graph = self.graph(file)
        if graph is None or cls not in graph["classes"]:
            return []
        order = [(file, cls)]
        for base in graph["classes"][cls]["b"]:
            order += [c for c in self.mro(file.path, base, hops - 1) if c not in order]
        return order

    def method(self, path: str, cls: str, name: str) -> Key | None:
        for file, owner in self.mro(path, cls):
            if f"{owner}.{name}" in self.graph(file)["functions"]:
                return file.path, f"{owner}.{name}"
        return None

    def attribute(self, path: str, cls: str, name: str) -> list[tuple[str, str, list[str]]]:
        """(file, source text, conditions) of what a class binds self.<name> to."""
        found: list[tuple[str, str, list[str]]] = []
        for file, owner in self.mro(path, cls):
            for text, _, under in self.graph(file)["classes"][owner]["a"].get(name, ()):
                found.append((file.path, text, under))
        return found

    def constructed(self, path: str, text: str) -> list[tuple[SourceFile, str]]:
        """Classes that an expression constructs or names."""
        try:
            nodes = list(ast.walk(ast.parse(text, mode="eval")))
        except SyntaxError:
            return []
        found: list[tuple[SourceFile, str]] = []
        for node in nodes:
            target = node.func if isinstance(node, ast.Call) else node
            name = _dotted(target)
            if name and not name.startswith("self."):
                where = self.resolve(path, name)
                if where is not None and where[1] and self._is_class(*where) and where not in found:
                    found.append(where)
        return found

    def _is_class(self, file: SourceFile, name: str) -> bool:
        graph = self.graph(file)
        return graph is not None and name in graph["classes"]

    # ---- conditions

    def off(self, key: Key, conditions: list[str]) -> str:
        if not conditions:
            return ""
        path, qual = key
        return switched_off(conditions, lambda name: self._bound(path, qual, name), self.ctx.tree.environment)

    def _bound(self, path: str, qual: str, name: str) -> str | None:
        """The source text that a name in a function is bound to, when it is bound once."""
        file = self.ctx.file(path)
        graph = self.ctx.graph(file) if file is not None else None
        if graph is None:
            return None
        if name.startswith("self.") and name.count(".") == 1:
            cls = qual.split(".")[0]
            values = self.attribute(path, cls, name[5:]) if cls in graph["classes"] else []
            return values[0][1] if len(values) == 1 else None
        first, _, rest = name.partition(".")
        if not rest and name in graph["consts"]:
            return str(graph["consts"][name])
        where = self.resolve(path, first) if first in graph["imports"] else None
        if where is not None and where[1] == "" and rest:
            inner = self.ctx.graph(where[0])
            if inner is not None:
                for key in (rest, f"environment_variables[{rest}]"):
                    if key in inner["consts"]:
                        return str(inner["consts"][key])
            return None
        origin = graph["imports"].get(first, "")
        module, _, attribute = origin.partition(":")
        target = self.module(self.absolute(path, module)) if attribute else None
        inner = self.ctx.graph(target) if target is not None else None
        return (
            str(inner["consts"][attribute]) if inner is not None and attribute in inner["consts"] and not rest else None
        )


class _Walker(Resolver):
    """Follows calls from the roots. ``family``: the classes that runners construct as samplers."""

    def __init__(self, ctx: ScanContext) -> None:
        super().__init__(ctx)
        self.family: set[tuple[str, str]] = set()

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

    def all_methods(self, path: str, cls: str) -> list[Key]:
        keys: dict[str, Key] = {}
        for file, owner in self.mro(path, cls):
            for qual in self.graph(file)["functions"]:
                if qual.startswith(f"{owner}.") and qual.count(".") == 1:
                    keys.setdefault(qual.split(".")[1], (file.path, qual))
        return list(keys.values())

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


def _is_drafter_or_model(attribute: str) -> bool:
    return attribute in ("drafter", "speculator", "model", "_model_forward", "proposer")


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
