"""Our plugin hangs a tree into vLLM at named places (seams): classes, methods with these parameters, attributes,
calls in this order. An adapter fits an install when each of its seams is there, whatever the version says. The list
is a data file that the plugin and this rule both read (``ddtree/native/seams.json``); nothing of the plugin or of
vLLM is imported.

``items`` has one entry an adapter: whether it fits, which seams are missing, and whether its code has been proven on
a GPU with that very release. An adapter that fits and is not proven is still a ``yes``: try it on one prompt, compare
greedy output, then measure.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from reports.model import Outcome, Verdict
from rules.base import Context, Example, Fact
from rules.doubt import unless_unread
from rules.recheck import Recheck

ID = "native-adapter"
QUESTION = "Does an adapter of the native plugin fit this install?"
CHANGES_IF = (
    "a seam that is missing comes back, one that is there changes, or an adapter for this shape of vLLM is added"
)
_FOLDER = Path(__file__).parent.parent / "ddtree" / "native"
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_SHOWN = 12
_SCRIPT = """import ast, sys
for file, name in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        node = ast.parse(open(file, encoding="utf-8").read())
    except OSError:
        node = None
    for part in name.split("."):
        node = next((n for n in ast.walk(node) if getattr(n, "name", None) == part), None) if node else None
    shown = node and [a.arg for a in node.args.posonlyargs + node.args.args] if hasattr(node, "args") else bool(node)
    print(file, name, ", ".join(shown) if isinstance(shown, list) else "there" if shown else "gone")
"""


@lru_cache(maxsize=1)
def seams() -> tuple[str, tuple[dict[str, Any], ...]]:
    """(digest of the data files, adapters) as the plugin states them; ("", ()) where the plugin isn't shipped."""
    adapters: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("seams*.json")):
        data = path.read_bytes()
        digest.update(data)
        adapters += json.loads(data)["adapters"]
    return (digest.hexdigest()[:16] if adapters else "", tuple(adapters))


PATHS = tuple(sorted({seam["file"] for adapter in seams()[1] for seam in adapter["seams"]})) or ("vllm/none",)


def extract(path: str, source: bytes) -> list[Fact]:
    """How every seam in this file stands: {"adapter", "index", "line", "problem"}; with the digest of the list it was
    asked for."""
    digest, adapters = seams()
    tree = ast.parse(source)
    found: list[Fact] = [{"kind": "asked", "seams": digest, "path": path}]
    cache: dict[str, tuple[str, int]] = {}
    for number, adapter in enumerate(adapters):
        for index, seam in enumerate(adapter["seams"]):
            if seam["file"] == path:
                key = json.dumps(seam, sort_keys=True)
                if key not in cache:
                    cache[key] = _stands(tree, seam)
                problem, line = cache[key]
                fact = {"kind": "seam", "adapter": number, "index": index, "line": line, "problem": problem}
                if seam["kind"] in ("method", "function", "class"):
                    fact["prints"] = _prints(_lookup(tree, seam["qualname"]))
                found.append(fact)
    return found


def _stands(tree: ast.Module, seam: dict[str, Any]) -> tuple[str, int]:
    """(what is wrong with a seam or "", its line)."""
    kind, name = seam["kind"], seam["qualname"]
    if kind == "attribute":
        owner, _, attribute = name.rpartition(".")
        holder = _lookup(tree, owner) if owner else tree
        there = holder is not None and attribute in _bound(holder)
        return ("" if there else f"{name} is gone"), getattr(holder, "lineno", 1) if holder is not None else 0
    node = _lookup(tree, name)
    if node is None:
        return f"{name} is gone", 0
    if kind == "class":
        bases = [ast.unparse(b).split(".")[-1] for b in node.bases] if isinstance(node, ast.ClassDef) else None
        if bases is None:
            return f"{name} is no class", node.lineno
        lost = [base for base in seam.get("bases", []) if base not in bases]
        return (f"{name} no longer derives from {', '.join(lost)}" if lost else ""), node.lineno
    if not isinstance(node, _Function):
        return f"{name} is no function", node.lineno
    if kind == "call":
        return _order(node, seam["calls"], name), node.lineno
    wanted, got = seam.get("params"), _parameters(node)
    if wanted is None or got == wanted:
        return "", node.lineno
    return f"{name} takes ({', '.join(got)}), not ({', '.join(wanted)})", node.lineno


def _lookup(tree: ast.AST, name: str) -> Any:
    scope = tree
    for part in name.split("."):
        found = next((n for n in _defined(scope) if n.name == part), None)
        if found is None:
            return None
        scope = found
    return scope


def _defined(scope: ast.AST) -> Iterator[Any]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.ClassDef, *_Function)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _defined(node)


def _bound(scope: ast.AST) -> set[str]:
    """Names that a class or module binds, ``self.x`` of its methods included."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((a.asname or a.name).split(".")[0] for a in node.names)
    for statement in getattr(scope, "body", []):
        if isinstance(statement, ast.Assign):
            names.update(t.id for t in statement.targets if isinstance(t, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, (ast.ClassDef, *_Function)):
            names.add(statement.name)
    return names


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg:
        names.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        names.append("*")
    names += [p.arg for p in a.kwonlyargs]
    return [*names, "**" + a.kwarg.arg] if a.kwarg else names


def _order(node: ast.AST, wanted: list[str], name: str) -> str:
    """Whether the first calls of these names come in this order."""
    first: dict[str, tuple[int, int]] = {}
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
            at = (call.lineno, call.col_offset)
            if callee is not None and at < first.get(callee, (1 << 60, 0)):
                first[callee] = at
    lost = [n for n in wanted if n not in first]
    if lost:
        return f"{name} no longer calls {', '.join(lost)}"
    order = sorted(wanted, key=lambda n: first[n])
    return "" if order == wanted else f"{name} calls in another order: {', '.join(order)}"


@unless_unread(paths=PATHS)
def judge(ctx: Context) -> Verdict:
    digest, adapters = seams()
    if not adapters:
        return Verdict(
            ID,
            "unknown",
            "the plugin's list of seams is not there",
            "low",
            scope=ctx.scope(),
            changes_if=CHANGES_IF,
            question=QUESTION,
        )
    known: dict[tuple[int, int], Fact] = {}
    read: set[str] = set()
    for file, facts in ctx.facts(ID):
        # Facts are cached by the file's own hash: made for another list of seams, or found under another path, they
        # are made again.
        if not (facts[0]["seams"] == digest and facts[0]["path"] == file.path):
            facts = extract(file.path, ctx.tree.read(file.sha256))
        read.add(file.path)
        known.update({(f["adapter"], f["index"]): f for f in facts if f["kind"] == "seam"})
    items, failed = [], {f.file for f in ctx.scope().files_failed}
    for number, adapter in enumerate(adapters):
        missing = []
        for index, seam in enumerate(adapter["seams"]):
            fact = known.get((number, index))
            problem = (
                fact["problem"]
                if fact is not None
                else "the file is missing or unreadable"
                if seam["file"] not in read
                else "not looked at"
            )
            if problem:
                missing.append(f"{seam['file']}: {problem}")
        proven = bool(adapter["proven"]) and adapter["line"] == ctx.tree.vllm_version
        items.append(
            {
                "adapter": adapter["line"],
                "module": adapter["module"],
                "fits": not missing,
                "proven": proven and not missing,
                "seams": len(adapter["seams"]),
                "missing": missing,
                "unread": sorted({s["file"] for s in adapter["seams"]} & failed),
            }
        )
    best = min(range(len(items)), key=lambda n: (not items[n]["fits"], len(items[n]["missing"])))
    chosen = items[best]
    evidence, shown = [], []
    for index, seam in enumerate(adapters[best]["seams"]):
        fact = known.get((best, index))
        there = ctx.file(seam["file"])
        wrong = fact is None or bool(fact["problem"])
        if seam["kind"] in ("method", "function", "class") and (wrong or chosen["fits"]):
            shown.append((seam["file"], seam["qualname"], fact.get("prints", "gone") if fact is not None else "gone"))
        if (
            there is not None
            and fact is not None
            and fact["line"]
            and (wrong or (chosen["fits"] and seam["kind"] == "class"))
        ):
            evidence.append(ctx.evidence(there, fact["line"], fact["line"], seam["qualname"]))
    check = Recheck(ctx)
    if shown:
        words = [word for path, name, _ in shown[:_SHOWN] for word in (path, name)]
        check.python(_SCRIPT, *words, prints="".join(f"{path} {name} {said}\n" for path, name, said in shown[:_SHOWN]))
    elif chosen["missing"]:
        check.shell(f"ls {' '.join(sorted({m.split(':')[0] for m in chosen['missing']}))} 2>/dev/null || :")
    if chosen["fits"]:
        how = "proven on a GPU with this release" if chosen["proven"] else "not yet proven on a GPU with this release"
        outcome: Outcome = "yes"
        summary = f"the adapter for {chosen['adapter']} fits, all {chosen['seams']} seams are there; {how}"
    else:
        outcome = "unknown" if chosen["unread"] else "no"
        lost: list[str] = chosen["missing"]
        summary = (
            f"no adapter fits; the nearest, for {chosen['adapter']}, lacks "
            f"{len(lost)} of {chosen['seams']} seams: {'; '.join(lost[:3])}"
        )
        summary += f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return Verdict(
        ID,
        outcome,
        summary,
        evidence=tuple(evidence[:20]),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=tuple(items),
        **check.done(),
    )


def _prints(node: Any) -> str:
    """What ``_SCRIPT`` prints of a definition."""
    if isinstance(node, _Function):
        return ", ".join(a.arg for a in node.args.posonlyargs + node.args.args)
    return "there" if node is not None else "gone"


def _miniature(change: tuple[str, str] = ("", ""), leave_out: str = "") -> dict[str, str]:
    """The least install that the first adapter's seams fit: made from the list itself, so that it can't fall behind."""
    adapters = seams()[1]
    files: dict[str, dict[str, list[str]]] = {}
    bases: dict[tuple[str, str], list[str]] = {}
    for seam in adapters[0]["seams"] if adapters else ():
        owner, _, name = seam["qualname"].rpartition(".")
        classes = files.setdefault(seam["file"], {})
        if seam["kind"] == "class":
            classes.setdefault(seam["qualname"], [])
            bases[seam["file"], seam["qualname"]] = seam.get("bases", [])
        elif seam["kind"] == "attribute":
            classes.setdefault(owner, []).append(f"{name} = None")
        else:
            wanted = seam.get("params") or (["self"] if owner else [])
            calls = "; ".join(f"{call}()" for call in seam.get("calls", ())) or "..."
            classes.setdefault(owner, []).append(f"def {name}({', '.join(wanted)}): {calls}")
    found = {}
    for path, classes in files.items():
        text = ""
        for owner, body in classes.items():
            body = _merged(body)
            if owner:
                text += f"class {owner}({', '.join(bases.get((path, owner), []))}):\n" + "".join(
                    f"    {line}\n" for line in body or ["..."]
                )
            else:
                text += "".join(f"{line}\n" for line in body)
        found[path] = text.replace(*change) if change[0] else text
    return {path: text for path, text in found.items() if path != leave_out}


def _merged(body: list[str]) -> list[str]:
    """One definition a name: parameters from the seam that gives them, calls from the one that lists them."""
    merged: dict[str, str] = {}
    for line in body:
        name = line.split("(")[0]
        before = merged.get(name)
        if before is None or not line.startswith("def "):
            merged[name] = line
            continue
        head = before if len(before.split("):")[0]) > len(line.split("):")[0]) else line
        calls = [x.split("): ", 1)[1] for x in (before, line) if not x.endswith("...")]
        merged[name] = head.split("): ", 1)[0] + "): " + ("; ".join(calls) or "...")
    return list(merged.values())


def _one_of(kind: str) -> dict[str, Any]:
    return next(
        (s for a in seams()[1][:1] for s in a["seams"] if s["kind"] == kind and "." in s["qualname"]),
        {"qualname": "a.b", "file": "vllm/a.py"},
    )


_METHOD, _ATTRIBUTE = _one_of("method"), _one_of("attribute")
VALID = (
    Example("every seam is there", _miniature(), "yes"),
    Example("and more besides", {**_miniature(), "vllm/extra.py": "x = 1\n"}, "yes"),
    Example("comments between", {path: f"# hello\n{text}" for path, text in _miniature().items()}, "yes"),
)
INVALID = (
    Example("an empty install", {"vllm/__init__.py": ""}, "no"),
    Example("a file is missing", _miniature(leave_out=_METHOD["file"]), "no"),
    Example(
        "a method has another name", _miniature((f"def {_METHOD['qualname'].split('.')[-1]}(", "def renamed(")), "no"
    ),
    Example(
        "a method takes one more parameter",
        _miniature(
            (f"def {_METHOD['qualname'].split('.')[-1]}(self", f"def {_METHOD['qualname'].split('.')[-1]}(self, extra")
        ),
        "no",
    ),
    Example(
        "an attribute is gone",
        _miniature((f"{_ATTRIBUTE['qualname'].split('.')[-1]} = None", "unrelated = None")),
        "no",
    ),
)
