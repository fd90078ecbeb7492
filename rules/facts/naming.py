"""What an expression is called: its last name, the name that it starts from, the item that it names."""

from __future__ import annotations

import ast

from rules.facts.module import dotted


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return ""


def item_name(node: ast.Subscript) -> str:
    """ "d.key" for d["key"], "" for other subscripts."""
    if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        owner = dotted(node.value)
        return f"{owner}.{node.slice.value}" if owner else ""
    return ""


def root_name(node: ast.AST) -> str:
    """The (dotted) name that a chain of subscripts, sums and calls starts from."""
    while True:
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name:
                return name
            node = node.value
        elif isinstance(node, ast.Name):
            return node.id
        elif isinstance(node, (ast.Subscript, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
