"""Tensor parallelism: every process runs the same decoder and must go on with the same tokens."""

from typing import Any

import torch
from torch import Tensor

from sequoia_plan.runtime.models.architecture import unwrapped


def is_split(model: Any) -> bool:
    """Is `model` split over several processes (transformers' `tp_plan`)?"""
    return (getattr(unwrapped(model), "_tp_size", None) or 1) > 1


def shared_seed(model: Any) -> int:
    """A seed that PyTorch's generator draws; if `model` is split, the first process's in all."""
    seed = int(torch.randint((1 << 63) - 1, ()))
    if is_split(model):
        seeds = [seed]  # a list, because the call replaces its entries in place
        torch.distributed.broadcast_object_list(seeds, group=_group(model), group_src=0)
        seed = seeds[0]
    return seed


def from_first(model: Any, values: Tensor) -> Tensor:
    """`values`; if `model` is split, those of the first process in all of them.

    Processes that compute the same values may differ in the last bits, because sums of floats on a
    device have no fixed order. One token that differs would separate the processes for good.
    """
    if is_split(model):
        values = values.contiguous()
        torch.distributed.broadcast(values, group=_group(model), group_src=0)
    return values


def _group(model: Any) -> Any:
    """The processes that share the model's layers; None stands for all processes."""
    mesh = getattr(unwrapped(model), "_device_mesh", None)
    if mesh is None:
        return None
    return mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else mesh.get_group()
