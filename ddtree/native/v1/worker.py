"""The stock GPU worker, with our model runner in the place where it constructs its own."""

# mypy: disable-error-code="misc"
# vLLM, whose classes are derived from, is not there when types are checked.

from __future__ import annotations

from typing import Any

import vllm.v1.worker.gpu_model_runner as runner_module
from vllm.v1.worker.gpu_worker import Worker

from ddtree.native.config import register_backend
from ddtree.native.v1.runner import DDTreeModelRunner


class DDTreeWorker(Worker):
    """Select with ``--worker-cls``, or let the plugin do it."""

    def init_device(self) -> Any:
        """Worker.init_device imports GPUModelRunner by name; it finds ours for as long as that takes."""
        register_backend()
        stock = runner_module.GPUModelRunner
        runner_module.GPUModelRunner = DDTreeModelRunner
        try:
            return super().init_device()
        finally:
            runner_module.GPUModelRunner = stock
