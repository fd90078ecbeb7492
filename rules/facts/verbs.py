"""The verbs of array libraries and containers, as dataflow reads them: what loads, gathers, compares, selects, adds."""

from __future__ import annotations

import ast
import builtins

LOAD = frozenset({"load", "ld", "load_scalar"})
STORE = frozenset({"store", "st"})
GATHER = frozenset(
    {"gather", "take", "take_along_dim", "take_along_axis", "index_select", "gather_nd", "vindex", "embedding"}
)


POP = frozenset({"pop", "popleft", "popitem", "get_nowait", "heappop", "next", "get", "__next__"})
ADD = frozenset(
    {"append", "extend", "add", "push", "put", "put_nowait", "insert", "appendleft", "extendleft", "heappush", "update"}
)


COMPARE = {
    "eq": "Eq",
    "ne": "NotEq",
    "equal": "Eq",
    "not_equal": "NotEq",
    "isin": "In",
    "in1d": "In",
    "lt": "Lt",
    "gt": "Gt",
    "le": "LtE",
    "ge": "GtE",
    "less": "Lt",
    "greater": "Gt",
    "__contains__": "In",
}


BINARY = {
    "logical_and": "&",
    "logical_or": "|",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "mul": "*",
    "multiply": "*",
    "matmul": "@",
    "mm": "@",
    "bmm": "@",
    "einsum": "@",
    "minimum": "&",
    "maximum": "|",
    "__and__": "&",
    "dot": "@",
}


APPLIES = frozenset({"reduce", "accumulate", "max", "min", "sorted", "map", "filter"})
META = frozenset(
    {"shape", "dtype", "device", "size", "ndim", "stride", "numel", "dim", "element_ty", "__name__", "__class__"}
)


SAME_VALUE = frozenset({"T", "data", "mT", "indices", "values", "real", "grad", "cpu", "item"})
FRESH = frozenset(
    {
        "zeros",
        "ones",
        "empty",
        "full",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_full",
        "set",
        "dict",
        "list",
        "deque",
        "defaultdict",
        "isinstance",
        "hasattr",
        "type",
        "print",
        "super",
    }
)


SELECT = frozenset({"where", "select", "masked_fill", "masked_select", "masked_fill_"})
LIBRARIES = frozenset(
    {
        "torch",
        "np",
        "numpy",
        "tl",
        "jnp",
        "F",
        "mx",
        "cp",
        "operator",
        "math",
        "heapq",
        "itertools",
        "triton",
        "nb",
        "random",
    }
)


MISSING = ("KeyError", "IndexError", "LookupError", "StopIteration", "'Exception'")
BUILTINS = frozenset(dir(builtins))
OPERATORS = {
    ast.LShift: "<",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.Mult: "*",
    ast.MatMult: "@",
    ast.Div: "/",
    ast.Add: "+",
    ast.Sub: "-",
    ast.BitXor: "^",
}
