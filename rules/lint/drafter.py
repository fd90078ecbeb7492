"""The drafter against its target: everything that two config files, tensor headers and the install can show.

A drafter that does not fit rarely crashes vLLM: output stays right and acceptance falls. Hence each of these checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rules.lint.model import Case, Finding

ISSUE = "https://github.com/vllm-project/vllm/issues/"
PULL = "https://github.com/vllm-project/vllm/pull/"
FLOAT_DTYPES = {"bfloat16", "float16", "float32"}


def unread_files(case: Case) -> Iterator[Finding]:
    for folder in (case.target, case.drafter.folder if case.drafter else None):
        if folder is not None and folder.problems:
            yield Finding(
                "model-unreadable",
                "error",
                f"{folder.name}: {len(folder.problems)} file(s) could not be read",
                tuple(f"{file}: {why}" for file, why in folder.problems),
                "Repair or re-download these files; what they would have shown is not checked.",
            )


def weights(case: Case) -> Iterator[Finding]:
    """A folder of configs alone loads nothing, or random weights. A folder that was not read at all is another's."""
    for folder in (case.target, case.drafter.folder if case.drafter else None):
        if folder is not None and folder.files and not any(map(_is_weights, folder.files)):
            yield Finding(
                "weights-missing",
                "warning" if folder is case.target else "error",
                f"{folder.name}: no file of weights is in the folder",
                tuple(f"{folder.name}/{file}" for file in sorted(folder.files)[:5]),
                "Download the whole model: what its tensors would have shown is not checked.",
            )


def _is_weights(file: str) -> bool:
    return file.endswith((".safetensors", ".gguf", ".pth", ".bin")) and file != "training_args.bin"


def block_size(case: Case) -> Iterator[Finding]:
    """K draft tokens need a block of at least K+1: one slot of the block is the anchor."""
    drafter, k = case.drafter, case.draft_tokens
    if drafter is None or not drafter.family.startswith(("dflash", "dspark")):
        return
    block = drafter.block_size
    if block is None:
        yield Finding(
            "block-size-missing",
            "warning",
            "the drafter's config does not state its block size",
            (f"{drafter.folder.name}/config.json: no block_size",),
            'Add "block_size" (top level) with the value the drafter was trained with.',
        )
        return
    usable = block if drafter.family == "dspark" else block - 1
    if k is not None and k > usable:
        yield Finding(
            "draft-tokens-exceed-block",
            "error",
            f"num_speculative_tokens {k} is more than the {usable} positions that a block of {block} can draft",
            (
                f"--speculative-config: num_speculative_tokens={k}",
                f"{drafter.folder.name}/config.json: block_size={block}",
            ),
            f"Set num_speculative_tokens to {usable} or less: no vLLM release checks this, the surplus positions"
            " accept nothing.",
            "https://github.com/eugr/spark-vllm-docker/issues/364",
        )
    elif k is not None and k < usable and drafter.family == "dspark":
        yield Finding(
            "dspark-block-cut",
            "error",
            f"a DSpark drafter of block {block} is served with {k} draft tokens",
            (
                f"--speculative-config: num_speculative_tokens={k}",
                f"{drafter.folder.name}/config.json: block {block}",
            ),
            f"Set num_speculative_tokens to {usable}: another layout than it was trained on.",
            PULL + "50012",
        )
    inner = drafter.folder.config.get("dflash_config")
    if "block_size" not in drafter.folder.config and isinstance(inner, Mapping) and "block_size" in inner:
        yield Finding(
            "block-size-nested",
            "info",
            "block_size stands only inside dflash_config",
            (f"{drafter.folder.name}/config.json: dflash_config.block_size={block}",),
            "Write it at the top level too: the reference loaders of DFlash and DDTree read only that.",
        )


def architecture(case: Case) -> Iterator[Finding]:
    drafter = case.drafter
    if drafter is None:
        return
    given = str(case.serve.speculative.get("method", "")) if case.serve else ""
    family = drafter.family
    fits = {
        "dflash": ("dflash", "dflash2"),
        "dspark": ("dspark",),
        "eagle3": ("eagle3",),
        "eagle": ("eagle",),
        "ddtree": ("dflash",),
    }
    if given in fits and family and family not in fits[given]:
        yield Finding(
            "method-does-not-fit-drafter",
            "error",
            f"method {given!r} with a drafter of family {family!r}",
            (f"{drafter.folder.name}/config.json: architectures={list(drafter.folder.architectures)}",),
            f'Use "method": "{family.replace("dflash2", "dflash")}", or another drafter.',
            ISSUE + "49614",
        )
    if not drafter.folder.architectures and not drafter.speculators:
        yield Finding(
            "architecture-missing",
            "error",
            "the drafter's config names no architecture",
            (f"{drafter.folder.name}/config.json: architectures missing",),
            'Add "architectures": ["DFlashDraftModel"] (or what it is).',
        )
    methods = case.install.methods
    wanted = given or family.replace("dflash2", "dflash")
    if wanted and wanted != "ddtree" and methods and wanted not in methods:
        yield Finding(
            "method-not-in-install",
            "error",
            f"this install does not know the speculative method {wanted!r}",
            (f"vLLM {case.install.version}: {', '.join(methods)}",),
            "Upgrade vLLM, or choose a method of that list.",
        )
    if family == "dflash2" and case.runner == "V1":
        yield Finding(
            "dflash2-on-v1",
            "error",
            "a DFlash2 drafter runs as plain DFlash (or not at all) on the V1 runner",
            (f"runner in force: {case.runner}", f"architectures: {list(drafter.folder.architectures)}"),
            "Use a release whose V2 runner serves it (0.28.0 or newer), without VLLM_USE_V2_MODEL_RUNNER=0.",
            PULL + "52816",
        )


def vocabulary(case: Case) -> Iterator[Finding]:
    target, drafter = case.target, case.drafter
    if target is None or drafter is None:
        return
    own, theirs = drafter.folder.number("vocab_size"), target.number("vocab_size")
    reduced = drafter.folder.config.get("draft_vocab_size")
    tensors = drafter.folder.tensors
    has_head = any(name.endswith("lm_head.weight") for name in tensors)
    has_map = any(name.split(".")[-1] == "d2t" for name in tensors)
    where = (
        f"{drafter.folder.name}: vocab_size={own}, draft_vocab_size={reduced}",
        f"{target.name}: vocab_size={theirs}",
    )
    if own is None:
        yield Finding(
            "vocabulary-missing",
            "error",
            "the drafter's config has no vocab_size and takes a class default (151936)",
            where,
            f'Add "vocab_size": {theirs}.',
            "https://github.com/vllm-project/recipes/pull/782",
        )
    if isinstance(reduced, int) and theirs is not None and reduced < theirs:
        if tensors and not (has_map and has_head):
            missing = [name for name, there in (("d2t", has_map), ("lm_head.weight", has_head)) if not there]
            yield Finding(
                "reduced-vocabulary-without-map",
                "error",
                f"draft_vocab_size {reduced} is smaller than the target's vocabulary, but the checkpoint has no"
                f" {' and no '.join(missing)}",
                where,
                "Export the drafter with its own lm_head and the d2t map.",
                "https://github.com/vllm-project/vllm-ascend/issues/11374",
            )
    elif own is not None and theirs is not None and own != theirs:
        if not has_head and tensors:
            yield Finding(
                "vocabulary-differs",
                "error",
                f"drafter and target have different vocabularies ({own}, {theirs}), and the drafter no own head",
                where,
                "This drafter was made for another target: retrain it, or use the one for this target.",
                PULL + "46435",
            )
        elif case.install.outcome("own-lm-head") == "no":
            yield Finding(
                "own-head-overwritten",
                "error",
                f"vocabularies differ ({own}, {theirs}) and this install may overwrite the drafter's own lm_head: it"
                " would accept nothing",
                (*where, "verdict own-lm-head: no"),
                "Use 0.25.1 or newer, or the V1 runner (VLLM_USE_V2_MODEL_RUNNER=0).",
                PULL + "46435",
            )


def mask_token(case: Case) -> Iterator[Finding]:
    drafter, target = case.drafter, case.target
    if drafter is None or not drafter.family.startswith(("dflash", "dspark")):
        return
    mask = drafter.mask_token_id
    file = f"{drafter.folder.name}/config.json"
    if mask is None:
        if "mask_embedding.pt" not in drafter.folder.files:
            yield Finding(
                "mask-token-missing",
                "error",
                "the drafter's config has no mask_token_id",
                (file,),
                'Add "dflash_config": {"mask_token_id": ...} with the id used in training.',
            )
        return
    live: dict[int, list[str]] = {}
    for folder in (target, drafter.folder):
        for source in (folder.config, folder.text, folder.generation) if folder else ():
            for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
                value = source.get(key)
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, int):
                        live.setdefault(item, []).append(key)
    if mask in live:
        yield Finding(
            "mask-token-is-live",
            "error",
            f"mask_token_id {mask} is also {', '.join(sorted(set(live[mask])))}: a token that occurs in text",
            (f"{file}: mask_token_id={mask}",),
            "Train and serve with an id that no text contains; a fallback of the trainer wrote this one.",
            "https://github.com/NVIDIA-NeMo/Automodel/pull/2461",
        )
    rows = target.number("vocab_size") if target else None
    if target is not None:
        embedding = next(
            (shape for name, (_, shape) in target.tensors.items() if name.endswith("embed_tokens.weight")), None
        )
        rows = embedding[0] if embedding else rows
    if rows is not None and not 0 <= mask < rows:
        yield Finding(
            "mask-token-outside-embedding",
            "error",
            f"mask_token_id {mask} is no row of the target's embedding ({rows} rows)",
            (f"{file}: mask_token_id={mask}",),
            "The serving target has no such row: retrain with an id below that.",
            "https://github.com/NVIDIA/Model-Optimizer/issues/1621",
        )


def template(case: Case) -> Iterator[Finding]:
    """Thinking mode and template are part of the drafter's training contract."""
    drafter, target = case.drafter, case.target
    if drafter is None or target is None or "enable_thinking" not in target.template:
        return
    trained = nested(drafter.folder.config, "ddtree_training", "template_kwargs", "enable_thinking")
    kwargs = case.serve.flags.get("default-chat-template-kwargs") if case.serve else None
    served = kwargs.get("enable_thinking") if isinstance(kwargs, Mapping) else None
    if isinstance(trained, bool) and isinstance(served, bool) and trained != served:
        yield Finding(
            "thinking-mode-differs",
            "error",
            f"the drafter was trained with enable_thinking={trained}, requests default to {served}",
            (f"{drafter.folder.name}/config.json", "--default-chat-template-kwargs"),
            "Serve the mode it was trained for, or retrain on both.",
            "https://github.com/z-lab/dflash/issues/60",
        )
    elif trained is None:
        yield Finding(
            "thinking-mode-unknown",
            "info",
            "the target's template has a thinking mode and the drafter does not say which one it was trained on",
            (f"{target.name}: chat template reads enable_thinking",),
            "Measure acceptance in both modes: the wrong one has cost from 9.5 to 2.7-3.9 tokens a round.",
            "https://github.com/z-lab/dflash/issues/60",
        )


def quantised_target(case: Case) -> Iterator[Finding]:
    target = case.target
    if target is None or case.drafter is None:
        return
    method = nested(target.config, "quantization_config", "quant_method") or (
        case.serve.flags.get("quantization") if case.serve else None
    )
    if method:
        yield Finding(
            "quantised-target",
            "warning",
            f"the target is quantised ({method}): its hidden states are not those the drafter learned from",
            (f"{target.name}/config.json: quantization_config",),
            "Measure acceptance by position before relying on it; where it falls off a cliff, cut K there or retrain"
            " on this target.",
            "https://github.com/z-lab/dflash/issues/152",
        )


def nested(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


CHECKS = (unread_files, weights, block_size, architecture, vocabulary, mask_token, template, quantised_target)
