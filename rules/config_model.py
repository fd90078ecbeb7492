"""What an install's configuration code says, as things that rules.interpret can ask: facts from the files, then the
objects.

``config_facts`` keeps, per file, the text of the small functions that decide something (which runner, which
speculative method), the constants they read, the defaults of configuration fields and of environment variables.
``Configuration`` builds from them the ``VllmConfig`` of one concrete deployment, so that the code's own conditions
can be evaluated on it.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rules.base import Fact
from rules.interpret import Interpreter, Thing
from rules.parts import tree_of
from rules.tree import SourceFile

_LONGEST = 130  # lines: a function that decides one thing is shorter; __post_init__ isn't


def config_facts(source: bytes, wanted: Callable[[str, str], bool]) -> list[Fact]:
    """Functions of classes (and of the module) for which ``wanted(name, text)``, and every function, constant and
    module-level name that they mention and that this file defines."""
    text = source.decode("utf-8", "replace").replace("\r\n", "\n")
    lines = text.split("\n")
    tree = tree_of(source)
    functions: dict[tuple[str, str], ast.FunctionDef] = {}
    constants: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions["", node.name] = node
        elif isinstance(node, ast.ClassDef):
            functions.update({(node.name, n.name): n for n in node.body if isinstance(n, ast.FunctionDef)})
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    constants[target.id] = node

    def body(node: ast.stmt, first: int) -> str:
        return "\n".join(lines[first - 1 : node.end_lineno or first])

    kept: dict[tuple[str, str], str] = {}
    todo = [key for key, node in functions.items() if _short(node) and wanted(key[1], body(node, node.lineno))]
    named: set[str] = set()
    while todo:
        key = todo.pop()
        if key in kept:
            continue
        node = functions[key]
        kept[key] = body(node, _first(node))
        mentioned = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} | {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name)
        }
        named |= mentioned
        todo += [k for k in ((key[0], name) for name in mentioned) if k in functions and _short(functions[k])]
        todo += [k for k in (("", name) for name in mentioned) if k in functions and _short(functions[k])]
    found: list[Fact] = [
        {"kind": "function", "owner": owner, "name": name, "line": _first(functions[owner, name]), "text": text}
        for (owner, name), text in sorted(kept.items())
    ]
    for name in sorted(named & set(constants)):
        node = constants[name]
        found.append({"kind": "constant", "name": name, "line": node.lineno, "text": body(node, node.lineno)})
    return found


def default_facts(source: bytes, owners: frozenset[str]) -> list[Fact]:
    """Constant defaults of the annotated fields of some classes: {"kind": "defaults", "owner", "fields"}.
    ``Field(default=X)`` is X."""
    found = []
    for node in tree_of(source).body:
        if isinstance(node, ast.ClassDef) and node.name in owners:
            fields = {}
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
                    value: ast.expr | None = item.value
                    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Field"):
                        value = next((k.value for k in value.keywords if k.arg == "default"), None)
                    if isinstance(value, ast.Constant) and (
                        value.value is None or isinstance(value.value, (bool, int, str))
                    ):
                        fields[item.target.id] = value.value
            if fields:
                found.append({"kind": "defaults", "owner": node.name, "fields": fields})
    return found


def environment_facts(source: bytes, variable: str) -> list[Fact]:
    """The entry of ``variable`` in a table of environment variables: {"kind": "env", "line", "text"} with the
    lambda's text."""
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == variable and isinstance(value, ast.Lambda):
                    found.append(
                        {
                            "kind": "env",
                            "name": variable,
                            "line": key.lineno,
                            "end_line": value.end_lineno,
                            "text": ast.unparse(value.body),
                        }
                    )
    return found


def _short(node: ast.FunctionDef) -> bool:
    return (node.end_lineno or node.lineno) - node.lineno < _LONGEST


def _first(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


class Configuration:
    """The configuration of one deployment. ``facts`` are those of the functions above with their files; ``where``
    finds a line's file."""

    def __init__(self, facts: list[tuple[SourceFile, list[Fact]]]) -> None:
        self.functions: dict[str, dict[str, ast.FunctionDef]] = {}
        self.constants: dict[str, Any] = {}
        self.defaults: dict[str, dict[str, Any]] = {}
        self.files: dict[str, SourceFile] = {}  # "Owner.name" -> the file that defines it
        self.environment: list[tuple[SourceFile, Fact]] = []
        constants: list[Fact] = []
        for file, of_file in facts:
            for fact in of_file:
                if fact["kind"] == "function":
                    self.functions.setdefault(fact["owner"], {}).setdefault(fact["name"], _parsed(fact))
                    self.files.setdefault(f"{fact['owner']}.{fact['name']}", file)
                elif fact["kind"] == "constant":
                    constants.append(fact)
                elif fact["kind"] == "defaults":
                    self.defaults.setdefault(fact["owner"], {}).update(fact["fields"])
                elif fact["kind"] == "env":
                    self.environment.append((file, fact))
        plain = Interpreter({})
        for fact in constants:
            node = ast.parse(fact["text"].strip()).body[0]
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                self.constants.setdefault(fact["name"], plain.expression(ast.unparse(node.value)))

    def thing(self, owner: str, /, **values: Any) -> Thing:
        """An object of the class ``owner`` with its own defaults, its functions, and these values on top."""
        return Thing(owner, {**self.defaults.get(owner, {}), **values}, self.functions.get(owner, {}))

    def interpreter(self, names: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Interpreter:
        """Over this install's module-level functions and constants and ``names``."""
        env = environment or {}
        return Interpreter(
            {**self.functions.get("", {}), **self.constants, **names}, lambda name, default: env.get(name, default)
        )


def _parsed(fact: Fact) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(_indented(fact["text"]))).body[0]
    assert isinstance(node, ast.FunctionDef)
    ast.increment_lineno(node, fact["line"] - 1)
    return node


def _indented(text: str) -> str:
    """Text of a method in a shape that ``ast`` takes even when a string in it begins at column 0."""
    lines = text.split("\n")
    width = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[width:] if line[:width].strip() == "" else line for line in lines)
