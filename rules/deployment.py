"""Two deployments with a dflash drafter, a dense and a hybrid target, and what an install's code decides for each of
them: which model runner, why, and whether it then refuses to start. Everything that isn't set here has the install's
own default.
"""

from __future__ import annotations

import ast
from typing import Any

from rules.base import Fact
from rules.config_model import Configuration
from rules.interpret import Interpreter, Refused, Thing, Unknown
from rules.tree import InstallTree

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "is_hybrid": False, "has_inner_state": False},
    "hybrid": {"architectures": ["Qwen3_5ForConditionalGeneration"], "is_hybrid": True, "has_inner_state": True},
}
_PLAIN_MODEL = {
    "runner_type": "generate",
    "is_moe": False,
    "is_quantized": False,
    "is_attention_free": False,
    "is_diffusion": False,
    "quantization": None,
    "use_mla": False,
    "is_encoder_decoder": False,
    "is_multimodal_model": False,
}


def decide(
    tree: InstallTree, configuration: Configuration, choice: str, target: str, classes: dict[str, Fact]
) -> dict[str, Any]:
    """The item of ``runner-in-force`` for one of TARGETS. ``choice`` is the expression that the worker takes its
    answer from, ``classes`` the facts on each runner's class. Keys that begin with an underscore are for the caller
    only."""
    draft = Thing(
        "draft_model_config",
        {"architectures": ["DFlashDraftModel"], "hf_config": Thing("hf_config", {"layer_types": None})},
    )
    speculative = configuration.thing(
        "SpeculativeConfig",
        method="dflash",
        parallel_drafting=True,
        draft_model_config=draft,
        num_speculative_tokens=15,
        use_heterogeneous_vocab=False,
    )
    model = configuration.thing("ModelConfig", **_PLAIN_MODEL, **TARGETS[target])
    parts = {
        "model_config": model,
        "speculative_config": speculative,
        **{
            name: configuration.thing(_class(name))
            for name in ("parallel_config", "cache_config", "scheduler_config", "attention_config")
        },
        **dict.fromkeys(
            ("lora_config", "ec_transfer_config", "kv_transfer_config", "watermark_config", "reasoning_config")
        ),
        "compilation_config": configuration.thing("CompilationConfig"),
    }
    owner = next(
        (o for o, functions in configuration.functions.items() if o and "use_v2_model_runner" in functions),
        "VllmConfig",
    )
    whole = configuration.thing(owner, **parts)
    variable = tree.environment.get(VARIABLE)
    groups = {e.group for e in tree.entry_points}
    platform = Thing("current_platform", {}, {})
    names: dict[str, Any] = {
        "HAS_TRITON": True,
        "entry_points": lambda group=None: [g for g in groups if g == group],
        "vllm_config": whole,
        "current_platform": platform,
    }
    interpreter = configuration.interpreter(names, {} if variable is None else {VARIABLE: variable})
    values = [interpreter.expression(fact["text"]) for _, fact in configuration.environment]
    interpreter.names["envs"] = Thing("envs", {VARIABLE: values[0]} if values else {})
    interpreter.assumed.clear()
    item: dict[str, Any] = {"target": target, "architecture": model.values["architectures"][0], "method": "dflash"}
    try:
        answer = interpreter.expression(choice)
    except Refused as refused:
        return {
            **item,
            "runner": "none",
            "why": "refused at start-up",
            "refused": str(refused),
            "assumed": list(interpreter.assumed),
        }
    item["_line"] = interpreter.returned
    item["_owner"] = owner
    runner = "unknown" if isinstance(answer, Unknown) else "V2" if interpreter.true(answer) else "V1"
    fact = classes.get(runner)
    item["runner"] = runner
    item["file"] = "" if fact is None else fact["module"].replace(".", "/") + ".py"
    item["class"] = "" if fact is None else fact["name"]
    item["why"] = _why(configuration, interpreter, whole, answer, variable, values)
    item["refused"] = _refused(configuration, interpreter, whole, runner)
    item["assumed"] = list(interpreter.assumed)[:12]
    return item


def _why(
    configuration: Configuration,
    interpreter: Interpreter,
    whole: Thing,
    answer: Any,
    variable: str | None,
    values: list[Any],
) -> str:
    if isinstance(answer, Unknown):
        return f"{answer.text} can't be known from the code alone"
    if variable is not None and values and values[0] is not None and bool(values[0]) is bool(answer):
        return f"{VARIABLE}={variable}"
    if not interpreter.returned:
        return f"{VARIABLE} is not set, and its default is off" if not answer else "the default is on"
    line = interpreter.returned
    decision = configuration.functions.get(whole.name, {}).get("use_v2_model_runner")
    branches = [n for n in ast.walk(decision) if isinstance(n, ast.If)] if decision is not None else []
    tests = [n for n in branches if any(c.lineno <= line <= (c.end_lineno or 0) for c in n.body)]
    test = ast.unparse(tests[-1].test) if tests else ""
    if answer:
        return f"line {line} returns True" + (
            f" because {test}" if test else ": V2 is the default, and nothing speaks against it"
        )
    unsupported = _features(configuration, interpreter, whole, "v2") if test == "unsupported" else []
    if unsupported:
        return f"V2 does not support it: {', '.join(unsupported)} (line {line})"
    return f"line {line} returns False" + (f" because {test}" if test else "")


def _refused(configuration: Configuration, interpreter: Interpreter, whole: Thing, runner: str) -> str:
    """Why this vLLM refuses the chosen runner at start-up, or ""."""
    functions = configuration.functions.get(whole.name, {})
    name = f"_validate_{runner.lower()}_model_runner"
    if name in functions:
        try:
            interpreter.run(functions[name], whole)
        except Refused as refused:
            return str(refused)
    missing = _features(configuration, interpreter, whole, runner.lower())
    return ", ".join(missing)


def _features(configuration: Configuration, interpreter: Interpreter, whole: Thing, runner: str) -> list[str]:
    """What the code itself lists as not supported by a runner."""
    function = configuration.functions.get(whole.name, {}).get(f"_get_{runner}_model_runner_unsupported_features")
    if function is None:
        return []
    try:
        found = interpreter.run(function, whole)
    except Refused:
        return []
    return [str(x) for x in found] if isinstance(found, list) else []


def _class(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
