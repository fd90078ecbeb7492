"""Acceptance whose source isn't here: compiled ops, executed strings."""

from __future__ import annotations

import re

from rules.acceptance import slice_of
from rules.base import Context

#: An op's schema, as TORCH_LIBRARY keeps it in the binary: "ns::name(Tensor a, int b) -> Tensor".
_SCHEMA = re.compile(r"^(?:(?P<space>\w+)::)?(?P<name>\w+)(?:\.\w+)?\s*\((?P<args>.*)\)\s*->")
#: Arguments that say where to go next in a tree. The only place where names are looked at: a schema has nothing else.
_LINK = re.compile(
    r"(retriev|retriv|parent|child|sibling|next_token|next_node|ancestor|tree|accept_index|path_ind)", re.I
)


def schemas(ctx: Context) -> dict[str, str]:
    """op name (with and without its namespace) -> schema, of every binary that was read."""
    found: dict[str, str] = {}
    for binary in ctx.tree.binaries:
        for schema in binary.schemas or ():
            match = _SCHEMA.match(schema)
            if match:
                found[match["name"]] = schema
                if match["space"]:
                    found[f"{match['space']}.{match['name']}"] = schema
    return found


def link_tables(schema: str) -> list[str]:
    """Names of the tensor arguments that look like links of a tree."""
    match = _SCHEMA.match(schema)
    if match is None:
        return []
    arguments = [a.split("=")[0].split() for a in match["args"].split(",")]
    return [a[-1] for a in arguments if len(a) > 1 and a[0].startswith("Tensor") and _LINK.search(a[-1])]


def hidden_acceptance(ctx: Context) -> list[str]:
    """Why acceptance can't be followed to its end in source, one line each; empty when it can.

    An op that stock vLLM calls and this build does not define (its CPU and ROCm kernels) can't run here and hides
    nothing."""
    known = schemas(ctx)
    why: list[str] = []
    reach = slice_of(ctx)
    for op, (caller, stock) in sorted(reach.ops.items()):
        if caller not in reach.reached:
            continue
        schema = known.get(op) or known.get(op.rpartition(".")[2])
        if schema is not None and len(link_tables(schema)) >= 2:
            links = ", ".join(link_tables(schema))
            why.append(f"torch.ops.{op} takes link tables ({links}) and is compiled: {caller[0]} {caller[1]}")
        elif schema is None and not stock:
            why.append(f"torch.ops.{op}, called by {caller[0]} {caller[1]}, is defined in no file that was read")
    for (path, symbol), lines in sorted(reach.executed.items()):
        file = ctx.file(path)
        if (path, symbol) in reach.reached and file is not None and not (file.origin == "vllm" and file.stock):
            why.append(f"{path}:{lines[0]} {symbol} executes a string that it makes")
    return why
