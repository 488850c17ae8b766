"""A Llama-like model's weights, packed for the pass: from its modules, or from its GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.runtime.backends.packed.attention import attender
from sequoia_plan.runtime.backends.packed.encoding import encoder
from sequoia_plan.runtime.backends.packed.forward import Model
from sequoia_plan.runtime.backends.packed.gguf_blocks import read_blocks
from sequoia_plan.runtime.backends.packed.packing import Arena, Blocks, Matrix, pack
from sequoia_plan.runtime.backends.packed.products import (
    FORMAT_NAMES,
    FORMATS,
    multiplier,
)

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
MATRICES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""A layer's matrices in transformers and in GGUF files, in the order of the pass."""


@dataclass(frozen=True)
class Packed:
    """`model` has the addresses of `matrices`; `formats` are the names of those in use."""

    model: Model
    matrices: list[Matrix]
    formats: tuple[str, ...]


def blocks_of(weight: Tensor) -> Blocks:
    """A floating-point matrix as it is."""
    weight = weight.detach().contiguous()
    is_bfloat16 = weight.dtype == torch.bfloat16  # which numpy lacks
    numbers = weight.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else weight.numpy()
    return Blocks(FORMAT_NAMES.index(DTYPES[weight.dtype]), numbers)


def describe(matrix: Matrix) -> NDArray[np.int64]:
    """A matrix as the pass reads it (see `forward.Model`)."""
    format = FORMATS[matrix.format]
    return np.array(
        [
            encoder(matrix.format, matrix.encoding).address,
            multiplier(matrix.format, matrix.encoding).address,
            matrix.tiles.ctypes.data,
            matrix.scales.ctypes.data,
            format.outputs,
            matrix.inputs,
            matrix.inputs // format.step(matrix.encoding),
            matrix.tiles.shape[1],
            matrix.scales.shape[1],
            matrix.encoded_bytes,
            len(matrix.tiles),
        ]
    )


def pack_model(
    layers: list[Any], final_norm: Any, head: Any, config: Any, head_dim: int, key_bytes: int,
    blocks: Callable[[int, str], Blocks] | None = None, head_blocks: Blocks | None = None,
    convert: Callable[[Blocks], Blocks] = lambda blocks: blocks,
    convert_head: Callable[[Blocks], Blocks] | None = None,
) -> Packed:  # fmt: skip
    """Pack layers of transformers, the norm after them, and the output head.

    `blocks(layer, name)` gives the weights of a layer's matrix that are used in its module's place;
    `convert` changes those that modules have, `convert_head` the head's.
    """
    packed, rows, arena = [], [], Arena()
    for number, layer in enumerate(layers):
        for name in MATRICES:
            given = blocks(number, name) if blocks else None
            packed.append(
                pack(given or convert(blocks_of(layer.get_submodule(name).weight)), arena)
            )
            rows.append(describe(packed[-1]))
    packed.append(pack(head_blocks or (convert_head or convert)(blocks_of(head.weight)), arena))
    attention = [layer.self_attn for layer in layers]
    pairs = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in layers]
    head_norms, biases = np.zeros((0, 2, 0), np.float32), np.zeros((0, 0), np.float32)
    if hasattr(attention[0], "q_norm"):
        head_norms = _stacked([(a.q_norm.weight, a.k_norm.weight) for a in attention])
    if attention[0].q_proj.bias is not None:
        parts = [torch.cat([p.bias for p in (a.q_proj, a.k_proj, a.v_proj)]) for a in attention]
        biases = _stacked([parts])[0]
    model = Model(
        matrices=np.array(rows).reshape(len(layers), len(MATRICES), -1),
        head=describe(packed[-1]),
        norms=_stacked([(first.weight, second.weight) for first, second in pairs]),
        final_norm=_stacked([[final_norm.weight]])[0, 0],
        head_norms=head_norms,
        biases=biases,
        epsilon=np.float32(config.rms_norm_eps),
        attend=attender(key_bytes).address,
        heads=config.num_attention_heads,
        head_dim=head_dim,
    )
    return Packed(model, packed, tuple(sorted({FORMATS[m.format].name for m in packed})))


def _stacked(rows: Any) -> NDArray[np.float32]:
    """Parameters in two dimensions as one float32 array."""
    return np.array([[part.detach().float().numpy() for part in row] for row in rows])


class Embedding:
    """Embeddings of a module's own table."""

    def __init__(self, table: Any) -> None:
        self.blocks = blocks_of(table.weight)

    def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """int64 [n] -> float32 [n, width]; the last one's for tokens that the table lacks."""
        return self.blocks.rows(np.minimum(tokens, len(self.blocks.numbers) - 1)).dense()


class GgufWeights:
    """The matrices of a GGUF file that a model was converted from."""

    def __init__(self, file: Path, head_dim: int) -> None:
        from gguf import GGUFReader  # of the extra gguf

        # the reader itself is not kept: its vocabulary takes more memory than the matrices
        reader, self.head_dim = GGUFReader(file), head_dim
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(reader.fields["general.architecture"].contents())

    def blocks(self, layer: int, name: str) -> Blocks:
        """A layer's matrix, its rows in the order of transformers."""
        blocks = read_blocks(self.tensors[f"blk.{layer}.{MATRICES[name]}.weight"])
        if self.architecture != "llama" or name not in ("self_attn.q_proj", "self_attn.k_proj"):
            return blocks
        # llama.cpp rotates neighbours where transformers rotates the halves of a head
        order = np.arange(len(blocks.numbers)).reshape(-1, self.head_dim // 2, 2)
        return blocks.rows(order.transpose(0, 2, 1).reshape(-1))

    def head(self) -> Blocks:
        """The output head, which may be the embedding."""
        name = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return read_blocks(self.tensors[name])

    def embed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """The embeddings of tokens (int64 [n]), float32 [n, width]."""
        return read_blocks(self.tensors["token_embd.weight"], tokens).dense()
