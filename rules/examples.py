"""Miniature installs for the examples of the acceptance rules: two runners, a sampler, and one ``accept`` in some
place or other."""

from __future__ import annotations

from textwrap import dedent

_RUNNER = """
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler


    class GPUModelRunner:
        def __init__(self, config):
            self.sampler = Sampler()
            self.rejection_sampler = RejectionSampler(self.sampler)

        def _sample(self, logits, metadata):
            if metadata is None:
                return self.sampler(logits, None)
            return self.rejection_sampler(metadata, logits)

        def execute_model(self, batch):
            return self._sample(batch.logits, batch.metadata)
"""
_SAMPLER = """
    class Sampler:
        def __call__(self, logits, metadata):
            return logits.argmax(-1)
"""
_REJECTION = """
    from vllm.v1.sample.accepting import accept


    class RejectionSampler:
        def __init__(self, sampler):
            self.sampler = sampler

        def __call__(self, metadata, logits):
            return self.forward(metadata, logits)

        def forward(self, metadata, logits):
            return accept(*metadata.tables, logits.argmax(-1))
"""
CHAIN = """
    def accept(a, b):
        out = []
        for x, y in zip(a, b):
            out.append(y)
            if x != y:
                break
        return out
"""


def install(accept: str = CHAIN, **files: str) -> dict[str, str]:
    """An install whose sampler calls ``accept`` (a module's source). ``files`` replace or add others, by path with
    "__" for "/"."""
    made = {
        "vllm/__init__.py": "",
        "vllm/v1/worker/gpu_model_runner.py": _RUNNER,
        "vllm/v1/sample/sampler.py": _SAMPLER,
        "vllm/v1/sample/rejection_sampler.py": _REJECTION,
        "vllm/v1/sample/accepting.py": accept,
    }
    made.update({path.replace("__", "/") + ".py": text for path, text in files.items()})
    return {path: dedent(text).lstrip() for path, text in made.items()}


def elsewhere(walk: str) -> dict[str, str]:
    """The walk is in the install, and nothing that runs leads to it."""
    return install(CHAIN, vllm__v1__sample__unused=walk)


def switched(walk: str, switch: str, condition: str) -> dict[str, str]:
    """The sampler takes the walk only under ``condition``; ``switch`` are the statements that define it."""
    rejection = dedent(_REJECTION).replace(
        "            return accept(*metadata.tables, logits.argmax(-1))".replace("    ", "", 1),
        f"        if {condition}:\n            return walked(*metadata.tables, logits.argmax(-1))\n"
        "        return accept(*metadata.tables, logits.argmax(-1))",
    )
    rejection = rejection.replace(
        "from vllm.v1.sample.accepting import accept\n",
        "import os\n\nfrom vllm.v1.sample.accepting import accept\n"
        f"from vllm.v1.sample.walking import accept as walked\n\n{switch}\n",
    )
    return {
        **install(CHAIN),
        "vllm/v1/sample/rejection_sampler.py": rejection,
        "vllm/v1/sample/walking.py": dedent(walk).lstrip(),
    }


def subclassed(walk: str) -> dict[str, str]:
    """The runner constructs a subclass of the sampler, and the walk is in a method that it overrides."""
    sub = """
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.walking import accept


        class Other(RejectionSampler):
            def forward(self, metadata, logits):
                return accept(*metadata.tables, logits.argmax(-1))
    """
    runner = dedent(_RUNNER).replace(
        "vllm.v1.sample.rejection_sampler import RejectionSampler", "vllm.v1.sample.other import Other"
    )
    return {
        **install(CHAIN, vllm__v1__sample__other=sub, vllm__v1__sample__walking=walk),
        "vllm/v1/worker/gpu_model_runner.py": runner.replace("RejectionSampler(", "Other(").lstrip(),
    }


def plugged_in(walk: str, register: str) -> dict[str, str]:
    """A distribution brings the walk; ``register`` is the module that its entry point names."""
    extra = {"extra/__init__.py": "", "extra/walking.py": walk, "extra/hook.py": register}
    files = install(CHAIN, vllm__v1__worker__gpu_worker="from vllm.v1.worker.gpu_model_runner import GPUModelRunner\n")
    return {**files, **{path: dedent(text).lstrip() for path, text in extra.items()}}


#: What plugins do to put their own acceptance in place; each defines ``register``.
REGISTERS = {
    "sets the class in the runner's module": """
        def register():
            import vllm.v1.worker.gpu_model_runner as m
            from extra.walking import accept

            class Mine(m.RejectionSampler):
                def forward(self, metadata, logits):
                    return accept(*metadata.tables, logits.argmax(-1))

            m.RejectionSampler = Mine
    """,
    "sets a method of the sampler": """
        from extra.walking import accept
        from vllm.v1.sample.rejection_sampler import RejectionSampler


        def forward(self, metadata, logits):
            return accept(*metadata.tables, logits.argmax(-1))


        def register():
            RejectionSampler.forward = forward
    """,
    "setattr on the runner": """
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner


        def register():
            from extra import walking

            def sample(self, logits, metadata):
                return walking.accept(*metadata.tables, logits.argmax(-1))

            setattr(GPUModelRunner, "_sample", sample)
    """,
    "wraps the runner's constructor": """
        from extra.walking import accept
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner


        class Mine:
            def __call__(self, metadata, logits):
                return accept(*metadata.tables, logits.argmax(-1))


        def register():
            before = GPUModelRunner.__init__

            def made(self, config):
                before(self, config)
                self.rejection_sampler = Mine()

            GPUModelRunner.__init__ = made
    """,
    "replaces the function that the sampler calls": """
        import importlib

        from extra.walking import accept


        def register():
            target = importlib.import_module("vllm.v1.sample.rejection_sampler")
            target.accept = accept
    """,
}
ENTRY = (("vllm.general_plugins", "extra", "extra.hook:register"),)
