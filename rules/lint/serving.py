"""The serve flags against the install, the models and the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rules.lint.drafter import ISSUE, PULL
from rules.lint.model import Case, Finding

# Flags and keys that did something once, or do nothing on a runner (vllm/config/speculative.py of the releases named).
GONE_BACKENDS = {"TREE_ATTN"}
LOSSY = {
    "synthetic": "accepts by a fixed rate: the output is garbage, it exists for benchmarks",
    "fly": "lets uncertain mismatches through: the output distribution is not the target's",
}


def parallel_size(case: Case) -> int:
    return case.serve.integer("tensor-parallel-size", 1) if case.serve else 1


def token_budget(case: Case) -> Iterator[Finding]:
    """#53970: a step schedules up to max_num_seqs * (K+1) tokens."""
    if case.serve is None or case.draft_tokens is None:
        return
    k, seqs, tokens = (
        case.draft_tokens,
        case.serve.integer("max-num-seqs", 0),
        case.serve.integer("max-num-batched-tokens", 0),
    )
    if seqs and tokens and seqs * (k + 1) > tokens:
        yield Finding(
            "batched-tokens-too-few",
            "error",
            f"max_num_seqs {seqs} x (1 + {k} draft tokens) = {seqs * (k + 1)} is more than max_num_batched_tokens"
            f" {tokens}",
            (f"--max-num-seqs {seqs}", f"--max-num-batched-tokens {tokens}"),
            f"Set --max-num-batched-tokens to {seqs * (k + 1)} or more, or --max-num-seqs to"
            f" {max(1, tokens // (k + 1))} or less.",
            ISSUE + "53970",
        )
    elif k >= 32 and not seqs:
        yield Finding(
            "batch-limit-unset",
            "warning",
            f"{k} draft tokens with the default max_num_seqs reserve {k - 1} slots a sequence",
            ("--max-num-seqs is not given",),
            "Give --max-num-seqs and --max-num-batched-tokens so that seqs x (K+1) fits.",
            ISSUE + "53970",
        )


def lossy_acceptance(case: Case) -> Iterator[Finding]:
    if case.serve is None:
        return
    method = str(case.serve.speculative.get("rejection_sample_method", ""))
    if method in LOSSY:
        yield Finding(
            "lossy-acceptance",
            "error",
            f"rejection_sample_method {method!r} {LOSSY[method]}",
            ("--speculative-config",),
            "Remove it: the default is lossless.",
            PULL + "53987",
        )
    known = case.install.rejection_methods
    if method and known and method not in known:
        yield Finding(
            "rejection-method-unknown",
            "error",
            f"this install knows no rejection_sample_method {method!r}",
            (f"vLLM {case.install.version}: {', '.join(known)}",),
            "Names changed between 0.20 and 0.22: use one of that list.",
        )
    for key in ("posterior_threshold", "posterior_alpha", "acceptance_method"):
        if key in case.serve.speculative:
            yield Finding(
                "typical-acceptance",
                "error",
                f"{key} asks for typical acceptance, which changes the output distribution",
                ("--speculative-config",),
                "Remove it.",
            )


def dead_flags(case: Case) -> Iterator[Finding]:
    if case.serve is None:
        return
    spec = case.serve.speculative
    if "max_model_len" in spec and case.runner != "V2":
        yield Finding(
            "dead-draft-max-model-len",
            "warning",
            "speculative max_model_len has no effect in the V1 runner",
            (f"--speculative-config: max_model_len={spec['max_model_len']}",),
            "Remove it; limit --max-model-len instead.",
            ISSUE + "52258",
        )
    mask = case.install.outcome("tree-mask")
    backend = str(
        case.serve.flags.get("attention-backend", "") or _get(case.serve.flags.get("attention-config"), "backend")
    )
    if backend in GONE_BACKENDS and mask and mask != "yes":
        yield Finding(
            "backend-gone",
            "error",
            f"attention backend {backend} is not in this install",
            (f"--attention-backend {backend}",),
            "It was removed in 0.21.0, and was never tree verification.",
            PULL + "42121",
        )
    elif backend in GONE_BACKENDS:
        yield Finding(
            "tree-attention-is-not-verification",
            "warning",
            f"{backend} masks a drafted tree; in a stock install the verifier still walks a chain",
            (f"--attention-backend {backend}",),
            "See the four stages in the audit: mask without walk gains nothing.",
            PULL + "42121",
        )
    if "speculative_token_tree" in spec and case.install.outcome("tree-build") == "no":
        yield Finding(
            "token-tree-gone",
            "error",
            "speculative_token_tree is not a field of this install's SpeculativeConfig",
            ("--speculative-config: speculative_token_tree",),
            "Remove it.",
            PULL + "42121",
        )
    drafts = spec.get("num_speculative_tokens")
    if case.method in ("dflash", "dspark", "eagle3", "mtp") and drafts is None:
        yield Finding(
            "draft-tokens-missing",
            "warning",
            "num_speculative_tokens is not given",
            ("--speculative-config",),
            "Give it: block_size - 1 for DFlash.",
        )
    if isinstance(drafts, int) and drafts < 1:
        yield Finding(
            "draft-tokens-not-positive",
            "error",
            f"num_speculative_tokens is {drafts}",
            ("--speculative-config",),
            "Give at least 1.",
        )


def eager(case: Case) -> Iterator[Finding]:
    if case.serve is not None and case.serve.flags.get("enforce-eager") is True and case.method:
        yield Finding(
            "eager-hides-the-cost",
            "warning",
            "--enforce-eager: every step is bound by launches, so chain and tree cost alike and any comparison is"
            " void",
            ("--enforce-eager",),
            "Remove it before measuring or serving.",
            PULL + "42910",
        )


def random_prompts(case: Case) -> Iterator[Finding]:
    name = str(case.serve.flags.get("dataset-name", "")) if case.serve else ""
    if name.startswith("random") and case.method:
        yield Finding(
            "random-prompts",
            "error",
            "acceptance on random tokens says nothing about real text",
            (f"--dataset-name {name}",),
            "Measure on real prompts of your own.",
            ISSUE + "33497",
        )


def kv_dtype(case: Case) -> Iterator[Finding]:
    if case.serve is None or not case.method:
        return
    kv = str(case.serve.flags.get("kv-cache-dtype", "auto"))
    if kv in ("auto", "bfloat16", "float16", "") or "kv_cache_dtype" in case.serve.speculative:
        return
    if case.method in ("dflash", "dspark", "ddtree"):
        yield Finding(
            "kv-dtype-with-drafter",
            "warning",
            f"KV cache in {kv} also holds the drafter's keys and values: crashes on old releases, acceptance loss on"
            " others",
            (f"--kv-cache-dtype {kv}",),
            'Give the drafter its own: "kv_cache_dtype": "auto" in --speculative-config (0.26.0 or newer), or'
            " measure.",
            ISSUE + "41559",
        )


def gpu_limits(case: Case) -> Iterator[Finding]:
    dims = [
        (f.name, f.head_dim) for f in (case.target, case.drafter.folder if case.drafter else None) if f is not None
    ]
    backend = str(case.serve.speculative.get("attention_backend", "")).upper() if case.serve else ""
    for gpu in case.host.gpus[:1]:
        for name, dim in dims:
            if dim is not None and dim >= 256 and (0, 0) < gpu.capability < (9, 0) and case.method == "dflash":
                yield Finding(
                    "head-size-on-gpu",
                    "warning",
                    f"{name}: head size {dim} on compute capability {gpu.capability[0]}.{gpu.capability[1]}: few"
                    " backends serve a non-causal drafter there",
                    (gpu.name,),
                    "Try it before planning on it (FLEX_ATTENTION, TRITON_ATTN), or retrain the drafter with head"
                    " size 128.",
                    ISSUE + "40382",
                )
        if (
            backend == "FLASHINFER"
            and gpu.capability >= (10, 0)
            and case.install.outcome("drafter-sliding-window") == "no"
        ):
            yield Finding(
                "flashinfer-drafter-on-blackwell",
                "error",
                "a FlashInfer drafter under CUDA graphs accepts nothing or reads out of bounds on Blackwell with this"
                " install",
                (gpu.name, "--speculative-config: attention_backend"),
                'Set "attention_backend": "FLASH_ATTN", or use 0.26.0 or newer.',
                PULL + "48167",
            )


def parallelism(case: Case) -> Iterator[Finding]:
    if case.serve is None:
        return
    size = parallel_size(case)
    for folder in (case.target, case.drafter.folder if case.drafter else None):
        if folder is None or size == 1:
            continue
        heads = folder.number("num_attention_heads")
        if heads and heads % size:
            yield Finding(
                "heads-not-divisible",
                "error",
                f"{folder.name}: {heads} attention heads do not divide by tensor-parallel size {size}",
                (f"--tensor-parallel-size {size}",),
                f"Use a size that divides {heads}.",
            )
    if case.host.gpus and size > len(case.host.gpus):
        yield Finding(
            "gpus-too-few",
            "error",
            f"tensor-parallel size {size} on a host with {len(case.host.gpus)} GPU(s)",
            (f"--tensor-parallel-size {size}",),
            "Lower it.",
        )
    stages = case.serve.integer("pipeline-parallel-size", 1)
    if stages > 1 and case.method in ("dflash", "dspark", "ddtree", "eagle3"):
        yield Finding(
            "pipeline-parallel",
            "error",
            f"pipeline parallel ({stages}) with a drafter that needs hidden states of several layers",
            (f"--pipeline-parallel-size {stages}",),
            "Use tensor parallel.",
        )
    torch, cuda = case.host.torch, case.host.cuda
    if size > 1 and torch.startswith("2.10") and cuda.startswith("12.8"):
        yield Finding(
            "known-bad-torch-pair",
            "warning",
            f"torch {torch} with CUDA {cuda}: illegal memory accesses were reported at tensor parallel 2 with DFlash",
            (f"torch {torch}, CUDA {cuda}",),
            "Use the pair that the vLLM release pins.",
            ISSUE + "41190",
        )


def target_interface(case: Case) -> Iterator[Finding]:
    """#25927: a target must hand out its hidden states; qwen3_next does so only where the V2 runner serves dflash."""
    if case.target is None or case.method not in ("dflash", "dspark", "eagle3"):
        return
    kind = str(case.target.config.get("model_type", ""))
    if kind == "qwen3_next" and case.install.version and case.install.runner_dense == "V1":
        yield Finding(
            "target-gives-no-hidden-states",
            "error",
            "Qwen3-Next hands out no intermediate hidden states in this install",
            (f"{case.target.name}: model_type={kind}", f"vLLM {case.install.version}"),
            "Use 0.33.0 or newer.",
            ISSUE + "25927",
        )


def structured_output(case: Case) -> Iterator[Finding]:
    flags = case.serve.flags if case.serve else {}
    if case.method and any(key.startswith(("tool-call", "structured-outputs", "guided")) for key in flags):
        yield Finding(
            "structured-output",
            "info",
            "structured output or tool calls with speculation: wrong and slow cases were reported",
            ("serve flags",),
            "Send one request with a JSON schema, speculation on and off, before relying on it.",
            ISSUE + "53777",
        )


def _get(value: object, key: str) -> str:
    return str(value.get(key, "")) if isinstance(value, Mapping) else ""


CHECKS = (
    token_budget,
    lossy_acceptance,
    dead_flags,
    eager,
    random_prompts,
    kv_dtype,
    gpu_limits,
    parallelism,
    target_interface,
    structured_output,
)
