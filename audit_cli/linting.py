"""From an audit, model folders and serve flags to a lint case, and its findings as the JSON of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from audit_cli.errors import USAGE, DdauditError
from reports.model import SCHEMA_VERSION, Audit, Probe
from rules.lint.flags import FlagError, parse_serve_args
from rules.lint.model import Case, Finding, Gpu, Host, InstallFacts, ModelFolder, Serve, read_drafter
from rules.lint.run import lint


def install_facts(audit: Audit | None) -> InstallFacts:
    """What the verdicts of an audit say, as a lint needs it; nothing when there is no audit."""
    if audit is None:
        return InstallFacts()
    runners = {str(item.get("target", "")): str(item.get("runner", "")) for item in _items(audit, "runner-in-force")}
    dense, hybrid = runners.get("dense", ""), runners.get("hybrid", "")
    return InstallFacts(
        version=audit.install.vllm_version,
        outcomes={verdict.id: verdict.outcome for verdict in audit.verdicts},
        methods=tuple(str(item["method"]) for item in _items(audit, "spec-methods") if "method" in item),
        runner_dense=dense if dense in ("V1", "V2") else "",
        runner_hybrid=hybrid if hybrid in ("V1", "V2") else "",
    )


def _items(audit: Audit, id: str) -> tuple[dict[str, Any], ...]:
    verdict = audit.verdict(id)
    return verdict.items if verdict is not None else ()


def model_folder(read: Mapping[str, Any]) -> ModelFolder:
    """What ``probes.models.read`` answered, as a lint takes it. What the host says is data: odd shapes are left out."""
    tensors = {
        str(name): (str(entry[0]), tuple(int(n) for n in entry[1]))
        for name, entry in dict(read.get("tensors", {})).items()
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)
    }
    return ModelFolder(
        name=str(read.get("name", "")),
        config=_object(read.get("config")),
        generation=_object(read.get("generation")),
        tokenizer=_object(read.get("tokenizer")),
        template=str(read.get("template", "")),
        tensors=tensors,
        files={str(name): size for name, size in _object(read.get("files")).items() if isinstance(size, int)},
        problems=tuple((str(file), str(why)) for file, why in read.get("problems", ())),
    )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def host_facts(probes: Sequence[Probe]) -> Host:
    """GPUs and the torch and CUDA pair from the probes that ran; an empty host where none did."""
    facts = {probe.id: probe.facts for probe in probes if probe.status == "ok"}
    gpus = []
    for row in facts.get("host", {}).get("gpus", ()):
        try:
            major, _, minor = str(row.get("compute_cap", "0.0")).partition(".")
            gpus.append(Gpu(str(row["name"]), int(float(row["memory.total"])) << 20, (int(major), int(minor or 0))))
        except (KeyError, ValueError, AttributeError):
            continue
    torch = _object(facts.get("environment", {}).get("torch"))
    return Host(tuple(gpus), str(torch.get("version", "")), str(torch.get("cuda", "")))


def serve_flags(text: str) -> Serve:
    """Parsed flags. Raises a usage error that shows the place."""
    try:
        return parse_serve_args(text)
    except FlagError as error:
        reason, *picture = str(error).split("\n")
        hint = "--serve-args \"--flag '{...}'\": JSON in single quotes of its own"
        raise DdauditError("usage", "the serve flags do not parse", reason, hint, USAGE, tuple(picture)) from None


def findings(
    audit: Audit | None,
    target: Mapping[str, Any] | None,
    drafter: Mapping[str, Any] | None,
    serve: Serve | None,
    probes: Sequence[Probe] = (),
) -> tuple[Finding, ...]:
    """Lint what is given; what is not given is not checked."""
    return lint(
        Case(
            target=model_folder(target) if target is not None else None,
            drafter=read_drafter(model_folder(drafter)) if drafter is not None else None,
            serve=serve,
            install=install_facts(audit),
            host=host_facts(probes),
        )
    )


def to_json(found: Sequence[Finding]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "findings": [dataclasses.asdict(item) for item in found]}


def to_text(found: Sequence[Finding]) -> str:
    """Plain lines for a terminal or a pipe: one finding a paragraph, errors first, then the count."""
    from audit_cli.inventory import shown
    from reports.text import count

    lines: list[str] = []
    for item in found:
        lines.append(f"{item.severity:<7} {item.id}: {shown(item.summary)}")
        lines += [f"        at   {shown(place)}" for place in item.evidence]
        if item.fix:
            lines.append(f"        fix  {shown(item.fix)}")
        if item.source:
            lines.append(f"        see  {item.source}")
        lines.append("")
    counts = {severity: sum(item.severity == severity for item in found) for severity in ("error", "warning", "info")}
    nouns = (("error", "error"), ("warning", "warning"), ("info", "remark"))
    lines.append(", ".join(count(counts[severity], noun) for severity, noun in nouns))
    return "\n".join(lines)
