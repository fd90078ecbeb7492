"""The operations that exist twice, as plain torch and as kernels, bound once per engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree import gdn
from ddtree.kvcache import Attend, move_rows, plain_attend
from ddtree.tree import Tree, build_tree
from ddtree.walk import Path, walk


@dataclass(frozen=True)
class Ops:
    """Every member has the signature and meaning of its plain-torch twin."""

    name: str
    build_tree: Callable[[tuple[Tensor, Tensor], Tensor, int], Tree]
    walk: Callable[[Tree, Tensor], Path]
    attend: Callable[[Tensor, Tensor, int, Tensor | None], Attend]
    move_rows: Callable[[Tensor, Tensor, Tensor], None]
    gdn_verify: Callable[..., tuple[Tensor, gdn.Stash]]
    gdn_commit: Callable[..., None]


PLAIN = Ops("torch", build_tree, walk, plain_attend, move_rows, gdn.verify, gdn.commit)


def ops_for(device: torch.device, kernels: bool = True) -> Ops:
    """Kernels on a GPU, plain torch elsewhere or where asked for."""
    return PLAIN
