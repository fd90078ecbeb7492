"""What a lint sees, and what it says. All plain data; nothing here touches a disk or a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One fault or remark. ``evidence``: "where: what" lines; ``source``: where it was first reported."""

    id: str
    severity: Severity
    summary: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class ModelFolder:
    """A model folder as it was read: configs as parsed, tensor headers as (dtype, shape), file sizes in bytes.
    ``problems`` names each file that could not be read and why; a check never takes an unread file for an empty one.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config (multimodal configs nest it)."""
        for key in ("text_config", "transformer_layer_config", "llm_config"):
            nested = self.config.get(key)
            if isinstance(nested, Mapping):
                return nested
        return self.config

    def number(self, key: str) -> int | None:
        """An integer of the language model's config, or None when it is missing or not an integer."""
        value = self.text.get(key, self.config.get(key))
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def layer_types(self) -> tuple[str, ...]:
        value = self.text.get("layer_types")
        return tuple(str(item) for item in value) if isinstance(value, list) else ()

    @property
    def head_dim(self) -> int | None:
        if (explicit := self.number("head_dim")) is not None:
            return explicit
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        return hidden // heads if hidden and heads else None

    @property
    def architectures(self) -> tuple[str, ...]:
        value = self.config.get("architectures")
        return tuple(str(item) for item in value) if isinstance(value, list) else ()

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a recurrent state (Gated DeltaNet, Mamba) instead of a KV cache."""
        if any("linear" in kind or "mamba" in kind or "recurrent" in kind for kind in self.layer_types):
            return True
        kind = str(self.text.get("model_type", self.config.get("model_type", "")))
        return (
            kind.startswith(("qwen3_next", "qwen3_5", "qwen3_6"))
            or "mamba" in kind
            or "full_attention_interval" in self.text
        )

    @property
    def rope_theta(self) -> float | None:
        parameters = self.text.get("rope_parameters")
        value = self.text.get("rope_theta")
        if value is None and isinstance(parameters, Mapping):
            value = parameters.get("rope_theta")
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def partial_rotary(self) -> float:
        parameters = self.text.get("rope_parameters")
        value = self.text.get("partial_rotary_factor")
        if value is None and isinstance(parameters, Mapping):
            value = parameters.get("partial_rotary_factor")
        return float(value) if isinstance(value, (int, float)) else 1.0


@dataclass(frozen=True)
class Drafter:
    """A DFlash-family drafter's contract, from either of the two checkpoint formats.

    ``layer_ids``: the z-lab convention (id i is the output of layer i); ``aux_ids``: vLLM's (k = i + 1), when written.
    """

    folder: ModelFolder
    speculators: bool
    block_size: int | None
    mask_token_id: int | None
    layer_ids: tuple[int, ...] | None
    aux_ids: tuple[int, ...] | None

    @property
    def family(self) -> str:
        """One of dflash, dflash2, dspark, eagle3, eagle, mtp, medusa, from the architecture's name; or empty."""
        names = (
            " ".join(self.folder.architectures).lower()
            + " "
            + str(self.folder.config.get("speculators_model_type", "")).lower()
        )
        for family in ("dflash2", "dspark", "dflash", "eagle3", "eagle", "mtp", "medusa"):
            if family in names:
                return family
        return ""


def read_drafter(folder: ModelFolder) -> Drafter:
    """The contract of a drafter folder (z-lab: ``dflash_config``; speculators: ``speculators_model_type``)."""
    config = folder.config
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    speculators = "speculators_model_type" in config
    ids = nested.get("target_layer_ids", config.get("target_layer_ids"))
    aux = config.get("eagle_aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"))
    layer_ids, aux_ids = _ids(ids), _ids(aux)
    if layer_ids is None and aux_ids is not None:
        layer_ids = tuple(k - 1 for k in aux_ids)
    return Drafter(
        folder=folder,
        speculators=speculators,
        block_size=_int(config.get("block_size", nested.get("block_size", config.get("dspark_block_size")))),
        mask_token_id=_int(nested.get("mask_token_id", config.get("mask_token_id"))),
        layer_ids=layer_ids,
        aux_ids=aux_ids,
    )


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    return None


@dataclass(frozen=True)
class InstallFacts:
    """What the audit of an install says, as far as a lint needs it."""

    version: str = ""
    outcomes: Mapping[str, str] = field(default_factory=dict)  # verdict id -> outcome
    methods: tuple[str, ...] = ()  # speculative methods that the installed code accepts; empty: not known
    rejection_methods: tuple[str, ...] = ()
    runner_dense: str = ""  # "V1" | "V2" | "" (not known)
    runner_hybrid: str = ""

    def outcome(self, id: str) -> str:
        return self.outcomes.get(id, "")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Host:
    gpus: tuple[Gpu, ...] = ()
    torch: str = ""
    cuda: str = ""


@dataclass(frozen=True)
class Serve:
    """Parsed serve flags: vLLM's long names, with dashes; JSON values parsed; ``no-x`` is stored as x = False."""

    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculative(self) -> Mapping[str, Any]:
        value = self.flags.get("speculative-config")
        return value if isinstance(value, Mapping) else {}

    def integer(self, name: str, default: int) -> int:
        value = self.flags.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default


@dataclass(frozen=True)
class Case:
    """Everything that one lint looks at. Absent parts are None: their checks are silent, not clean."""

    target: ModelFolder | None = None
    drafter: Drafter | None = None
    serve: Serve | None = None
    install: InstallFacts = field(default_factory=InstallFacts)
    host: Host = field(default_factory=Host)

    @property
    def method(self) -> str:
        """The speculative method in use: as given, else what vLLM would detect from the drafter."""
        if self.serve is not None and (given := self.serve.speculative.get("method")):
            return str(given)
        return self.drafter.family.replace("dflash2", "dflash") if self.drafter is not None else ""

    @property
    def draft_tokens(self) -> int | None:
        """num_speculative_tokens as given in the flags."""
        value = self.serve.speculative.get("num_speculative_tokens") if self.serve is not None else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def runner(self) -> str:
        """The runner in force for this target ("" when not known)."""
        if self.target is None:
            return self.install.runner_dense if self.install.runner_dense == self.install.runner_hybrid else ""
        return self.install.runner_hybrid if self.target.hybrid else self.install.runner_dense
