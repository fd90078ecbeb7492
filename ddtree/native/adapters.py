"""Which adapter fits a vLLM install, decided by the shape of its source, never by its version number.

``seams.json`` lists what each adapter stands on: classes, methods with their parameters, attributes, calls in order.
The check reads the files' syntax trees and imports nothing of vLLM, so it works on any unpacked tree; the auditor's
``native-adapter`` rule reads the same file.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SEAMS = Path(__file__).with_name("seams.json")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Adapter:
    """One vLLM line: ``proven`` says that its code was run on a GPU with that very release."""

    line: str
    module: str
    proven: bool
    seams: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Fit:
    """The answer for one install: ``line`` is None where nothing fits, ``missing`` then says what the nearest lacks."""

    version: str
    line: str | None
    module: str | None
    proven: bool
    missing: tuple[str, ...]
    checked: int


def load_adapters(path: Path = SEAMS) -> list[Adapter]:
    """Every adapter of seams.json, in order of preference."""
    data = json.loads(path.read_text())
    return [Adapter(a["line"], a["module"], a["proven"], tuple(a["seams"])) for a in data["adapters"]]


def fit(site: Path, adapters: list[Adapter] | None = None) -> Fit:
    """Check the vLLM under a site-packages folder.

    Raises:
        FileNotFoundError: no vllm folder there.
    """
    if not (site / "vllm").is_dir():
        raise FileNotFoundError(f"no vllm folder in {site}")
    version = installed_version(site)
    best: tuple[str, ...] | None = None
    checked = 0
    for adapter in adapters if adapters is not None else load_adapters():
        missing = tuple(missing_seams(site, adapter))
        checked = len(adapter.seams)
        if not missing:
            proven = adapter.proven and version == adapter.line
            return Fit(version, adapter.line, adapter.module, proven, (), checked)
        if best is None or len(missing) < len(best):
            best = missing
    return Fit(version, None, None, False, best or ("no adapter is known",), checked)


def fit_of_installed() -> Fit:
    """``fit`` for the vLLM that this Python would import."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("vLLM is not installed")
    return fit(Path(next(iter(spec.submodule_search_locations))).parent)


def installed_version(site: Path) -> str:
    """Version from the dist-info beside the package; "unknown" without one."""
    installed = metadata.distributions(path=[str(site)])
    found = [d.version for d in installed if (d.metadata["Name"] or "").lower() == "vllm"]
    return found[0] if found else "unknown"


def missing_seams(site: Path, adapter: Adapter) -> Iterator[str]:
    """What is not as the adapter needs it, one sentence each."""
    trees: dict[str, ast.Module | None] = {}
    for seam in adapter.seams:
        name = seam["file"]
        if name not in trees:
            try:
                trees[name] = ast.parse((site / name).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                trees[name] = None
        tree = trees[name]
        problem = f"{name} is missing or unreadable" if tree is None else problem_of(tree, seam)
        if problem:
            yield problem


def problem_of(tree: ast.Module, seam: dict[str, Any]) -> str | None:
    """Why a seam does not hold in a file, or None."""
    file, kind, qualname = seam["file"], seam["kind"], seam["qualname"]
    where = f"{file}: {qualname}"
    if kind == "attribute":
        owner, _, name = qualname.rpartition(".")
        holder = lookup(tree, owner) if owner else tree
        return None if holder is not None and name in names_of(holder) else f"{where} is gone"
    node = lookup(tree, qualname)
    if node is None:
        return f"{where} is gone"
    if kind == "class":
        bases = [ast.unparse(b).split(".")[-1] for b in node.bases] if isinstance(node, ast.ClassDef) else None
        if bases is None:
            return f"{where} is no class"
        lost = [b for b in seam.get("bases", []) if b not in bases]
        return f"{where} no longer derives from {', '.join(lost)}" if lost else None
    if not isinstance(node, FunctionNode):
        return f"{where} is no function"
    if kind == "call":
        return call_problem(node, seam["calls"], where)
    wanted, found = seam.get("params"), parameters(node)
    if wanted is not None and found != wanted:
        return f"{where} takes ({', '.join(found)}), not ({', '.join(wanted)})"
    return None


def lookup(tree: ast.AST, qualname: str) -> ast.ClassDef | FunctionNode | None:
    """The class or function of that dotted name; definitions under module-level ``if`` and ``try`` count."""
    scope: ast.AST = tree
    for part in qualname.split("."):
        found = next((n for n in definitions(scope) if n.name == part), None)
        if found is None:
            return None
        scope = found
    return scope if isinstance(scope, ast.ClassDef | FunctionNode) else None


def definitions(scope: ast.AST) -> Iterator[ast.ClassDef | FunctionNode]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | FunctionNode):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions(node)


def names_of(scope: ast.AST) -> set[str]:
    """Names that a module or class binds: assignments, annotations, definitions, imports, and ``self.x`` of a class."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            if isinstance(node.ctx, ast.Store):
                names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((a.asname or a.name).split(".")[0] for a in node.names)
    body = scope.body if isinstance(scope, ast.ClassDef | ast.Module) else []
    for statement in body:
        if isinstance(statement, ast.Assign):
            names.update(t.id for t in statement.targets if isinstance(t, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.ClassDef | FunctionNode):
            names.add(statement.name)
    return names


def parameters(node: FunctionNode) -> list[str]:
    """Parameter names in order, with ``*`` before keyword-only ones."""
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg:
        names.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        names.append("*")
    names += [p.arg for p in a.kwonlyargs]
    return [*names, "**" + a.kwarg.arg] if a.kwarg else names


def call_problem(node: FunctionNode, wanted: list[str], where: str) -> str | None:
    """Whether the function calls those names, first calls in that order (source order; nested functions included)."""
    first: dict[str, tuple[int, int]] = {}
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
            at = (call.lineno, call.col_offset)
            if name is not None and (name not in first or at < first[name]):
                first[name] = at
    if lost := [n for n in wanted if n not in first]:
        return f"{where} no longer calls {', '.join(lost)}"
    order = sorted(wanted, key=lambda n: first[n])
    return None if order == wanted else f"{where} calls in another order: {', '.join(order)}"
