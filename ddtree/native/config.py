"""Turns ``method: "ddtree"`` into what vLLM's configuration knows, and refuses what the native path cannot serve.

Two functions of ``EngineArgs`` and one property of ``SpeculativeConfig`` are wrapped; each wrapper passes straight
through unless ddtree was asked for. The options travel to the workers in ``VllmConfig.additional_config["ddtree"]``.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

from ddtree.native.adapters import Fit, fit_of_installed
from ddtree.native.options import (
    OptionError,
    Options,
    block_size_of,
    capture_sizes,
    check_scheduler,
    resolve,
    split_options,
)

logger = logging.getLogger("vllm.ddtree")
METHOD = "ddtree"
CUSTOM_BACKEND = "ddtree.native.v1.attention.DDTreeAttentionBackend"
_MARK = "_ddtree_wrapped"


def install() -> None:
    """Wrap the seams once per process. A second copy of the plugin is named, not stacked."""
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:  # no vLLM front end in this process
        logger.debug("ddtree: EngineArgs is not importable (%s); nothing registered", error)
        return
    owner = getattr(EngineArgs, _MARK, None)
    if owner is not None:
        if owner != __file__:
            logger.warning("ddtree: another copy is already registered (%s); %s stays out", owner, __file__)
        return
    for name in ("create_speculative_config", "create_engine_config"):
        if not callable(getattr(EngineArgs, name, None)):
            logger.warning("ddtree: EngineArgs has no %s; the plugin does not fit this vLLM and stays out", name)
            return
    EngineArgs.create_speculative_config = _speculative(EngineArgs.create_speculative_config)
    EngineArgs.create_engine_config = _engine(EngineArgs.create_engine_config)
    setattr(EngineArgs, _MARK, __file__)
    register_backend()


def register_backend() -> None:
    """Name our attention backend CUSTOM, unless another plugin has taken that name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, CUSTOM_BACKEND)


def asked(args: Any) -> bool:
    """Whether these EngineArgs ask for ddtree, by method or by additional config."""
    method = (args.speculative_config or {}).get("method") or getattr(args, "spec_method", None)
    return method == METHOD or METHOD in (args.additional_config or {})


def _speculative(original: Any) -> Any:
    @functools.wraps(original)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not asked(self):
            return original(self, *args, **kwargs)
        translate(self)
        made = original(self, *args, **kwargs)
        if made is not None:
            # The scheduler need not reserve rows for drafting: DFlash drafts in a pass of its own.
            object.__setattr__(made, METHOD, True)
            _free_draft_slots(type(made))
        return made

    return create_speculative_config


def translate(args: Any) -> None:
    """Rewrite EngineArgs in place: method dflash, options in additional_config. Idempotent."""
    speculative = dict(args.speculative_config or {})
    for flag, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        value = getattr(args, flag, None)
        if value is not None:
            speculative[key] = value
            setattr(args, flag, None)
    given = dict((args.additional_config or {}).get(METHOD) or {})
    if speculative.get("method") == METHOD:
        speculative, ours = split_options(speculative)
        given = {**given, **ours}
    elif speculative.get("method") == "dflash":
        given.setdefault("budget", speculative.get("num_speculative_tokens"))
    else:
        raise OptionError(
            "ddtree-method",
            f'additional_config asks for ddtree, and the speculative method is {speculative.get("method")!r}',
            'use "ddtree" (or "dflash" in the form without patches)',
        )
    options = resolve(given, drafter_block_size(speculative.get("model")))
    if given.get("budget") != speculative.get("num_speculative_tokens"):
        raise OptionError(
            "ddtree-options-contradict",
            f'budget {given.get("budget")}, num_speculative_tokens {speculative.get("num_speculative_tokens")}',
            "they are the same thing: give one",
        )
    args.speculative_config = speculative
    args.additional_config = {**(args.additional_config or {}), METHOD: options.as_dict()}


def drafter_block_size(model: Any) -> int | None:
    """Block size from a drafter's config.json where the drafter is a local folder, else None (the worker checks it)."""
    path = Path(str(model)) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return block_size_of(config) if isinstance(config, dict) else None


def _free_draft_slots(cls: Any) -> None:
    original = cls.__dict__.get("max_num_new_slots_for_drafting")
    if not isinstance(original, property) or getattr(original.fget, METHOD, False):
        return

    def max_num_new_slots_for_drafting(self: Any) -> int:
        assert original.fget is not None
        return 0 if getattr(self, METHOD, False) else original.fget(self)

    setattr(max_num_new_slots_for_drafting, METHOD, True)
    cls.max_num_new_slots_for_drafting = property(max_num_new_slots_for_drafting)


def _engine(original: Any) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not asked(self):
            return original(self, *args, **kwargs)
        translate(self)
        options = resolve(self.additional_config[METHOD], drafter_block_size(self.speculative_config.get("model")))
        require_fit(fit_of_installed(), options.unproven)
        claim_backend(self)
        claim_graphs(self, options)
        config = original(self, *args, **kwargs)
        refuse_unsupported(config)
        claim_worker(config)
        scheduler = config.scheduler_config
        note = check_scheduler(options.budget, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        if note:
            logger.warning("ddtree: %s", note)
        logger.info("ddtree: budget %d, horizon %d, top_k %d", options.budget, options.horizon, options.top_k)
        return config

    return create_engine_config


def require_fit(fit: Fit, unproven: bool) -> None:
    """Raises OptionError where no adapter fits the installed vLLM, or only one that was never run on a GPU."""
    if fit.line is None:
        raise OptionError("ddtree-no-adapter", f"no adapter fits vLLM {fit.version}: {'; '.join(fit.missing[:5])}")
    if not fit.proven and not unproven:
        raise OptionError(
            "ddtree-adapter-unproven",
            f"the adapter for vLLM {fit.line} fits {fit.version} by its source, but was not run on a GPU",
            'add "unproven": true to the speculative config to use it all the same',
        )


def claim_backend(args: Any) -> None:
    """Select our attention backend; another explicit choice is refused rather than overridden."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    chosen = args.attention_backend or args.attention_config.backend
    name = getattr(chosen, "name", chosen)
    if name not in (None, "CUSTOM"):
        raise OptionError(
            "ddtree-attention-backend",
            f"attention backend {name} cannot mask a tree",
            "leave --attention-backend out, or say CUSTOM; the drafter's own is speculative_config.attention_backend",
        )
    register_backend()
    if custom.get_path() != CUSTOM_BACKEND:
        raise OptionError("ddtree-custom-taken", f"backend CUSTOM is registered to {custom.get_path()}")
    if chosen is None:
        args.attention_backend = custom


def claim_graphs(args: Any, options: Options) -> None:
    """CUDA graph sizes in whole trees, unless the user chose sizes."""
    compilation = args.compilation_config
    chosen = (
        args.cudagraph_capture_sizes,
        args.max_cudagraph_capture_size,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )
    if args.enforce_eager or any(c is not None for c in chosen):
        return
    seqs = args.max_num_seqs or 256
    tokens = args.max_num_batched_tokens or 8192
    args.cudagraph_capture_sizes = capture_sizes(options.budget, seqs, tokens)


def claim_worker(config: Any) -> None:
    """Our worker in place of the stock GPU worker; a foreign worker class is refused."""
    parallel = config.parallel_config
    ours = "ddtree.native.v1.worker.DDTreeWorker"
    if parallel.worker_cls in ("auto", "vllm.v1.worker.gpu_worker.Worker"):
        parallel.worker_cls = ours
    elif parallel.worker_cls != ours:
        raise OptionError("ddtree-worker", f"worker class {parallel.worker_cls} is not the stock GPU worker")


def refuse_unsupported(config: Any) -> None:
    """Raises OptionError naming every configured feature that the native path cannot serve, before weights load."""
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    speculative = config.speculative_config
    found = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "micro-batching (DBO, ubatching)": bool(parallel.use_ubatching),
        "a hybrid target (GDN, Mamba)": bool(model.is_hybrid),
        "an encoder-decoder target": bool(model.is_encoder_decoder),
        "multi-head latent attention": bool(model.use_mla),
        "M-RoPE or XD-RoPE positions": bool(model.uses_mrope) or model.uses_xdrope_dim > 0,
        "prompt embeddings": bool(model.enable_prompt_embeds),
        "capture of routed experts": bool(getattr(model, "enable_return_routed_experts", False)),
        f"KV cache dtype {cache.cache_dtype}": cache.cache_dtype not in ("auto", "bfloat16", "float16"),
        "kv_sharing_fast_prefill": bool(cache.kv_sharing_fast_prefill),
        "disable_padded_drafter_batch": bool(speculative.disable_padded_drafter_batch),
        f"rejection method {speculative.rejection_sample_method}": speculative.rejection_sample_method
        not in ("standard", "strict"),
        "the V2 model runner": bool(getattr(config, "use_v2_model_runner", False)),
    }
    if names := [name for name, is_so in found.items() if is_so]:
        raise OptionError("ddtree-unsupported", f"not supported with ddtree: {', '.join(names)}")
