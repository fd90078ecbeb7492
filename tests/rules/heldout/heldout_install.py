"""Small installs for the held-out test: files of a published wheel that matter, edited by text patches in memory."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from textwrap import indent

from heldout_lookalikes import LookAlike
from heldout_unreachable import SAMPLER, Dead
from heldout_walks import Walk

from reports.model import Record
from rules.tree import EntryPoint, InstallTree, SourceFile

FOLDERS = ("vllm/v1/sample/", "vllm/v1/worker/", "vllm/v1/spec_decode/", "vllm/config/", "vllm/envs.py")
V1_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
V2_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
V2_SAMPLER = "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py"
ENTRY_POINT = EntryPoint("vllm.general_plugins", "linkpack", "linkpack:register", "linkpack", "0.1")

#: Where the accept step begins, and what is put in front of it.
_STEP = "        output_token_ids = rejection_sample(\n"
_ROWS = "rows = len(metadata.num_draft_tokens)\n"
_CALL = (
    "{entry}(\n"
    "    torch.nn.functional.pad(metadata.draft_token_ids.view(rows, -1), (1, 0), value=-1),\n"
    "    logits.argmax(dim=-1).view(rows, -1),\n"
    "    metadata.links,\n"
    ")\n"
)
_RETURN = "return SamplerOutput(sampled_token_ids=output_token_ids, logprobs_tensors=None)\n"
_V1_IMPORT = "from vllm.v1.sample.sampler import Sampler\n"
_V1_USE = "        sampler_output = self.rejection_sampler(\n            spec_decode_metadata,\n"
_V1_MAKE = "            self.rejection_sampler = RejectionSampler(\n"
_V1_RUNNER_IMPORT = "from vllm.v1.sample.rejection_sampler import RejectionSampler\n"
_V2_STEP = "        sampled, num_sampled = rejection_sample(\n"
_V2_USE = "            sampler_output = self.rejection_sampler(\n                logits,\n"
_V2_IMPORT = "from vllm.v1.worker.gpu.sample.sampler import Sampler\n"
_METHOD = """\
    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        rows = len(metadata.num_draft_tokens)
        drafted = torch.nn.functional.pad(metadata.draft_token_ids.view(rows, -1), (1, 0), value=-1)
        tokens = {entry}(drafted, logits.argmax(dim=-1).view(rows, -1), metadata.links)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
"""
_HEAD = """\
import torch

from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler

from {module} import {entry}


"""


@dataclass(frozen=True)
class Install:
    """Files by (origin, path); what is in ``changed`` differs from the release."""

    version: str
    files: Mapping[tuple[str, str], bytes]
    changed: frozenset[str] = frozenset()
    entry_points: tuple[EntryPoint, ...] = ()
    note: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, text: str, origin: str = "vllm") -> Install:
        return replace(
            self, files={**self.files, (origin, path): text.encode()}, changed=self.changed | {f"{origin}:{path}"}
        )

    def text(self, path: str) -> str:
        return self.files["vllm", path].decode()

    def edit(self, path: str, old: str, new: str, origin: str = "vllm") -> Install:
        """The first occurrence; fails if there is none."""
        text = self.text(path)
        assert old in text, (self.version, path, old)
        return self.put(path, text.replace(old, new, 1), origin)

    def tree(self) -> InstallTree:
        contents = {hashlib.sha256(data).hexdigest(): data for data in self.files.values()}
        files = tuple(
            SourceFile(
                path, hashlib.sha256(data).hexdigest(), len(data), origin, f"{origin}:{path}" not in self.changed
            )
            for (origin, path), data in sorted(self.files.items())
        )
        changed = tuple(sorted(p.removeprefix("vllm:") for p in self.changed if p.startswith("vllm:")))
        record = Record("changed" if changed else "clean", changed, files=sum(f.origin == "vllm" for f in files))
        return InstallTree(self.version, files, contents.__getitem__, entry_points=self.entry_points, record=record)


@cache
def base(version: str, wheel: Path) -> Install:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") and n.startswith(FOLDERS)]
        return Install(version, {("vllm", name): archive.read(name) for name in names})


def _package(install: Install, walk: Walk, folder: str, origin: str = "vllm") -> tuple[Install, str]:
    """The walk's own files, as a package in that folder; its module name."""
    package = f"{folder}/links"
    if origin != "vllm":
        install = install.put(f"{folder}/__init__.py", "", origin)
    install = install.put(f"{package}/__init__.py", "", origin)
    install = install.put(f"{package}/core.py", walk.source, origin)
    for name, text in walk.helpers.items():
        install = install.put(f"{package}/{name}.py", text, origin)
    return install, f"{package}.core".replace("/", ".")


def _tables(install: Install) -> Install:
    """The V1 runner hands the drafter's tree to the sampler."""
    return install.edit(V1_RUNNER, _V1_USE, f"        spec_decode_metadata.links = self.drafter.links\n{_V1_USE}")


def _step(entry: str, guard: str = "if metadata.links is not None:") -> str:
    return indent(
        f"{_ROWS}{guard}\n" + indent("output_token_ids = " + _CALL.format(entry=entry) + _RETURN, "    "), " " * 8
    )


def own_file(install: Install, walk: Walk) -> Install:
    """The V1 sampler calls the walk, which lies in a package beside it."""
    install, module = _package(_tables(install), walk, "vllm/v1/sample")
    install = install.edit(SAMPLER, _STEP, _step(walk.entry) + _STEP)
    return install.edit(SAMPLER, _V1_IMPORT, f"{_V1_IMPORT}from {module} import {walk.entry}\n")


def v2(install: Install, walk: Walk) -> Install:
    """The V2 runner's sampler calls the walk."""
    install, module = _package(install, walk, "vllm/v1/worker/gpu/spec_decode")
    body = (
        "if self.links is not None:\n"
        "    rows = cu_num_logits.shape[0] - 1\n"
        "    best = processed_logits.argmax(-1).view(rows, -1)\n"
        f"    sampled = {walk.entry}(draft_sampled.view(rows, -1), best, self.links)\n"
        "    return processed_logits, sampled, (sampled >= 0).sum(dim=-1)\n"
    )
    install = install.edit(V2_SAMPLER, _V2_STEP, indent(body, " " * 8) + _V2_STEP)
    install = install.edit(V2_SAMPLER, _V2_IMPORT, f"{_V2_IMPORT}from {module} import {walk.entry}\n")
    return install.edit(
        V2_RUNNER, _V2_USE, f"            self.rejection_sampler.links = self.speculator.links\n{_V2_USE}"
    )


def inline(install: Install, walk: Walk) -> Install:
    """The walk lies in the sampler's own file, behind the chain kernels."""
    install = _tables(install).edit(SAMPLER, _STEP, _step(walk.entry) + _STEP)
    return install.put(SAMPLER, install.text(SAMPLER) + "\n\n" + walk.source)


def subclass_chosen(install: Install, walk: Walk) -> Install:
    """A subclass in a file of its own, chosen by the runner by method."""
    install, module = _package(_tables(install), walk, "vllm/v1/spec_decode")
    names = {"module": module, "entry": walk.entry}
    source = _HEAD.format(**names) + "class Verifier(RejectionSampler):\n" + _METHOD.format(**names)
    install = install.put("vllm/v1/sample/verifier.py", source)
    choose = (
        "            kind = Verifier if self.speculative_config.method == 'dflash' else RejectionSampler\n"
        "            self.rejection_sampler = kind(\n"
    )
    install = install.edit(V1_RUNNER, _V1_MAKE, choose)
    return install.edit(
        V1_RUNNER, _V1_RUNNER_IMPORT, f"{_V1_RUNNER_IMPORT}from vllm.v1.sample.verifier import Verifier\n"
    )


def subclass_registered(install: Install, walk: Walk) -> Install:
    """A subclass in a table of samplers that the runner looks up by the config's value."""
    install, module = _package(_tables(install), walk, "vllm/v1/spec_decode")
    names = {"module": module, "entry": walk.entry}
    source = (
        _HEAD.format(**names)
        + "class Wide(RejectionSampler):\n"
        + _METHOD.format(**names)
        + '\n\nSAMPLERS = {"standard": RejectionSampler, "wide": Wide}\n'
    )
    install = install.put("vllm/v1/sample/registry.py", source)
    choose = "            self.rejection_sampler = SAMPLERS[self.speculative_config.rejection_sample_method](\n"
    install = install.edit(V1_RUNNER, _V1_MAKE, choose)
    return install.edit(
        V1_RUNNER, _V1_RUNNER_IMPORT, f"{_V1_RUNNER_IMPORT}from vllm.v1.sample.registry import SAMPLERS\n"
    )


def _plugin(install: Install, walk: Walk, body: str) -> Install:
    install, module = _package(_tables(install), walk, "linkpack", "plugin:linkpack")
    text = body.replace("{module}", module).replace("{entry}", walk.entry)
    return replace(install.put("linkpack/__init__.py", text, "plugin:linkpack"), entry_points=(ENTRY_POINT,))


def plugin_method(install: Install, walk: Walk) -> Install:
    """A plugin sets ``RejectionSampler.forward``, keeping the old one for requests without a tree."""
    body = """
import functools

import torch


def register():
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample import rejection_sampler as place

    from {module} import {entry}

    before = place.RejectionSampler.forward

    @functools.wraps(before)
    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        links = getattr(metadata, "links", None)
        if links is None:
            return before(self, metadata, draft_probs, logits, sampling_metadata)
        rows = len(metadata.num_draft_tokens)
        tokens = {entry}(metadata.draft_token_ids.view(rows, -1), logits.argmax(-1).view(rows, -1), links)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    place.RejectionSampler.forward = forward
"""
    return _plugin(install, walk, body)


def plugin_class(install: Install, walk: Walk) -> Install:
    """A plugin replaces the class in the runner's module, by name."""
    body = """
import importlib

import torch


def register():
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from {module} import {entry}

    class Replacement(RejectionSampler):
        def forward(self, metadata, draft_probs, logits, sampling_metadata):
            rows = len(metadata.num_draft_tokens)
            tokens = {entry}(metadata.draft_token_ids.view(rows, -1), logits.argmax(-1).view(rows, -1), metadata.links)
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.rejection_sampler"):
        setattr(importlib.import_module(name), "RejectionSampler", Replacement)
"""
    return _plugin(install, walk, body)


def plugin_function(install: Install, walk: Walk) -> Install:
    """A plugin replaces the module function ``rejection_sample``."""
    body = """
from {module} import {entry}


def _stand_in(draft_token_ids, num_draft_tokens, max_len, cu_num, links, target_logits, *rest, **more):
    rows = len(num_draft_tokens)
    return {entry}(draft_token_ids.view(rows, -1), target_logits.argmax(-1).view(rows, -1), links)


def register():
    import vllm.v1.sample.rejection_sampler as module

    module.rejection_sample = _stand_in
"""
    return _plugin(install, walk, body)


def pythonpath_shadow(install: Install, walk: Walk) -> Install:
    """A --pythonpath folder holds a changed copy of the sampler, with the walk in it."""
    stock = install.text(SAMPLER)
    install = _tables(install)
    text = stock.replace(_STEP, _step(walk.entry) + _STEP, 1) + "\n\n" + walk.source
    return install.put(SAMPLER, text, "pythonpath:0")


def pythonpath_module(install: Install, walk: Walk) -> Install:
    """The sampler was changed by a line or two; the walk lies in a --pythonpath folder."""
    install, module = _package(_tables(install), walk, "sidecar", "pythonpath:0")
    install = install.edit(SAMPLER, _STEP, _step(walk.entry) + _STEP)
    return install.edit(SAMPLER, _V1_IMPORT, f"{_V1_IMPORT}from {module} import {walk.entry}\n")


Mount = Callable[[Install, Walk], Install]
MOUNTS: tuple[tuple[str, Mount], ...] = (
    ("0.23.0", own_file),
    ("0.33.0", v2),
    ("0.20.2", inline),
    ("0.23.0", subclass_chosen),
    ("0.33.0", plugin_method),
    ("0.20.2", subclass_registered),
    ("0.23.0", plugin_class),
    ("0.33.0", pythonpath_shadow),
    ("0.23.0", plugin_function),
    ("0.20.2", pythonpath_module),
    ("0.33.0", own_file),
)


def dead(install: Install, walk: Walk, way: Dead) -> Install:
    """The walk, put there in that way."""
    folder, origin = ("vllm/v1/sample", "vllm")
    if way.plugin:
        folder, origin = "linkpack", "plugin:linkpack"
        install = replace(install, entry_points=(ENTRY_POINT,))
    elif way.outside:
        folder, origin = "sidecar", "pythonpath:0"
    install, module = _package(_tables(install), walk, folder, origin)
    top = f"{way.top}from {module} import {walk.entry}\n" if way.imports else way.top
    if top:
        install = install.edit(SAMPLER, _V1_IMPORT, _V1_IMPORT + top)
    if way.guard:
        install = install.edit(SAMPLER, _STEP, _step(walk.entry, way.guard) + _STEP)
    if way.tail:
        install = install.put(SAMPLER, install.text(SAMPLER) + way.tail.replace("{entry}", walk.entry))
    for path, text in way.new.items():
        text = text.replace("{entry}", walk.entry).replace("{module}", module)
        install = install.put(path, text, "plugin:linkpack" if way.plugin else "vllm")
    if way.envs:
        mark = "environment_variables: dict[str, Callable[[], Any]] = {\n"
        install = install.edit("vllm/envs.py", mark, mark + way.envs)
    return install


def lookalike(install: Install, like: LookAlike) -> tuple[Install, str]:
    """The look-alike, put there; the path it lies at."""
    walk = Walk(like.name, like.entry, like.source)
    if like.where == "sampler":
        return own_file(install, walk), "vllm/v1/sample/links/core.py"
    path = "vllm/v1/spec_decode/extra.py" if like.where != "plain" else "vllm/v1/worker/extra.py"
    install = install.put(path, like.source)
    line = f"from {path.removesuffix('.py').replace('/', '.')} import {like.entry}\n"
    if like.where == "beside":
        call = "self.seen = " + _CALL.format(entry=like.entry)
        install = _tables(install).edit(SAMPLER, _STEP, indent(_ROWS + call, " " * 8) + _STEP)
        return install.edit(SAMPLER, _V1_IMPORT, _V1_IMPORT + line), path
    if like.where == "drafter":
        call = f"        self.hints = {like.entry}(self.input_batch.token_ids_cpu, self.num_spec_tokens)\n"
        install = install.edit(V1_RUNNER, _V1_USE, call + _V1_USE)
    return install.edit(V1_RUNNER, _V1_RUNNER_IMPORT, _V1_RUNNER_IMPORT + line), path
