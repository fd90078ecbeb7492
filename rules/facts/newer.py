"""Files whose syntax is newer than this Python: libcst reads them, and what ``ast`` would refuse is rewritten, line
for line."""

from __future__ import annotations

# Brackets in brackets: Python's own limit, in every version. Far beyond it libcst's parser ends the process.
_DEPTH = 200


def rewritten(source: bytes) -> str | None:
    """The file without type parameters, ``type X = ...``, ``except*`` and f-strings (each keeps its lines), or None
    when libcst can't
    read it either. What a function computes with tokens and indices stays as it is."""
    if _depth(source) > _DEPTH:
        return None
    try:
        import libcst as cst
    except ImportError:
        return None

    class Older(cst.CSTTransformer):
        def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:  # noqa: N802
            return updated_node.with_changes(type_parameters=None)

        def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:  # noqa: N802
            return updated_node.with_changes(type_parameters=None)

        def leave_TypeAlias(  # noqa: N802
            self, original_node: cst.TypeAlias, updated_node: cst.TypeAlias
        ) -> cst.BaseSmallStatement:
            return cst.Assign([cst.AssignTarget(updated_node.name)], updated_node.value)

        def leave_FormattedString(  # noqa: N802
            self, original_node: cst.FormattedString, updated_node: cst.FormattedString
        ) -> cst.BaseExpression:
            lines = cst.Module([]).code_for_node(original_node).count("\n")
            return cst.SimpleString('""' if not lines else '"""' + "\n" * lines + '"""')

        def leave_TryStar(self, original_node: cst.TryStar, updated_node: cst.TryStar) -> cst.BaseStatement:  # noqa: N802
            handlers = [cst.ExceptHandler(body=h.body, type=h.type, name=h.name) for h in updated_node.handlers]
            return cst.Try(updated_node.body, handlers, updated_node.orelse, updated_node.finalbody)

    try:
        return cst.parse_module(source).visit(Older()).code
    except (
        Exception
    ):  # a parser error, or a tree too deep for the visitor: the caller reports the first parser's message
        return None


def _depth(source: bytes) -> int:
    deepest = depth = 0
    for byte in source:
        if byte in b"([{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b")]}":
            depth -= 1
    return deepest
