"""Ways in which a walk can lie in an install without ever running: text patches, for the detector's held-out test.

``FORWARD`` is where the accept step of the V1 sampler begins; ``{call}`` there is the walk's call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SAMPLER = "vllm/v1/sample/rejection_sampler.py"


@dataclass(frozen=True)
class Dead:
    """``guard`` is the line in front of the call in ``forward`` (none: no call). ``top`` and ``tail`` are added to the
    sampler's file, ``imports`` says whether it imports the walk. ``new`` are further files; ``{module}`` and
    ``{entry}`` name the walk in all of them. ``envs`` is added to ``vllm/envs.py``'s table."""

    name: str
    guard: str = ""
    top: str = ""
    tail: str = ""
    imports: bool = True
    new: dict[str, str] = field(default_factory=dict)
    envs: str = ""
    plugin: bool = False
    outside: bool = False  # the walk's own file lies in a --pythonpath folder


DEAD = (
    Dead("imported-never-called"),
    Dead("never-imported", imports=False),
    Dead("if-false", guard="if False:"),
    Dead("module-constant-off", guard="if _USE_LINKS and metadata.links is not None:", top="_USE_LINKS = False\n"),
    Dead(
        "environment-variable-off",
        guard='if os.environ.get("VLLM_LINKS", "0") == "1":',
        top="import os\n",
    ),
    Dead(
        "environment-read-at-import",
        guard="if _LINKS:",
        top='import os\n\n_LINKS = bool(int(os.getenv("VLLM_LINKS", "0")))\n',
    ),
    Dead(
        "vllm-envs-table-off",
        guard="if envs.VLLM_LINKS:",
        top="import vllm.envs as envs\n",
        envs='    "VLLM_LINKS": lambda: bool(int(os.getenv("VLLM_LINKS", "0"))),\n',
    ),
    Dead(
        "subclass-never-constructed",
        tail="""

class LinkedSampler(RejectionSampler):
    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        rows = len(metadata.num_draft_tokens)
        best = logits.argmax(dim=-1).view(rows, -1)
        return SamplerOutput({entry}(metadata.draft_token_ids.view(rows, -1), best, metadata.links), None)
""",
    ),
    Dead(
        "helper-of-a-dead-helper",
        tail="""

def _with_links(metadata, logits):
    rows = len(metadata.num_draft_tokens)
    return {entry}(metadata.draft_token_ids.view(rows, -1), logits.argmax(-1).view(rows, -1), metadata.links)


def _maybe_with_links(metadata, logits):
    return _with_links(metadata, logits)
""",
    ),
    Dead(
        "patch-function-nobody-calls",
        imports=False,
        new={
            "vllm/v1/sample/links_patch.py": """
from vllm.v1.sample import rejection_sampler

from {module} import {entry}


def _forward(self, metadata, draft_probs, logits, sampling_metadata):
    rows = len(metadata.num_draft_tokens)
    return {entry}(metadata.draft_token_ids.view(rows, -1), logits.argmax(-1).view(rows, -1), metadata.links)


def apply():
    rejection_sampler.RejectionSampler.forward = _forward
"""
        },
    ),
    Dead(
        "plugin-that-only-logs",
        imports=False,
        plugin=True,
        new={
            "linkpack/__init__.py": """
import logging


def register():
    logging.getLogger(__name__).info("linkpack is here; call linkpack.hook.apply() to turn it on")
""",
            "linkpack/hook.py": """
from vllm.v1.sample.rejection_sampler import RejectionSampler

from {module} import {entry}


def _forward(self, metadata, draft_probs, logits, sampling_metadata):
    rows = len(metadata.num_draft_tokens)
    return {entry}(metadata.draft_token_ids.view(rows, -1), logits.argmax(-1).view(rows, -1), metadata.links)


def apply():
    RejectionSampler.forward = _forward
""",
        },
    ),
    Dead("pythonpath-never-imported", imports=False, outside=True),
)
