"""Loading a target's modules layer by layer, where they do not fit.

Some layers stay in memory. The others are streamed in every pass.
"""

import contextlib
import math
import zlib
from collections.abc import Callable
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import decoder_layers
from sequoia_plan.models.base.dtype import Bytes, dtype_name
from sequoia_plan.models.base.weight_stream import WeightStream
from sequoia_plan.models.files.from_transformers import (
    load_whole,
    new_model,
    not_loadable,
    refuse_shapes,
)
from sequoia_plan.models.files.metadata import module_metadata, sampled_positions
from sequoia_plan.models.files.pretrained import ModelFiles
from sequoia_plan.models.layers.fuse import fuse, try_kinds
from sequoia_plan.models.layers.fused_layer import in_joined_order
from sequoia_plan.models.modules.backend import ModuleBackend
from sequoia_plan.models.modules.streamed_layers import (
    attach_stream,
    routed_tensors,
    set_parameters,
    view_slots,
)
from sequoia_plan.models.offload.disk_stream import DiskStream
from sequoia_plan.models.offload.host_stream import HostStream, pin
from sequoia_plan.models.offload.memory import MemorySplit
from sequoia_plan.models.offload.weight_cache import cache_folder, cached_weights
from sequoia_plan.models.offload.weight_file import Fill, Place, WeightBlock, WeightFile


class OffloadedTarget:
    """A target whose layers are in a file; what is outside them, and their vectors, is in memory.

    `load` loads the layers, or lets them be streamed. Vectors are small, and a fused layer derives
    others from the weights of norms. Of a mixture, all but the experts is in memory.
    """

    def __init__(self, files: ModelFiles, device: str, dtype: torch.dtype) -> None:
        self.files = files
        try:
            self.model = _load_without_layers(files, dtype)
        except SequoiaPlanError:
            raise
        except Exception as error:  # foreign code may do anything with a folder it does not expect
            raise not_loadable(files.path, error) from error
        self.model.tie_weights()
        for name, tensor in _saved_tensors(self.model).items():
            if type(tensor) not in (Tensor, nn.Parameter):  # a file holds plain tensors
                raise SequoiaPlanError(
                    f"{files.path}: {name} is a {type(tensor).__name__}, expected plain tensors; a "
                    "model quantised like this cannot be streamed"
                )
        self.device = torch.device(device)
        self.layers_name, self.layers = decoder_layers(self.model)
        self.routed = set(routed_tensors(self.model))
        self.file = self._open_weight_file(dtype)
        outside_block = self.file.blocks[0]
        self.outside = outside = self._load(outside_block)
        set_parameters(self.model, outside)
        self.model.tie_weights()
        self.outside_bytes = outside_block.size
        self.backend = ModuleBackend(self.model, self._metadata())

    def layer(self, number: int) -> dict[str, Tensor]:
        """One layer's tensors by their names in the layer, those of its block from the file."""
        prefix = f"{self.layers_name}.{number}."
        in_memory = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.outside.items()
            if name.startswith(prefix)
        }
        return in_memory | self._load(self._layer_block(number))

    def load(self, split: MemorySplit, link: str, fused: bool = True) -> None:
        """Load the resident layers of `split`, and stream the others from "disk" or "host"."""
        # before slots and resident layers take the memory that a trial needs
        proven = try_kinds(self.layers, self.layer) if fused else {}
        for number in split.resident_layers:
            set_parameters(self.layers[number], self.layer(number))
        numbers = [
            number
            for number, size in enumerate(self.layer_sizes())
            if size and number not in split.resident_layers
        ]
        blocks = [self._layer_block(number) for number in numbers]
        stream: WeightStream | None = None
        if blocks and link == "disk":
            stream = DiskStream(self.file, blocks, split.slots, self.device, split.resident_bytes)
        else:
            memories = [pin(self.file.memory_of(block)) for block in blocks]
            self.file.close()
            if memories:
                stream = HostStream(memories, split.slots, self.device)
        if stream:
            view_slots(stream, [self.layers[number] for number in numbers], blocks)
        num_fused = fuse(self.model, proven) if fused else 0
        if stream:
            attach_stream(self.model, stream, [self.layers[number] for number in numbers], blocks)
        self.backend.stream = stream
        self.backend.look()  # its layers were replaced
        self.backend.recorded |= split.to_metadata(link, len(self.layers))
        if fused:
            self.backend.recorded["fused_layers"] = num_fused

    def layer_sizes(self) -> list[int]:
        """Bytes of each layer."""
        return [block.size for block in self.file.blocks[1:]]

    def _metadata(self) -> dict[str, object]:
        """What profiles record of the model, whose weights are in the file."""
        mapped, samples = self.file.map(), dict[str, Tensor]()
        for block in self.file.blocks:
            for name, place in block.tensors.items():
                first, count = block.offset + place.start, math.prod(place.shape)
                numbers = mapped[first : first + place.size].reshape(count, -1)
                sample = torch.from_numpy(numbers[sampled_positions(count)])
                samples[name] = sample.view(getattr(torch, place.dtype)).flatten()
        return module_metadata(self.model, samples)

    def _load(self, block: WeightBlock) -> dict[str, Tensor]:
        """Read a block onto the device that computes; its tensors lie there as in the file."""
        return block.views(self.file.memory_of(block).to(self.device))

    def _layer_block(self, number: int) -> WeightBlock:
        """A layer's block, with its tensors by their names in the layer."""
        block = self.file.blocks[1 + number]
        prefix = f"{self.layers_name}.{number}."
        places = {name.removeprefix(prefix): place for name, place in block.tensors.items()}
        return WeightBlock(block.offset, block.size, block.checksum, places)

    def _open_weight_file(self, dtype: torch.dtype) -> WeightFile:
        """Open the weights in pass order; they are written first if the model's files are new."""
        layout, files = self._layout(), self.files
        sources = [files.path] if files.gguf else sorted(files.path.glob("*.safetensors"))
        # another version of transformers may have other tensors
        kind = f"{dtype_name(dtype)}-{zlib.crc32(repr(layout).encode()):08x}"
        with contextlib.ExitStack() as stack:

            def plan() -> tuple[list[dict[str, Place]], Fill]:
                """The layout of the file, and what fills it, if it has to be written."""
                scratch = stack.enter_context(TemporaryDirectory(dir=cache_folder()))
                load, expected = self._tensor_reader(dtype, scratch), _saved_tensors(self.model)

                def fill(name: str, memory: Bytes) -> None:
                    """Write a tensor."""
                    tensor = load(name).to(device="cpu", dtype=expected[name].dtype)
                    data = tensor.reshape(expected[name].shape).contiguous().view(-1)
                    memory[:] = data.view(torch.uint8).numpy()

                return layout, fill

            return cached_weights(files.path.stem, f"{kind}.weights", sources, plan)

    def _layout(self) -> list[dict[str, Place]]:
        """The tensors of each block: those that stay in memory, then the others of each layer.

        A layer's have the order in which a fused layer joins them.
        """
        blocks: list[dict[str, Place]] = [{} for _ in range(1 + len(self.layers))]
        prefix = f"{self.layers_name}."
        tensors = _saved_tensors(self.model)
        for name in in_joined_order(tensors):
            tensor, block_number = tensors[name], 0
            is_streamed = name in self.routed if self.routed else tensor.ndim > 1
            if name.startswith(prefix) and is_streamed:
                block_number = 1 + int(name.removeprefix(prefix).split(".")[0])
            blocks[block_number][name] = Place(dtype_name(tensor.dtype), tuple(tensor.shape))
        return blocks

    def _tensor_reader(self, dtype: torch.dtype, scratch: str) -> Callable[[str], Tensor]:
        """A function that returns a tensor by its name in the model; one at a time is in memory.

        Those that transformers converts, it writes into `scratch`. It has already loaded a
        quantised model, and a GGUF file's.
        """
        folder = self.files.path
        expected = self.model.state_dict()
        if not any(tensor.is_meta for tensor in expected.values()):
            return expected.__getitem__
        whole = load_whole(folder, dtype, device_map={"": "disk"}, offload_folder=scratch)
        saved = whole.state_dict()

        def load(name: str) -> Tensor:
            tensor = saved[name]
            if tensor.is_meta:
                tensor = load_offloaded_parameter(whole, name)
            if tensor.shape != expected[name].shape:
                refuse_shapes(folder, [(name, tensor.shape, expected[name].shape)])
            return tensor

        first_names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            tied = first_names.setdefault(id(parameter), name)
            if tied != name and not load(name).equal(load(tied)):
                raise SequoiaPlanError(
                    f"{folder}: tensor {name} differs from {tied}, which its config.json says "
                    "is the same; set tie_word_embeddings to false there"
                )
        return load


def _load_without_layers(files: ModelFiles, dtype: torch.dtype) -> PreTrainedModel:
    """The model. Its weights are on the meta device, unless it is quantised, or a GGUF file.

    Only transformers and the library that quantised a model know what its layers are like, so they
    load it.
    """
    from accelerate import init_empty_weights  # decoding without offloading does not need it

    if files.gguf or getattr(files.config, "quantization_config", None):
        return files.module(dtype)
    with init_empty_weights(include_buffers=False):  # a model computes its buffers itself
        model = new_model(files.config, dtype)
    model.generation_config = files.generation_config()
    return model


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has: parameters, tied ones once, and persistent buffers."""
    saved_names = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved_names}
    return dict(model.named_parameters()) | buffers
