#!/usr/bin/env python3
"""Prompts for a code-writing target, made from what packages ship: signatures and docstrings of Python sources.

    make_prompts.py OUT.jsonl LICENCE:NAME:PATH ...      PATH is a folder of sources or a wheel

Each function with a usable docstring gives one prompt, in one of several wordings (chosen by a hash of its text). JSON
files of other prompts can go straight to ``curate``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

SECTION = re.compile(
    r"\n\s*(?:Parameters|Returns|Notes|See Also|References|Examples|Raises|Yields|Attributes|Args|Arguments)\s*:?\s*\n"
)
MARKUP = re.compile(r":(?:class|func|meth|mod|attr|ref|data|exc|obj|math|term|doc|py:\w+):`~?([^`]*)`")
ROLE = re.compile(r"^\s*(?:\.\. |:param|:return|:type|:raise|@)", re.M)


def sources(path: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every Python file below a folder or in a wheel."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") and "/tests/" not in name:
                    yield name, wheel.read(name).decode("utf-8", "replace")
        return
    for file in sorted(path.rglob("*.py")):
        if not {"test", "tests", "idlelib", "site-packages", "lib2to3"} & set(file.parts):
            yield str(file.relative_to(path)), file.read_text("utf-8", "replace")


def summary(doc: str) -> str:
    """The description and up to two examples; sections and markup left out."""
    text = SECTION.split(doc, maxsplit=1)[0]
    cut = ROLE.search(text)
    text = MARKUP.sub(r"\1", text[: cut.start()] if cut else text).replace("``", "").strip()
    if len(text) > 500:
        text = text[:500].rsplit("\n\n", 1)[0] if "\n\n" in text[:500] else text[:500].rsplit(". ", 1)[0] + "."
    examples = re.findall(r"^\s*>>> .+\n(?!\s*>>>)\s*\S.*", doc, re.M)[:3]
    if examples and ">>>" not in text:
        text += "\n\n" + "\n".join(line.strip() for e in examples for line in e.splitlines())
    return text[:900]


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions and methods with their docstrings; dunders and one-word docstrings are no tasks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 30:
                yield node, doc


def signature(node: ast.FunctionDef) -> str:
    """``name(a, b=1) -> int``, without self."""
    arguments = node.args
    for group in (arguments.posonlyargs, arguments.args):
        if group and group[0].arg in ("self", "cls"):
            del group[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name.lstrip('_')}({ast.unparse(arguments)}){returns}"


def wordings(node: ast.FunctionDef, doc: str, pick: int) -> str:
    """One of the ways people ask for a function."""
    head, text = signature(node), summary(doc)
    indented = text.replace("\n", "\n    ")
    stub = f'def {head}:\n    """{indented}\n    """\n'
    first = text.split("\n\n")[0].replace("\n", " ").strip()
    kind = pick % 10
    if kind < 5:  # a bare stub, as completion benchmarks and editors ask
        imports = "from typing import List\n\n\n" if pick % 3 == 0 else "\n" if pick % 3 == 1 else ""
        return imports + stub
    if kind < 7:
        return f"Complete the following Python function:\n\n{stub}"
    if kind == 7:
        return f"Write a Python function `{head}`. {first}"
    if kind == 8:
        return f"Write a Python function that does this, with a short explanation: {first}"
    return f"Implement this function in Python and show how it is used.\n\n```python\n{stub}```"


def main() -> int:
    """Write the prompts; print how many each source gave."""
    out = Path(sys.argv[1])
    with out.open("w", encoding="utf-8") as handle:
        for spec in sys.argv[2:]:
            licence, name, path = spec.split(":", 2)
            count = 0
            for file, text in sources(Path(path)):
                try:
                    tree = ast.parse(text)
                except (SyntaxError, ValueError, RecursionError):
                    continue
                for node, doc in functions(tree):
                    try:
                        pick = int(hashlib.sha1(f"{node.name}{doc}".encode()).hexdigest()[:8], 16)
                        prompt = wordings(node, doc, pick)
                    except (ValueError, AttributeError):
                        continue
                    if 60 < len(prompt) < 1400:
                        row = {
                            "id": f"{name}:{file}:{node.lineno}",
                            "prompt": prompt,
                            "source": name,
                            "licence": licence,
                            "category": "code",
                        }
                        handle.write(json.dumps(row) + "\n")
                        count += 1
            print(f"{name:16}{count:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
