"""A target that does not fit, loaded layer by layer: some layers stay in memory, the others are streamed in every pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.forward import decoder_layers
from sequoia_plan.runtime.models.host_stream import stream_from_host
from sequoia_plan.runtime.models.load import cache_folder, dtype_name, first_line, local_folder, name_of
from sequoia_plan.runtime.models.memory import SLOTS, Split
from sequoia_plan.runtime.models.stream import set_parameters, stream_layers
from sequoia_plan.runtime.models.weight_file import Block, WeightFile, alone, write_weights


class Offloaded:
    """A target whose layers are still in a file; what is outside of them is in memory. `place` puts the layers where they belong.

    Args:
        source: folder, hub ID or .gguf file; None for the embedded target.
        device: where passes are computed.

    Raises:
        SequoiaPlanError: if the model cannot be loaded layer by layer, or its weights cannot be written into a file.
    """

    def __init__(self, source: str | None, device: str, dtype: torch.dtype) -> None:
        folder = local_folder(source)
        self.name = name_of(source)
        try:
            config = AutoConfig.from_pretrained(folder)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            if getattr(config, "quantization_config", None):  # what its layers are like, only transformers and the library that quantised it know
                self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            else:
                with _on_meta():
                    self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            if (folder / "generation_config.json").is_file():
                self.model.generation_config = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # whatever foreign code does with a folder it does not expect
            raise SequoiaPlanError(f"{folder}: cannot be loaded as a causal language model ({first_line(error)})") from error
        self.model.tie_weights()
        for name, tensor in _tensors(self.model).items():
            if type(tensor) not in (Tensor, nn.Parameter):
                raise SequoiaPlanError(f"{folder}: {name} is a {type(tensor).__name__}, expected plain tensors; a model quantised like this cannot be streamed")
        self.device = torch.device(device)
        self.prefix, layers = decoder_layers(self.model)
        self.layers = list(layers)
        self.file = self._open(folder, dtype)
        outside = {name: tensor.to(self.device) for name, tensor in self.file.load(self.file.blocks[0]).items()}
        set_parameters(self.model, outside)
        self.model.tie_weights()
        self.outside = self.file.blocks[0].size

    def layer(self, number: int) -> dict[str, Tensor]:
        """The tensors of one layer, read from the file, by their names in the layer."""
        return self.file.load(self._own_names(number))

    def place(self, split: Split, link: str) -> None:
        """Load the resident layers, and stream the others."""
        for number in split.resident:
            set_parameters(self.layers[number], {name: tensor.to(self.device) for name, tensor in self.layer(number).items()})
        streamed = [number for number in range(len(self.layers)) if number not in split.resident]
        if not streamed:
            self.file.close()
            return
        blocks = {self.layers[number]: self._own_names(number) for number in streamed}
        stream = stream_from_host if link == "host" else stream_layers
        stream(self.model, self.file, blocks, SLOTS, self.device)

    def sizes(self) -> list[int]:
        """Bytes of each layer."""
        return [block.size for block in self.file.blocks[1:]]

    def heads(self) -> dict[str, Tensor]:
        """The first 64 numbers of each parameter: what `model_facts` tells weights apart by."""
        places = {name: (block, place) for block in self.file.blocks for name, place in block.tensors.items()}
        with open(self.file.path, "rb") as file:
            found = {}
            for name, _ in self.model.named_parameters():
                block, place = places[name]
                file.seek(block.offset + place.start)
                count = min(64, torch.Size(place.shape).numel())
                found[name] = torch.frombuffer(bytearray(file.read(count * place.dtype.itemsize)), dtype=place.dtype)
        return found

    def _own_names(self, number: int) -> Block:
        """A layer's block, its tensors by their names in the layer."""
        block, prefix = self.file.blocks[1 + number], f"{self.prefix}.{number}."
        return Block(block.offset, block.size, block.checksum, {name.removeprefix(prefix): place for name, place in block.tensors.items()})

    def _open(self, folder: Path, dtype: torch.dtype) -> WeightFile:
        """The weights in pass order; written on first use, and again once the folder has changed."""
        layout = self._layout()
        path = cache_folder() / f"{folder.resolve().name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}-{dtype_name(dtype)}.weights"
        source = _fingerprint(folder, layout)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with alone(path):
                if file := _opened(path, source):
                    return file
                write_weights(path, layout, _reader(folder, layout, dtype), source)
                return WeightFile(path, source)
        except OSError as error:
            raise SequoiaPlanError(f"{path}: cannot be written ({error.strerror or error}); set SEQUOIA_PLAN_CACHE to a folder that can") from error

    def _layout(self) -> list[dict[str, Tensor]]:
        """First what is outside the layers, then each layer."""
        blocks: list[dict[str, Tensor]] = [{} for _ in range(1 + len(self.layers))]
        for name, parameter in _tensors(self.model).items():
            rest = name.removeprefix(f"{self.prefix}.")
            number = int(rest.split(".")[0]) if rest != name else -1
            blocks[1 + number][name] = parameter
        return blocks


def _on_meta() -> AbstractContextManager[Any]:
    """Parameters made in here have no memory; buffers do, because a model computes them itself."""
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)


def _tensors(model: Any) -> dict[str, Tensor]:
    """What a checkpoint holds: parameters, tied ones once, and persistent buffers."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    saved = model.state_dict()
    return found | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _fingerprint(folder: Path, layout: list[dict[str, Tensor]]) -> str:
    """What the weights were made from: the folder's files of weights, their sizes and dates, and what the model expects."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors"))]
    tensors = [(name, tuple(like.shape), str(like.dtype)) for block in layout for name, like in block.items()]
    return hashlib.sha256(json.dumps([files, tensors]).encode()).hexdigest()[:16]


def _opened(path: Path, source: str) -> WeightFile | None:
    """The file of weights at `path`; None if there is none made from `source`."""
    if not path.exists():
        return None
    try:
        return WeightFile(path, source)
    except SequoiaPlanError:
        return None


def _reader(folder: Path, layout: list[dict[str, Tensor]], dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Reads a tensor by its name in the model.

    Where the folder's safetensors files have the model's own names, one tensor at a time is in memory. Otherwise transformers loads
    the whole model, as it has to for layouts that it converts, and has done already for a quantised one.
    """
    expected = {name: like for block in layout for name, like in block.items()}
    if not any(like.is_meta for like in expected.values()):
        return expected.__getitem__
    found: dict[str, str] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= {name: str(file) for name in opened.keys() if name in expected}  # noqa: SIM118
    except Exception as error:
        raise SequoiaPlanError(f"{folder}: its weights cannot be read ({first_line(error)})") from error
    if found.keys() >= expected.keys():

        def read(name: str) -> Tensor:
            try:
                with safe_open(found[name], framework="pt") as opened:
                    return opened.get_tensor(name)
            except Exception as error:
                raise SequoiaPlanError(f"{found[name]}: {name} cannot be read ({first_line(error)})") from error

        return read
    try:
        whole = _tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    except Exception as error:
        raise SequoiaPlanError(f"{folder}: cannot be loaded as a causal language model ({first_line(error)})") from error
    return lambda name: whole[name].detach()
