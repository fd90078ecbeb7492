"""Statements but loops: branches, assignments, what leaves a function or a loop."""

from __future__ import annotations

import ast

from rules.facts.flow_loops import LoopFlow
from rules.facts.values import NONE, D, Env, P
from rules.facts.verbs import MISSING, OPERATORS


class StatementFlow(LoopFlow):
    """Statements in order, branches joined."""

    def block(self, body: list[ast.stmt], env: Env) -> bool:
        """Runs statements; True when control never gets past them."""
        for position, statement in enumerate(body):
            if isinstance(statement, ast.If):
                if self._if(statement, body[position + 1 :], env):
                    return True
                if jumps_away(statement.body) or jumps_away(statement.orelse):
                    return False  # the rest was run inside the branch that goes on
            elif self.statement(statement, env):
                return True
        return False

    def _if(self, node: ast.If, rest: list[ast.stmt], env: Env) -> bool:
        test = self.expr(node.test, env)
        then, other = dict(env), dict(env)
        body, orelse = list(node.body), list(node.orelse)
        if jumps_away(node.body):
            orelse += rest
        elif jumps_away(node.orelse):
            body += rest
        self.under.append(test)
        ended = self.block(body, then)
        ended_other = self.block(orelse, other)
        self.under.pop()
        if ended and ended_other:
            return True
        live = [e for e, gone in ((then, ended), (other, ended_other)) if not gone]
        names = {n for e in live for n, v in e.items() if env.get(n) != v}
        for name in names:
            values = frozenset().union(*(e.get(name, NONE) for e in live))
            env[name] = frozenset({self.add("sel", "if", node.lineno, (values, D), (test, P))}) if test else values
        return False

    def statement(self, node: ast.stmt, env: Env) -> bool:
        match node:
            case ast.Assign():
                if isinstance(node.value, ast.Lambda) and isinstance(node.targets[0], ast.Name):
                    self._lambdas[node.targets[0].id] = (node.value, env)
                for target in node.targets:
                    self.assign(target, node.value, env)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, node.value, env)
            case ast.AugAssign():
                old = self.expr(node.target, env)
                new = self.expr(node.value, env)
                op = OPERATORS.get(type(node.op), "?")
                value = (
                    frozenset({self.add("bin", op, node.lineno, (old, D), (new, D), left=old, right=new)})
                    if old or new
                    else NONE
                )
                self.bind(node.target, value, env, "aug")
            case ast.For() | ast.AsyncFor():
                self._for(node, env)
            case ast.While():
                self._while(node, env)
            case ast.Return():
                value = self.expr(node.value, env) if node.value is not None else NONE
                if self._returns:
                    self._returns[-1].append(self._chosen(value, node.lineno))
                    self._left[-1].append({n: v for n, v in env.items() if n.startswith("self.")})
                self._exit()
                return True
            case ast.Raise():
                self._exit()
                return True
            case ast.Break() | ast.Continue():
                if self.loop >= 0:
                    loop = self.loops[self.loop]
                    (loop.breaks if isinstance(node, ast.Break) else loop.continues).append(
                        self._under_env(env, node.lineno)
                    )
                    if isinstance(node, ast.Break):
                        loop.exits.append(self._now())
                return True
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.expr(item.context_expr, env)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, value, env)
                return self.block(node.body, env)
            case ast.Try():
                missing = any(h.type is None or any(n in ast.dump(h.type) for n in MISSING) for h in node.handlers)
                self._caught += missing
                ended = self.block(node.body, env)
                self._caught -= missing
                if missing and self.loop >= 0:
                    self.loops[self.loop].guarded = True
                for handler in node.handlers:
                    branch = dict(env)
                    if not self.block(handler.body, branch):
                        for name, value in branch.items():
                            env[name] = env.get(name, NONE) | value
                self.block(node.orelse, env)
                return self.block(node.finalbody, env) or (ended and not node.handlers)
            case ast.FunctionDef():
                found = self.module.by_node.get(id(node))
                if found is not None and self._nested:
                    self._nested[-1][node.name] = (found, env)
            case ast.Expr():
                self.expr(node.value, env)
            case ast.Assert():
                self.expr(node.test, env)
            case ast.Match():
                subject = self.expr(node.subject, env)
                for case in node.cases:
                    branch = dict(env)
                    for sub in ast.walk(case.pattern):
                        bound = getattr(sub, "name", None)
                        if isinstance(bound, str):
                            branch[bound] = subject
                    self.under.append(subject)
                    self.block(case.body, branch)
                    self.under.pop()
                    for name, value in branch.items():
                        env[name] = env.get(name, NONE) | value
        return False


def jumps_away(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Break, ast.Continue))
