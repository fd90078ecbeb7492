"""DDTree inside an unmodified vLLM: a plugin (entry point group ``vllm.general_plugins``), no file of vLLM edited.

    vllm serve TARGET --speculative-config '{"method": "ddtree", "model": DRAFTER, "num_speculative_tokens": 64}'

Without any patched function the same is ``--worker-cls ddtree.native.v1.worker.DDTreeWorker --attention-backend CUSTOM
--speculative-config '{"method": "dflash", ...}' --additional-config '{"ddtree": {"horizon": 15}}'``.
"""

from __future__ import annotations


def register() -> None:
    """Entry point; vLLM calls it in every process, possibly more than once. Silent until somebody asks for ddtree."""
    from ddtree.native.config import install

    install()
