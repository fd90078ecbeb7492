"""The frozen target: its layers' outputs, embedding and head, whatever its architecture.

Layer id i taps the output of decoder layer i, before the final norm: HF's ``hidden_states[i + 1]``. Hooks read it, so
hybrids (GDN and attention layers mixed) need nothing of their own. Documents never share a forward row: each is a row,
padded on the right, which no causal layer lets reach an earlier position, recurrent ones included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.training.errors import PreflightError
from ddtree.training.files import digest, file_digest, fingerprint


class _StopForward(Exception):  # noqa: N818 (a signal, no error)
    """Raised by the last hook: no later layer is needed."""


def default_layer_ids(layers: int, taps: int = 5) -> tuple[int, ...]:
    """z-lab's rule: spread evenly over layers 1 .. layers - 3."""
    if taps == 1 or layers < 5:
        return (layers // 2,)
    ids = sorted({round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)})
    return tuple(ids)


def text_config(config: Any) -> Any:
    """The language model's part of a configuration (multimodal models nest it)."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


class Target:
    """A causal language model, frozen, with the given layers tapped.

    Raises:
        PreflightError: an architecture whose layers or head cannot be found or whose logits are not head(norm(h)).
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config: Any = text_config(model.config)
        self.layer_ids = tuple(layer_ids)
        base: Any = model.get_decoder() if hasattr(model, "get_decoder") else model.model  # type: ignore[operator]
        self.base = getattr(base, "language_model", base)
        if not hasattr(self.base, "layers") or not hasattr(self.base, "norm"):
            raise PreflightError(
                "target-layout", f"{type(model).__name__} has no decoder layers and norm where expected"
            )
        self.layers: nn.ModuleList = self.base.layers
        if max(layer_ids) >= len(self.layers) or min(layer_ids) < 0:
            raise PreflightError("layer-ids", f"layer ids {list(layer_ids)} on a target of {len(self.layers)} layers")
        if getattr(self.config, "final_logit_softcapping", None) or getattr(model, "logit_scale", None):
            raise PreflightError("target-logits", "the target caps or scales its logits; the drafter's head would not")
        self.embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
        output = model.get_output_embeddings()  # type: ignore[operator]
        if output is None:
            raise PreflightError("target-head", f"{type(model).__name__} has no output embedding")
        self.head: Tensor = output.weight
        self.early_stop = True
        self._taps: dict[int, Tensor] = {}
        self._record = False
        for i in sorted(set(self.layer_ids)):
            self.layers[i].register_forward_hook(self._hook(i))

    def _hook(self, i: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._record:
                self._taps[i] = output[0] if isinstance(output, tuple) else output
                if self.early_stop and i == max(self.layer_ids):
                    raise _StopForward

        return hook

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def width(self) -> int:
        """m * H: features per token."""
        return len(self.layer_ids) * int(self.config.hidden_size)

    @torch.no_grad()
    def capture(self, ids: Tensor) -> Tensor:
        """Tapped layer outputs of right-padded documents: int [b, S] -> [b, S, m * H] in the target's dtype."""
        self._taps, self._record = {}, True
        try:
            self.base(input_ids=ids, use_cache=False)
        except _StopForward:
            pass
        finally:
            self._record = False
        taps, self._taps = self._taps, {}
        return torch.cat([taps[i] for i in self.layer_ids], -1)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states (after the last norm): int [b, S] -> [b, S, H]."""
        return self.base(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def logits(self, ids: Tensor) -> Tensor:
        """head(norm(h)): int [b, S] -> [b, S, V]."""
        return F.linear(self.hidden(ids), self.head)


def load_target(folder: Path, layer_ids: Sequence[int] | None, dtype: torch.dtype, device: str) -> Target:
    """Load from a Hugging Face folder; ``None`` taps the default layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    layers = int(text_config(model.config).num_hidden_layers)
    return Target(model, layer_ids or default_layer_ids(layers))


def target_identity(folder: Path) -> dict[str, Any]:
    """What makes a target this target: configuration and weights, by hash."""
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")])
    if not (folder / "config.json").exists() or not weights:
        raise PreflightError("target-missing", f"{folder} holds no config.json with weights beside it")
    config = json.loads((folder / "config.json").read_text())
    return {
        "name": folder.resolve().name,
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "config": file_digest(folder / "config.json"),
        "weights": digest("".join(f"{w.name}{fingerprint(w)}" for w in weights).encode()),
    }
