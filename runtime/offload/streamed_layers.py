"""Layers of a model whose parameters lie in the slots of a weight stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import finalize

from torch import Tensor, nn

from sequoia_plan.runtime.base.weight_stream import WeightStream, register_stream
from sequoia_plan.runtime.offload.weight_file import WeightBlock


def attach_stream(
    model: Any, stream: WeightStream, layers: Mapping[nn.Module, WeightBlock]
) -> None:
    """Let `layers` compute with the weights that `stream` brings.

    The parameters of streamed layer k become views of its slot, so nothing moves when its weights
    arrive. Each pass waits for them before the layer and releases them after it. The stream is
    closed when the model is no longer used.

    Args:
        layers: the streamed layers with their blocks, in the order in which a pass runs them.
    """
    for number, (layer, block) in enumerate(layers.items()):
        slot = stream.memory[number % len(stream.memory)]
        set_parameters(layer, block.views(slot))
        layer.register_forward_pre_hook(lambda *_, number=number: stream.wait_for(number))
        layer.register_forward_hook(lambda *_, number=number: stream.release(number))
    register_stream(model, stream)
    finalize(model, stream.close)


def set_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace parameters and buffers of `module`.

    Args:
        tensors: the new tensors by the names of the old ones in `module`.
    """
    for name, tensor in tensors.items():
        path, _, last_name = name.rpartition(".")
        owner = module.get_submodule(path)
        if last_name in owner._parameters:
            owner._parameters[last_name] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[last_name] = tensor
