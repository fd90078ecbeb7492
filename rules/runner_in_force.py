"""vLLM has two model runners, V1 (``v1/worker/gpu_model_runner.py``) and V2 (``v1/worker/gpu/model_runner.py``); what
is true of one need not be true of the other, and reading the wrong folder is how people come to wrong answers. Which
one runs is decided by code, an environment variable, the target's architecture and the drafter.

The rule evaluates the install's own decision for two deployments with ``method="dflash"`` and defaults elsewhere: a
dense target (``Qwen3ForCausalLM``) and a hybrid one (Qwen3.5/3.6, GDN layers). Conditions that a stock deployment
doesn't meet count as false and are listed in ``assumed``. ``refused`` says that this vLLM stops at start-up with this
choice.
"""

from __future__ import annotations

import ast
from typing import Any

from reports.model import Evidence, Verdict
from rules.base import Context, Example, Fact
from rules.config_model import Configuration, config_facts, default_facts, environment_facts
from rules.deployment import TARGETS, VARIABLE, decide
from rules.doubt import unless_unread
from rules.parts import holding
from rules.recheck import Recheck
from rules.tree import SourceFile

ID = "runner-in-force"
QUESTION = "Which model runner runs a dflash deployment: for a dense target, and for a hybrid (GDN) one?"
CHANGES_IF = (
    "VLLM_USE_V2_MODEL_RUNNER is set or unset, another target or drafter is served, or the code of the decision differs"
)
NEEDLES = (b"v2_model_runner", b"V2_MODEL_RUNNER", b"\n@config")
_OWNERS = frozenset(
    {
        "VllmConfig",
        "SpeculativeConfig",
        "ModelConfig",
        "ParallelConfig",
        "CacheConfig",
        "SchedulerConfig",
        "AttentionConfig",
        "CompilationConfig",
    }
)


def extract(path: str, source: bytes) -> list[Fact]:
    found: list[Fact] = []
    if b"\n@config" in source:
        found += default_facts(source, _OWNERS)
    if VARIABLE.encode() in source and b"lambda" in source:
        found += environment_facts(source, VARIABLE)
    if b"2_model_runner" in source or VARIABLE.encode() in source:
        found += config_facts(
            source, lambda name, text: "model_runner" in name or (VARIABLE in text and "return" in text)
        )
        found += _constructions(source)
    if b"class SpeculativeConfig" in source:
        found += config_facts(
            source, lambda name, text: text.count("\n") < 14 and "self.method" in text and "return" in text
        )
    return found


def _constructions(source: bytes) -> list[Fact]:
    """Where a worker picks the runner's class: an ``if`` on the choice with an import in each branch; and where the
    choice comes from."""
    found: list[Fact] = []
    for part in holding(source, "model_runner", "v2"):
        top = ast.parse("if 1:\n" + part.text if part.text[:1] in " \t" else part.text)
        shift = part.line - (2 if part.text[:1] in " \t" else 1)
        for owner in ast.walk(top):
            for body in (getattr(owner, "body", None), getattr(owner, "orelse", None)):
                for number, node in enumerate(body if isinstance(body, list) else []):
                    if isinstance(node, ast.If) and "v2_model_runner" in ast.unparse(node.test).lower():
                        rest = node.orelse or body[number + 1 :]  # type: ignore[index]
                        first, other = _imported(node.body), _imported(rest)
                        if first and other:
                            flipped = isinstance(node.test, ast.UnaryOp)
                            for runner, (module, name, line) in (
                                ("V1" if flipped else "V2", first),
                                ("V2" if flipped else "V1", other),
                            ):
                                found.append(
                                    {
                                        "kind": "class",
                                        "runner": runner,
                                        "module": module,
                                        "name": name,
                                        "symbol": part.symbol,
                                        "line": line + shift,
                                        "end_line": line + shift,
                                        "from": node.lineno + shift,
                                    }
                                )
        for node in ast.walk(top):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.use_v2_model_runner":
                found.append(
                    {
                        "kind": "choice",
                        "text": ast.unparse(node.value),
                        "symbol": part.symbol,
                        "line": node.lineno + shift,
                        "end_line": (node.end_lineno or node.lineno) + shift,
                    }
                )
    return found


def _imported(body: list[ast.stmt]) -> tuple[str, str, int] | None:
    """The runner that a branch imports: (module, class, line). Of a nested ``if`` only its else branch counts
    (special deployments)."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and "runner" in node.module:
            return node.module, node.names[0].name, node.lineno
        if isinstance(node, ast.If):
            inner = _imported(node.orelse)
            if inner:
                return inner
    return None


@unless_unread(NEEDLES)
def judge(ctx: Context) -> Verdict:
    facts = ctx.facts(ID)
    workers = [(file, [f for f in found if f["kind"] in ("class", "choice")]) for file, found in facts]
    workers = [(file, found) for file, found in workers if {f["kind"] for f in found} == {"class", "choice"}]
    # The GPU worker, not its CPU, TPU or XPU kin; a plugin's own worker is named in the verdict on plugins.
    mine = [w for w in workers if w[0].path.endswith("gpu_worker.py")] or workers
    if not mine:
        classic = _only_one(ctx, facts)
        if classic is not None:
            return classic
        why = "no worker was found that picks a runner class, so which runner runs can't be told"
        return Verdict(ID, "unknown", why, "low", scope=ctx.scope(), changes_if=CHANGES_IF, question=QUESTION)
    worker, picked = mine[0]
    choice = next(f for f in picked if f["kind"] == "choice")
    classes = {f["runner"]: f for f in picked if f["kind"] == "class"}
    configuration = Configuration(facts)
    items = [decide(ctx.tree, configuration, choice["text"], target, classes) for target in TARGETS]
    evidence = [ctx.evidence(worker, choice["line"], choice["end_line"], choice["symbol"])]
    check = Recheck(ctx).lines(worker, choice["line"], choice["end_line"])
    for runner in sorted({item["runner"] for item in items} & set(classes)):
        fact = classes[runner]
        evidence.append(ctx.evidence(worker, fact["from"], fact["line"], fact["symbol"]))
        check.lines(worker, fact["from"], fact["line"])
    for file, line in _where(configuration, items):
        evidence.append(ctx.evidence(file, max(1, line - 3), line, "use_v2_model_runner"))
        check.lines(file, max(1, line - 3), line)
    for file, fact in configuration.environment:
        check.lines(file, fact["line"], fact["end_line"])
    known = all(item["runner"] in ("V1", "V2") for item in items)
    said = "; ".join(_say(item) for item in items)
    shown = [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]
    return Verdict(
        ID,
        "yes" if known else "unknown",
        said,
        "high" if known else "low",
        tuple(_distinct(evidence)),
        ctx.scope(),
        (),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=tuple(shown),
        **check.done(),
    )


def _where(configuration: Configuration, items: list[dict[str, Any]]) -> list[tuple[SourceFile, int]]:
    """The returns that decided, each once."""
    found: list[tuple[SourceFile, int]] = []
    for item in items:
        file = configuration.files.get(f"{item.get('_owner')}.use_v2_model_runner")
        if file is not None and item.get("_line") and (file, item["_line"]) not in found:
            found.append((file, item["_line"]))
    return found


def _only_one(ctx: Context, facts: list[tuple[SourceFile, list[Fact]]]) -> Verdict | None:
    """Installs from before the second runner, where nothing has to be chosen."""
    runner = ctx.file("vllm/v1/worker/gpu_model_runner.py")
    if runner is None or ctx.file("vllm/v1/worker/gpu/model_runner.py") is not None or any(found for _, found in facts):
        return None
    items = tuple(
        {
            "target": t,
            "architecture": values["architectures"][0],
            "method": "dflash",
            "runner": "V1",
            "file": runner.path,
            "class": "GPUModelRunner",
            "why": "there is no other",
            "refused": "",
            "assumed": [],
        }
        for t, values in TARGETS.items()
    )
    check = Recheck(ctx).shell("ls vllm/v1/worker/gpu/model_runner.py 2>/dev/null | wc -l", "0\n")
    return Verdict(
        ID,
        "yes",
        "V1 for both: this install has no second runner",
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=items,
        **check.done(),
    )


def _say(item: dict[str, Any]) -> str:
    said = f"{item['target']} ({item['architecture']}): {item['runner']}, {item['why']}"
    return said + (f"; refused at start-up: {item['refused']}" if item["refused"] else "")


def _distinct(evidence: list[Evidence]) -> list[Evidence]:
    return list(dict.fromkeys(evidence))


def runners(ctx: Context) -> dict[str, str]:
    """target -> runner in force, of an earlier verdict of this rule (for rules that ask about the runner in force)."""
    verdict = ctx.verdicts.get(ID)
    return {item["target"]: item["runner"] for item in verdict.items} if verdict is not None else {}


_WORKER = """
class Worker:
    def __init__(self, vllm_config):
        self.use_v2_model_runner = CHOICE
    def init_device(self):
        if self.use_v2_model_runner:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
            self.model_runner = Second(self.vllm_config)
        else:
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First
            self.model_runner = First(self.vllm_config)
"""
_ENVS = (
    "import os\n"
    "variables = {\n"
    "    'VLLM_USE_V2_MODEL_RUNNER': lambda: maybe_convert_bool(os.getenv('VLLM_USE_V2_MODEL_RUNNER', None)),\n"
    "}\n"
)
_CONFIG = """
DEFAULTS = frozenset({"Qwen3ForCausalLM"})

@config
class VllmConfig:
    @property
    def use_v2_model_runner(self):
        forced = envs.VLLM_USE_V2_MODEL_RUNNER
        if forced is not None:
            return forced
BODY
"""


def _install(body: str, choice: str = "vllm_config.use_v2_model_runner", envs: str = _ENVS) -> dict[str, str]:
    text = _CONFIG.replace("BODY", "".join(f"        {line}\n" for line in body.split("\n")))
    return {
        "vllm/v1/worker/gpu_worker.py": _WORKER.replace("CHOICE", choice),
        "vllm/config/vllm.py": text,
        "vllm/envs.py": envs,
        "vllm/v1/worker/gpu_model_runner.py": "class GPUModelRunner: ...\n",
        "vllm/v1/worker/gpu/model_runner.py": "class GPUModelRunner: ...\n",
    }


_LISTED = "return any(a in DEFAULTS for a in self.model_config.architectures)"
VALID = (
    Example("a list of architectures", _install(_LISTED), "yes", items=2),
    Example("on for everything", _install("return True"), "yes", items=2),
    Example(
        "hybrids stay behind",
        _install("if self.model_config.is_hybrid:\n    return False\nreturn not self.model_config.is_moe"),
        "yes",
        items=2,
    ),
    Example(
        "the variable's default decides",
        _install(
            _LISTED,
            "envs.VLLM_USE_V2_MODEL_RUNNER",
            (
                "import os\n"
                "v = {'VLLM_USE_V2_MODEL_RUNNER': lambda: bool(int(os.getenv('VLLM_USE_V2_MODEL_RUNNER', '0')))}\n"
            ),
        ),
        "yes",
        items=2,
    ),
    Example(
        "before the second runner",
        {"vllm/v1/worker/gpu_model_runner.py": "class GPUModelRunner: ...\n"},
        "yes",
        items=2,
    ),
)
INVALID = (
    Example(
        "decided by something that the code alone can't show", _install("return self.cluster.prefers_v2()"), "unknown"
    ),
    Example("no worker picks a runner", {"vllm/config/vllm.py": _install(_LISTED)["vllm/config/vllm.py"]}, "unknown"),
    Example(
        "a worker that builds one runner, an unused list beside it",
        {**_install(_LISTED), "vllm/v1/worker/gpu_worker.py": "class Worker: ...\n"},
        "unknown",
    ),
)
