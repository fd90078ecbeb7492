"""The operations that exist twice, as plain torch and as kernels, bound once per engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree import gdn
from ddtree.drafter import DrafterConfig
from ddtree.kvcache import Attend, move_rows, plain_attend, rotate_and_write
from ddtree.layers import add_norm, gated_norm, swiglu
from ddtree.standalone.config import TargetConfig
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
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotate_and_write: Callable[..., Tensor]


PLAIN = Ops(
    name="torch",
    build_tree=build_tree,
    walk=walk,
    attend=plain_attend,
    move_rows=move_rows,
    gdn_verify=gdn.verify,
    gdn_commit=gdn.commit,
    add_norm=add_norm,
    swiglu=swiglu,
    gated_norm=gated_norm,
    rotate_and_write=rotate_and_write,
)


def kernel_ops() -> Ops:
    """The Triton kernels."""
    from ddtree.kernels import attention, fused, rows, tree
    from ddtree.kernels import gdn as delta

    return Ops(
        name="triton",
        build_tree=tree.build_tree,
        walk=tree.walk,
        attend=attention.attend,
        move_rows=rows.move_rows,
        gdn_verify=delta.verify,
        gdn_commit=delta.commit,
        add_norm=fused.add_norm,
        swiglu=fused.swiglu,
        gated_norm=fused.gated_norm,
        rotate_and_write=fused.rotate_and_write,
    )


def why_no_kernels(device: torch.device, config: TargetConfig, drafter: DrafterConfig | None) -> str:
    """The reason why the kernels cannot run this pair here; empty if they can."""
    if device.type != "cuda":
        return f"kernels need a GPU, this is {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "kernels need compute capability 8.0"
    sizes = {config.head_dim}
    if drafter is not None:
        sizes.add(drafter.head_dim)
        if drafter.drafts > 30:
            return f"kernels draft at most 30 tokens, this drafter {drafter.drafts}"
    if config.delta is not None:
        sizes |= {config.delta.key_dim, config.delta.value_dim}
        if config.delta.kernel != 4:
            return f"kernels take convolutions of 4 taps, these have {config.delta.kernel}"
    odd = [x for x in sizes if not 16 <= x <= 256 or x & (x - 1)]
    if odd:
        return f"kernels take head sizes that are powers of two up to 256, not {odd[0]}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return ""


def ops_for(
    device: torch.device, config: TargetConfig, drafter: DrafterConfig | None = None, kernels: bool = True
) -> Ops:
    """Kernels where they can run this pair, else plain torch; on a GPU the reason is said."""
    if not kernels:
        return PLAIN
    reason = why_no_kernels(device, config, drafter)
    if reason and device.type == "cuda":
        print(f"ddtree: plain torch operations: {reason}", file=sys.stderr)
    return PLAIN if reason else kernel_ops()
