"""Tensor parallelism: every process runs the same decoder and must go on with the same tokens."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sequoia_plan.models.base.architecture import unwrapped


def is_split(model: PreTrainedModel) -> bool:
    """Is `model` split over several processes (transformers' `tp_plan`)?"""
    return (getattr(unwrapped(model), "_tp_size", None) or 1) > 1


def is_compiled(model: PreTrainedModel) -> bool:
    """Does PyTorch compile passes of `model`?"""
    return hasattr(model, "_orig_mod") or bool(getattr(model, "_compiled_call_impl", None))


def is_on_one_cuda_device(model: PreTrainedModel) -> bool:
    """True if all of `model` is on one CUDA device, in one process, and not compiled by PyTorch."""
    devices = {parameter.device for parameter in model.parameters()}
    is_on_one = len(devices) == 1 and devices.pop().type == "cuda"
    return is_on_one and not is_compiled(model) and not is_split(model)


def from_first(model: PreTrainedModel, values: Tensor) -> Tensor:
    """`values`; if `model` is split, those of the first process in all of them.

    Processes that compute the same values may differ in the last bits, because sums of floats on a
    device have no fixed order. One token that differs would separate the processes for good.
    """
    if is_split(model):
        values, mesh = values.contiguous(), getattr(unwrapped(model), "_device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]  # its processes share the model's layers
        group = None if mesh is None else mesh.get_group()  # None stands for all processes
        torch.distributed.broadcast(values, group=group, group_src=0)
    return values
