"""Layers of a model whose parameters lie in the slots of a weight stream."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import finalize

from torch import Tensor, nn
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.weight_stream import WeightStream, refuse_copies
from sequoia_plan.models.offload.disk_stream import DiskStream
from sequoia_plan.models.offload.weight_file import WeightBlock

CHOSEN = {"top_k_index", "router_indices"}
"""transformers' names of the argument of a module of experts that says which of them rows need."""


class _StreamHook:
    """Tells the stream which layer begins or has ended; copies of the model are refused.

    A copy's parameters would not be views of the stream's slots, and would never change.
    """

    def __init__(self, method: Callable[..., None], layer: int) -> None:
        self.method, self.layer = method, layer

    def __call__(self, *_: Any) -> None:
        """Call the stream's method with the number of the layer."""
        self.method(self.layer)

    __reduce__ = refuse_copies


class _RoutedHook(_StreamHook):
    """Tells the stream which experts of a layer the pass has chosen."""

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """Call the stream's method with the layer and the experts."""
        inputs = (*args, *options.values())
        chosen = next(x for x in inputs if isinstance(x, Tensor) and not x.is_floating_point())
        self.method(self.layer, chosen)


def view_slots(
    stream: WeightStream, layers: Sequence[nn.Module], blocks: Sequence[WeightBlock]
) -> None:
    """Let the parameters of `layers` be views of the slots that `stream` fills.

    Nothing moves when weights arrive.
    """
    for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        set_parameters(layer, block.views(stream.memory[number % len(stream.memory)]))


def attach_stream(
    model: PreTrainedModel,
    stream: WeightStream,
    layers: Sequence[nn.Module],
    blocks: Sequence[WeightBlock],
) -> None:
    """Let each pass of `model` wait for a layer's weights before it, and release them after it.

    Of experts that a layer chooses, those chosen alone are read, once they are known. The stream is
    closed when the model is no longer used.
    """
    for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        _check_reads_slot(layer, block, stream.memory[number % len(stream.memory)])
        layer.register_forward_pre_hook(_StreamHook(stream.wait_for, number))
        layer.register_forward_hook(_StreamHook(stream.release, number))
        if isinstance(stream, DiskStream) and (names := routed_tensors(layer)):
            stream.routed[number] = places = [block.tensors[name] for name in names]
            stream.counts.update({(number, row): 0 for row in range(places[0].shape[0])})
            experts = layer.get_submodule(names[0].rpartition(".")[0])
            hook = _RoutedHook(stream.read_chosen, number)
            experts.register_forward_pre_hook(hook, with_kwargs=True)
    stream.keep_most_chosen()
    model.weight_stream = stream
    finalize(model, stream.close)


def _check_reads_slot(layer: nn.Module, block: WeightBlock, slot: Tensor) -> None:
    """Raise SequoiaPlanError if not all of the block's tensors in `slot` are the layer's own.

    A copy of what is in the slot at loading would never change.
    """
    address = slot.untyped_storage().data_ptr()
    viewed_bytes = sum(
        tensor.nbytes
        for tensor in (*layer.parameters(), *layer.buffers())
        if tensor.untyped_storage().data_ptr() == address
    )
    block_bytes = sum(place.size for place in block.tensors.values())
    if viewed_bytes != block_bytes:
        raise SequoiaPlanError(
            f"target: a streamed {type(layer).__name__} reads {viewed_bytes} bytes of its slot, "
            f"expected {block_bytes}; load it with placement='resident'"
        )


def routed_tensors(layers: nn.Module) -> list[str]:
    """Names of the tensors that hold a matrix of each expert, where a pass chooses experts."""
    return [
        f"{path}.{name}"
        for path, module in layers.named_modules()
        if CHOSEN & inspect.signature(module.forward).parameters.keys()
        for name, parameter in module.named_parameters()
        if parameter.ndim == 3
    ]


def set_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let `tensors` be the parameters and buffers of `module` that have these names."""
    for name, tensor in tensors.items():
        path, _, last_name = name.rpartition(".")
        owner = module.get_submodule(path)
        if last_name in owner._parameters:
            owner._parameters[last_name] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[last_name] = tensor
