"""The stock GPU worker, with our model runner in the place where it constructs its own."""

# mypy: disable-error-code="misc"
# vLLM, whose classes are derived from, is not there when types are checked.

from __future__ import annotations

from typing import Any

import vllm.v1.worker.gpu_model_runner as runner_module
from vllm.v1.worker.gpu_worker import Worker

from ddtree.native.config import register_backend
from ddtree.native.options import OptionError
from ddtree.native.v1.runner import DDTreeModelRunner


class DDTreeWorker(Worker):
    """Select with ``--worker-cls``, or let the plugin do it."""

    def init_device(self) -> Any:
        """Worker.init_device imports GPUModelRunner by name; it finds ours for as long as that takes."""
        register_backend()
        stock = runner_module.GPUModelRunner
        runner_module.GPUModelRunner = DDTreeModelRunner
        try:
            done = super().init_device()
        finally:
            runner_module.GPUModelRunner = stock
        if not isinstance(self.model_runner, DDTreeModelRunner):
            kind = type(self.model_runner)
            name = f"{kind.__module__}.{kind.__name__}"
            raise OptionError("ddtree-runner", f"this vLLM chose {name}, which has no adapter")
        return done
