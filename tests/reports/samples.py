"""Audits made by hand: a plain one, and the same with hostile text in every field that a host can fill."""

from __future__ import annotations

import dataclasses
from typing import Any

from reports.model import (
    Assumption,
    Audit,
    Dismissed,
    Evidence,
    Failed,
    Install,
    Made,
    Probe,
    Recommendation,
    Record,
    Scope,
    Target,
    TrailStep,
    Verdict,
)

SAMPLER = "vllm/v1/sample/rejection_sampler.py"
EVIDENCE = Evidence(SAMPLER, 793, 795, "rejection_greedy_sample_kernel", "ab" * 32, "def kernel():\n    return 1\n")
SCOPE = Scope(
    files_seen=3231,
    files_parsed=3230,
    files_failed=(Failed("vllm/broken.py", "SyntaxError: line 3"),),
    functions_examined=71234,
    roots=("vllm/v1/worker/gpu_model_runner.py:666 GPUModelRunner",),
    not_examined=("vllm-rs (60 MB, ELF)",),
)


def verdict(id: str, outcome: Any, summary: str = "", **fields: Any) -> Verdict:
    return Verdict(id, outcome, summary or f"what was found for {id}", scope=fields.pop("scope", SCOPE), **fields)


def item(
    symbol: str = "rejection_greedy_sample_kernel", shape: str = "chain", reachable: bool = True, **more: Any
) -> dict[str, Any]:
    base = {
        "symbol": symbol,
        "file": SAMPLER,
        "line": 793,
        "shape": shape,
        "runner": "V1",
        "reachable": reachable,
        "accepts": "greedy",
    }
    return {**base, **more}


def audit(**changes: Any) -> Audit:
    base = Audit(
        target=Target(
            "root@gpu1.example.com",
            "ssh",
            "gpu1.example.com",
            "/root/ml-env/bin/python",
            "/root/ml-env/lib/python3.12/site-packages",
        ),
        install=Install("0.33.0", Record("clean", files=3231), "cd" * 32),
        verdicts=(
            verdict("record-integrity", "yes"),
            verdict("plugins", "yes", items=({"name": "lora", "distribution": "vllm"},)),
            verdict("verifiers", "yes", items=(item(), item("second", runner="V2")), evidence=(EVIDENCE,)),
            verdict("tree-build", "no"),
            verdict("tree-mask", "partial", evidence=(EVIDENCE,)),
            verdict(
                "tree-walk",
                "no",
                "none of 71,234 functions follows a link between drafted tokens",
                dismissed=(
                    Dismissed(
                        "vllm/v1/spec_decode/ngram_proposer.py",
                        210,
                        "kmp",
                        "a walk",
                        "the table is written in the same loop",
                    ),
                ),
                recheck="grep -c rejected vllm/v1/sample/rejection_sampler.py",
                recheck_expect="17",
                changes_if="a plugin that replaces the sampler",
            ),
            verdict("tree-commit", "no"),
            verdict("lossless-only", "no", confidence="medium"),
        ),
        probes=(
            Probe(
                "host", "ok", seconds=0.4, facts={"gpus": ["H200"], "ram_gib": 503, "rounds": [{"batch": 1, "ms": 2.5}]}
            ),
        ),
        recommendation=Recommendation(
            "standalone", ("a first measurement is wanted",), ("trees often lose",), ("t_tree",), "ddaudit run"
        ),
        errors=({"code": "file-failed", "message": "vllm/broken.py: SyntaxError", "hint": "look at it"},),
        trail=(TrailStep("runner", "Does it?", "grep -n tree x.py", 0, 0, (), "Nothing.", "the engine"),),
        assumptions=(Assumption("It exists", "looked", "no", "no", (EVIDENCE,)),),
        made=Made("2026-11-29T18:00:00+00:00", 1.25, "known", 0, "ef" * 32, examples="12/12 rule examples pass"),
        findings=(
            {
                "id": "layer-ids-off-by-one",
                "severity": "warning",
                "summary": "the ids are one too low",
                "evidence": ["config.json: target_layer_ids [1, 2]"],
                "fix": "upgrade",
            },
            {"id": "verifier-differs", "severity": "error", "summary": "made for another", "fix": "train"},
        ),
        ddaudit="0.1.0",
    )
    return dataclasses.replace(base, **changes)


def everywhere(value: Any, text: str) -> Any:
    """``value`` (an audit, or a part of one) with ``text`` put before every string that a host can fill."""
    fixed = {
        "severity",
        "kind",
        "outcome",
        "status",
        "path",
        "confidence",
        "holds",
        "id",
        "shape",
        "facts",
        "sha256",
        "rules_sha256",
    }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(
            value,
            **{
                name: field if name in fixed and isinstance(field, str) else everywhere(field, text)
                for name, field in fields.items()
            },
        )
    if isinstance(value, tuple):
        return tuple(everywhere(part, text) for part in value)
    if isinstance(value, dict):
        return {key: part if key in fixed else everywhere(part, text) for key, part in value.items()}
    return text + value if isinstance(value, str) else value
