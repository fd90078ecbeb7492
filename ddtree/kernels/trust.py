"""Is the GDN kernel right on this card? Asked once per card, driver and version, in a process of its own.

A kernel that the compiler got wrong for some card does not raise, it ends the CUDA context: what hit it cannot then
fall back. So before the first launch in anger a child runs the served tile shapes against the plain-torch twin. The
answer "yes" is kept beside Triton's own cache, whose entries the child has filled on the way.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

BOUND = 2e-5  # norm-wise relative error of float32 against float64
SECONDS = 300


def _answer_file(device: torch.device) -> Path:
    import triton

    here = Path(__file__).parent
    text = "".join((here / name).read_text() for name in ("gdn.py", "bits.py", "trust.py"))
    text += f"{triton.__version__} {torch.__version__} {torch.cuda.get_device_name(device)}"
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return folder / f"ddtree-gdn-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


@cache
def distrust(device: torch.device) -> str:
    """Why the GDN kernels are not to be used on this CUDA device; empty if they equal the twin there. Says so once."""
    answer = _answer_file(device)
    if answer.exists():
        return ""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), CUDA_LAUNCH_BLOCKING="1")
    index = torch.cuda.current_device() if device.index is None else device.index
    command = [sys.executable, "-m", "ddtree.kernels.trust", str(index)]
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
        said = (child.stdout + child.stderr).strip().splitlines()
        reason = "" if child.returncode == 0 else (said[-1] if said else f"exit status {child.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        name = torch.cuda.get_device_name(device)
        print(f"ddtree: GDN layers in plain torch: the kernels' check on {name} failed: {reason}", file=sys.stderr)
        return reason
    try:
        answer.parent.mkdir(parents=True, exist_ok=True)
        answer.touch()
    except OSError:
        pass  # asked again next time
    return ""


def check(device: torch.device) -> None:
    """Verify and commit at four tree sizes and head size 128 against the twin in float64. Raises ArithmeticError.

    The twin runs on the CPU, so that nothing it does can be blamed on this device.
    """
    from ddtree import gdn as twin
    from ddtree.kernels import gdn
    from ddtree.tree import ancestor_words

    hk, hv, dim = 1, 2, 128
    channels = (2 * hk + hv) * dim
    for size in (1, 17, 65, 130):
        gen = torch.Generator().manual_seed(size)
        x, conv = torch.randn(2, size, channels, generator=gen), torch.randn(2, channels, 3, generator=gen)
        a, b = torch.randn(2, 2, size, hv, generator=gen)
        state = 0.1 * torch.randn(2, hv, dim, dim, generator=gen)
        weight, a_log, dt_bias = 0.5 * torch.randn(channels, 4, generator=gen), torch.rand(hv), torch.rand(hv)
        above = [-1] + [int(torch.randint(max(0, i - 9), i, (1,), generator=gen)) for i in range(1, size)]
        path = [size - 1]
        while above[path[0]] >= 0:
            path.insert(0, above[path[0]])
        parents = torch.tensor([above, above], dtype=torch.int32)
        words, windows = ancestor_words(parents, size), twin.conv_windows(parents, gdn.KERNEL)
        nodes, count = torch.tensor([path, path], dtype=torch.int32), torch.full((2,), len(path) - 1, dtype=torch.int32)

        wide = [t.double() for t in (x, a, b, conv, state)]
        exact = twin.Layer(weight.double(), a_log.double(), dt_bias.double(), hk, hv, dim, dim)
        want, stash = twin.verify(exact, wide[0], wide[1], wide[2], wide[3], wide[4], words, windows)
        twin.commit(stash, wide[3], wide[4], nodes, count)

        x, a, b, conv, state, words, windows = (t.to(device) for t in (x, a, b, conv, state, words, windows))
        layer = twin.Layer(weight.to(device), a_log.to(device), dt_bias.to(device), hk, hv, dim, dim)
        got, stash = gdn.launch_verify(layer, x, a, b, conv, state, words, windows)
        gdn.launch_commit(stash, conv, state, nodes.to(device), count.to(device))
        for name, ours, theirs in (("outputs", got, want), ("state", state, wide[4]), ("window", conv, wide[3])):
            error = float((ours.double().cpu() - theirs).norm() / theirs.norm())
            if not error <= BOUND:
                raise ArithmeticError(f"{name} of a {size}-node tree are off by {error:.1e}")


if __name__ == "__main__":
    check(torch.device("cuda", int(sys.argv[1])))
