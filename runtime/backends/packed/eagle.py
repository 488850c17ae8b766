"""The compiled pass of an EAGLE-3 draft."""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.backends.packed.attention import BLOCK
from sequoia_plan.runtime.backends.packed.compiled_pass import (
    CompiledCache,
    CompiledModel,
    CompiledPass,
    cache_dtype,
    visible_slots,
)
from sequoia_plan.runtime.backends.packed.forward import UNIT, project, put_side_by_side
from sequoia_plan.runtime.backends.packed.packing import Arena, in_8_bits, pack
from sequoia_plan.runtime.backends.packed.weights import Embedding, blocks_of, describe, pack_model
from sequoia_plan.runtime.models.compiled_passes import passes
from sequoia_plan.runtime.models.fused_layer import is_as_defined
from sequoia_plan.runtime.models.model_state import State, Watch, copied, weights


class CompiledEagle(CompiledModel):
    """Runs the passes of a draft that reads tokens with features (`draft.eagle_model.Eagle3`)."""

    def __init__(self, draft: Any) -> None:
        self.watch = Watch(_copied)
        self.pack(draft)

    def pack(self, draft: Any) -> None:
        """See `Copy`."""
        config, first = draft.config, draft.layers[0]
        self.dtype = cache_dtype(draft)
        head = draft.get_output_embeddings()
        packed = pack_model(
            list(draft.layers), draft.norm, head, config, config.head_dim, self.dtype.itemsize,
            convert=in_8_bits,
        )  # fmt: skip
        self.fc = pack(in_8_bits(blocks_of(draft.fc.weight)), Arena())
        self.described_fc = describe(self.fc)
        self.runner = CompiledPass(
            packed, config, len(head.weight), draft.rotary_emb, self.dtype, workers=1
        )
        self.embed = Embedding(draft.get_input_embeddings())
        self.norms = [
            norm.weight.detach().float().numpy()
            for norm in (first.input_layernorm, first.hidden_norm)
        ]
        self.output_layers = (-1 if draft.norms.output else len(draft.layers),)
        self.residual_is_normed = draft.norms.before_residual
        self.watch.look(draft)

    def why_not(self, draft: Any, names: Collection[str]) -> str:
        """See `Copy`."""
        return why_not(draft)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """See `EagleModel.fuse`: [rows, states * width] -> float32 [rows, width]."""
        rows = np.zeros((len(hidden_states), self.fc.inputs), np.float32)
        rows[:, : hidden_states.shape[1]] = hidden_states.float().numpy()
        features = np.empty((len(rows), self.fc.padded_outputs), np.float32)
        project(self.described_fc, rows, features)
        return torch.from_numpy(features)[:, : self.fc.outputs]

    def __call__(
        self, cache: CompiledCache, tokens: Tensor, features: Tensor, positions: Tensor,
        slots: Tensor, mask: Tensor, logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over rows: the logits and outputs of the last ones.

        `features` float32 [rows, width].
        """
        places = positions.numpy(), slots.numpy(), visible_slots(mask)
        return self._read(cache, tokens.numpy(), features.numpy(), *places, logits_to_keep)

    def _read(
        self, cache: CompiledCache, tokens: NDArray[np.int64], x: NDArray[np.float32],
        positions: NDArray[np.int64], slots: NDArray[np.int64], visible: NDArray[np.bool_],
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same; `visible`: see `forward.Inputs`."""
        rows, width = x.shape
        first = np.zeros((rows, -(-2 * width // UNIT) * UNIT), np.float32)
        epsilon = self.runner.packed.model.epsilon
        put_side_by_side(self.embed(tokens), x, *self.norms, epsilon, first)
        if self.residual_is_normed:
            x = first[:, width : 2 * width]
        logits, outputs = self.runner(
            cache, x, positions, slots, visible, logits_to_keep, self.output_layers, first
        )
        return logits, outputs[-logits_to_keep:]

    def read_level(
        self, draft_pass: Any, sequence: SequenceState, previous: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass of a step (see `EagleDrafter.forward`); `previous` [rows, width]: outputs."""
        cache: Any = sequence.draft
        mask = draft_pass.mask[:0] if previous is None else draft_pass.mask
        tokens, read_slots, positions, slots, visible = place_rows(
            int(sequence.length), draft_pass.input_slots.numpy(), draft_pass.offsets.numpy(),
            mask.float().numpy(), sequence.tokens.numpy(),
        )  # fmt: skip
        if previous is None:
            features = cache.features.numpy()[read_slots]
        else:
            features = previous.numpy()[draft_pass.parent_rows.numpy()]
        num_logits = draft_pass.num_parents
        return self._read(cache, tokens, features, positions, slots, visible, num_logits)


@njit(nogil=True, cache=True, error_model="numpy")
def place_rows(length, input_slots, offsets, mask, tokens):
    """Of each row: its token, that token's slot, its position, its slot, and which it sees.

    `mask` float32 [rows, tree size + 2], or [0, n] for committed tokens.
    """
    rows, size = input_slots.shape[0], max(mask.shape[1] - 2, 0)
    of_token, read_slots = np.empty(rows, np.int64), np.empty(rows, np.int64)
    positions, slots = np.empty(rows, np.int64), np.empty(rows, np.int64)
    visible = np.zeros((rows, -(-(length + size) // BLOCK) * BLOCK), np.bool_)
    for row in range(rows):
        slot = length + input_slots[row]
        read = max(slot, 0)
        of_token[row], read_slots[row] = tokens[read], read
        positions[row] = max(length + offsets[row] - 1, 0)
        slots[row] = slot if slot >= 0 else length - slot
        if mask.shape[0]:
            visible[row, 1:length] = True
            for node in range(size):
                visible[row, length + node] = length + node > 0 and mask[row, 1 + node] >= 0
        else:
            visible[row, min(read, 1) : read + 1] = True
    return of_token, read_slots, positions, slots, visible


def _copied(draft: Any) -> State:
    """What the pass depends on; the output head may be the target's."""
    head = weights(draft.get_output_embeddings(), False)
    return {f"output head {name}": state for name, state in head.items()} | copied(draft, True)


def compile_eagle(draft: Any) -> str:
    """Compile the pass of an EAGLE-3 draft; returns "", or why PyTorch runs it."""
    if not (reason := why_not(draft)):
        passes[draft] = CompiledEagle(draft)
    return reason


def why_not(draft: Any) -> str:
    """Why PyTorch runs a draft; "" if it can be compiled."""
    config = draft.config
    if type(draft).__name__ != "Eagle3" or config.head_dim % UNIT:
        return f"it is a {type(draft).__name__}, or its heads are no multiple of {UNIT} numbers"
    if draft.window is not None or any(
        p.ndim == 1 and "bias" in n for n, p in draft.named_parameters()
    ):
        return "it has a window or biases"
    if not all(map(is_as_defined, draft.modules())):
        return "a module has hooks"
    return ""
