"""Layers of a model whose parameters lie in the slots of a weight stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from weakref import finalize

from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.weight_stream import WeightStream, register_stream
from sequoia_plan.runtime.offload.weight_file import WeightBlock


class _StreamHook:
    """Tells the stream which layer begins or has ended; copies of the model are refused.

    A copy's parameters would not be views of the stream's slots, and would never change.
    """

    def __init__(self, method: Callable[[int], None], layer: int) -> None:
        self.method, self.layer = method, layer

    def __call__(self, *_: Any) -> None:
        """Call the stream's method with the number of the layer."""
        self.method(self.layer)

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copies with a SequoiaPlanError."""
        raise SequoiaPlanError(
            "target: its layers are streamed, so it can neither be pickled nor copied; load it "
            "where it is needed"
        )


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
        layer.register_forward_pre_hook(_StreamHook(stream.wait_for, number))
        layer.register_forward_hook(_StreamHook(stream.release, number))
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
