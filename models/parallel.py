"""Tensor parallelism: every process runs the same decoder and must go on with the same tokens."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from sequoia_plan.models.base.architecture import unwrapped


def is_split(model: PreTrainedModel) -> bool:
    """Is `model` split over several processes (transformers' `tp_plan`)?"""
    return (getattr(unwrapped(model), "_tp_size", None) or 1) > 1


def is_on_one_cuda_device(model: PreTrainedModel) -> bool:
    """True if all of `model` is on one CUDA device, in one process, and not compiled by PyTorch."""
    is_wrapped = hasattr(model, "_orig_mod")
    is_compiled = is_wrapped or getattr(model, "_compiled_call_impl", None) is not None
    devices = {parameter.device for parameter in model.parameters()}
    is_on_one = len(devices) == 1 and devices.pop().type == "cuda"
    return is_on_one and not is_compiled and not is_split(model)


def from_first(model: PreTrainedModel, values: Tensor) -> Tensor:
    """`values`; if `model` is split, those of the first process in all of them.

    Processes that compute the same values may differ in the last bits, because sums of floats on a
    device have no fixed order. One token that differs would separate the processes for good.
    """
    if is_split(model):
        values = values.contiguous()
        torch.distributed.broadcast(values, group=_group(model), group_src=0)
    return values


def _group(model: PreTrainedModel) -> ProcessGroup | None:
    """The processes that share the model's layers; None stands for all processes."""
    mesh = getattr(unwrapped(model), "_device_mesh", None)
    if mesh is None:
        return None
    return mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else mesh.get_group()
