"""Calls of library functions and methods: loads, gathers, stores, comparisons, selections."""

from __future__ import annotations

import ast

from rules.facts.flow_inlining import InliningFlow
from rules.facts.module import dotted
from rules.facts.naming import last_name, root_name
from rules.facts.values import NONE, D, Env, I, L, P, Value
from rules.facts.verbs import ADD, APPLIES, BINARY, COMPARE, FRESH, GATHER, LIBRARIES, LOAD, POP, SELECT, STORE


class CallFlow(InliningFlow):
    """Calls of what the verbs name."""

    def _call(self, node: ast.Call, env: Env) -> Value:
        func = node.func
        name = last_name(func)
        line = node.lineno
        if isinstance(func, ast.Attribute):
            module_like = (
                isinstance(func.value, ast.Name)
                and func.value.id not in env
                and (func.value.id in LIBRARIES or func.value.id in self.module.imports)
            )
            if isinstance(func.value, ast.Attribute) and not module_like:
                module_like = dotted(func.value).split(".")[0] in LIBRARIES
        else:
            module_like = True
        recv = self.expr(func.value, env) if isinstance(func, ast.Attribute) and not module_like else NONE
        inlined = self._inline(node, func, name, recv, env)
        if inlined is not None:
            return inlined
        if name in APPLIES:
            applied = self._applied(node, name, env)
            if applied is not None:
                return applied
        args = [self.expr(a, env) for a in node.args]
        keyword = {k.arg or "": self.expr(k.value, env) for k in node.keywords}
        everything = frozenset().union(
            recv, *args, *(v for k, v in keyword.items() if k not in ("dtype", "device", "dim", "axis"))
        )
        if name in LOAD and args:
            return self._load(node.args[0], args[0], keyword.get("mask", NONE) | keyword.get("other", NONE), line, env)
        if (name in STORE or name.startswith("atomic_")) and len(args) >= 2:
            pointer = root_name(node.args[0])
            value = frozenset().union(*args[1:2])
            mask = keyword.get("mask", NONE) | (args[2] if len(args) > 2 else NONE)
            self._update(pointer, "store", args[0], value, mask, line, env)
            return NONE
        if name in GATHER and (args or keyword):
            base_node = (
                node.args[0] if module_like and node.args else func.value if isinstance(func, ast.Attribute) else func
            )
            base = args[0] if module_like and args else recv
            rest = args[1:] if module_like else args
            index = frozenset().union(*rest, keyword.get("index", NONE), keyword.get("indices", NONE))
            return frozenset({self.add("read", self.table(base, root_name(base_node)), line, (base, D), (index, I))})
        if name in ("get", "__getitem__", "getitem", "pop", "setdefault", "index", "getattr") and any(args):
            base, keys = (args[0], args[1:2]) if module_like else (recv, args[:1])
            index = frozenset().union(*keys) if keys else NONE
            if index:
                default = frozenset().union(*args[2 if module_like else 1 :])
                table = self.table(base, root_name(func))
                return frozenset({self.add("read", table, line, (base, D), (index, I), (default, D))})
        if name in POP:
            if not module_like:
                return recv
            if args:
                return args[0]
        if name in ADD or (name.endswith("_") and not name.endswith("__") and not module_like):
            if module_like and name != "heappush":
                return frozenset({self.add("call", name, line, (everything, D))}) if everything else NONE
            target = (
                node.args[0] if module_like and node.args else func.value if isinstance(func, ast.Attribute) else func
            )
            values = frozenset().union(*(args[1:] if module_like else args), *keyword.values())
            how = "append" if name in ADD else "store"
            number = self._update(
                root_name(target), how, args[0] if how == "store" and args else NONE, values, NONE, line, env
            )
            return frozenset({number})
        if name in SELECT and (len(args) >= 3 or (not module_like and len(args) >= 2)):
            chooser = args[0]
            values = recv.union(*args[1:])
            return frozenset({self.add("sel", name, line, (values, D), (chooser, P), left=chooser)})
        if name in COMPARE:
            left, right = (args[0], args[1]) if module_like and len(args) >= 2 else (recv, args[0] if args else NONE)
            return self._cmp(COMPARE[name], left, right, line)
        if name in BINARY:
            left, right = (args[0], args[1]) if module_like and len(args) >= 2 else (recv, args[0] if args else NONE)
            if name == "einsum" and len(args) >= 3:
                left, right = args[1], args[2]
            return (
                frozenset({self.add("bin", BINARY[name], line, (left, D), (right, D), left=left, right=right)})
                if left or right
                else NONE
            )
        if name in ("numel", "size") and recv and not args:
            return frozenset({self.add("len", name, line, (recv, L))})
        if name == "len" and args:
            return frozenset({self.add("len", "len", line, (args[0], L))}) if args[0] else NONE
        if name in ("range", "size", "numel", "stride", "dim", "isinstance", "hasattr", "device", "dtype"):
            return NONE
        if name == "arange":
            return frozenset({self.add("affine", "arange", line)})
        if name in FRESH:
            return (
                frozenset({self.add("fresh", name, line)})
                if not args or name not in ("list", "set", "dict", "deque")
                else everything
            )
        if isinstance(func, ast.Name) and name in self.module.bases:
            name = "construct"  # an object of this file's own is made of its arguments
        number = self.add("call", name, line, (everything, D), left=args[0] if args else recv)
        if self.loop >= 0 and module_like:
            full = dotted(func)
            first = full.split(".")[0]
            if first in self.module.imports and first not in LIBRARIES:
                self.foreign[number] = full
        return frozenset({number})

    def _load(self, pointer: ast.expr, value: Value, mask: Value, line: int, env: Env) -> Value:
        """A read through a pointer: the leftmost name is the table, the rest of the sum is the index."""
        base_nodes: set[int] = set()
        seen: set[int] = set()
        todo = list(value)
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            node = self.nodes[number]
            if node.kind == "bin" and node.name in "+-":
                todo += node.left or node.right
            elif node.kind in ("root", "const", "param", "phi", "sel", "read", "upd", "call"):
                base_nodes.add(number)
        index: set[int] = set()
        for number in value:
            index |= self._offsets(number, base_nodes)
        table = self.table(frozenset(base_nodes), root_name(pointer))
        base = frozenset(base_nodes)
        chased = frozenset(b for b in base_nodes if self.nodes[b].kind in ("read", "call"))
        return frozenset({self.add("read", table, line, (base, D), (frozenset(index) | chased, I), (mask, P))})

    def _offsets(self, number: int, base: set[int]) -> set[int]:
        node = self.nodes[number]
        if node.kind == "bin" and node.name in "+-":
            found: set[int] = set()
            for side in node.left:
                found |= self._offsets(side, base)
            return found | set(node.right)
        return set() if number in base else {number}
