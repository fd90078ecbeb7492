"""Small real parts for the engine's tests: targets with random weights, drafters with random weights."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
