"""What the launchers ask about a device."""

from __future__ import annotations

from functools import cache

import torch

# Shared memory that one block may use, in bytes, by compute capability (CUDA C++ Programming Guide, technical
# specifications).
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device (a nominal 8 on a CPU, where kernels are interpreted)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def capability(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0 (and on a CPU, where kernels are interpreted)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
