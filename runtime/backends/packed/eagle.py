"""The packed pass of an EAGLE-3 draft."""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.backends.packed.attention import BLOCK
from sequoia_plan.runtime.backends.packed.backend import multiplied
from sequoia_plan.runtime.backends.packed.forward import UNIT, put_side_by_side
from sequoia_plan.runtime.backends.packed.packed_pass import (
    PackedCache,
    PackedPass,
    cache_dtype,
    visible_slots,
)
from sequoia_plan.runtime.backends.packed.weights import (
    PackedWeights,
    Storage,
    model_of,
    packed_in_memory,
)
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.models.fused_layer import is_as_defined
from sequoia_plan.runtime.models.module_state import Watch, everything
from sequoia_plan.runtime.models.stored import ModuleSource

IN_8_BITS = Storage(bits=8)


class PackedEagle:
    """Runs the passes of a draft that reads tokens with features (`draft.eagle_model.Eagle3`).

    Its matrices are rounded to 8 bits.
    """

    feature_dtype = torch.float32
    formats = "Q8_0"
    weights: PackedWeights | None = None
    version = 0

    def __init__(self, draft: Any) -> None:
        self.draft = draft
        self.pack()

    def __getstate__(self) -> Any:
        """For pickle and copies: the copy of the draft, whose weights `check` packs."""
        return {"draft": self.draft}

    def pack(self) -> None:
        """Take over the draft's weights."""
        draft, self.watch = self.draft, Watch(everything)
        config, dtype = draft.config, cache_dtype(draft.dtype)
        source = ModuleSource(draft)
        names = {n: n if n.startswith("lm_head.") else f"model.{n}" for n in source.tensors}
        source.tensors = {names[n]: tensor for n, tensor in source.tensors.items()}
        self.weights = packed_in_memory(source, IN_8_BITS)
        model = model_of(self.weights, config, config.head_dim, dtype.itemsize)
        self.fc = self.weights.matrix("model.fc.weight")
        self.runner = PackedPass(
            model, config, self.weights.head.outputs, config.num_key_value_heads, dtype, workers=1
        )
        self.norms = [
            self.weights.vector(f"model.layers.0.{name}.weight")
            for name in ("input_layernorm", "hidden_norm")
        ]
        self.output_layers = (-1 if draft.norms.output else len(draft.layers),)
        self.residual_is_normed = draft.norms.before_residual
        self.watch.look(draft)

    def check(self) -> None:
        """Pack the weights anew if the draft changed, or raise SequoiaPlanError."""
        if self.weights is None:
            self.pack()
        elif names := self.watch.changes(self.draft):
            if reason := why_not(self.draft):
                raise SequoiaPlanError(f"draft: {names[0]} changed, and {reason}; load it anew")
            self.refresh()

    def refresh(self) -> None:
        """Pack the weights anew."""
        self.pack()
        self.version += 1

    def new_cache(self, capacity: int, *, counts_positions: bool) -> PackedCache:
        """A cache for a sequence of up to so many slots."""
        return self.runner.new_cache(capacity, counts_positions=counts_positions)

    def embedding(self, target: Any) -> Any:
        """The embeddings that it reads; `target`: the backend of its target."""
        assert self.weights
        return target.embedding if self.draft.embed_tokens is None else self.weights.embedding

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """See `EagleModel.fuse`: [rows, states * width] -> float32 [rows, width]."""
        return multiplied(self.fc, hidden_states.float())

    def __call__(
        self, cache: PackedCache, tokens: Tensor, features: Tensor, positions: Tensor,
        slots: Tensor, mask: Tensor, logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over rows: the logits and outputs of the last ones.

        `features` float32 [rows, width].
        """
        places = positions.numpy(), slots.numpy(), visible_slots(mask)
        return self._read(cache, tokens.numpy(), features.numpy(), *places, logits_to_keep)

    def _read(
        self, cache: PackedCache, tokens: NDArray[np.int64], x: NDArray[np.float32],
        positions: NDArray[np.int64], slots: NDArray[np.int64], visible: NDArray[np.bool_],
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same; `visible`: see `forward.Inputs`."""
        rows, width = x.shape
        first = np.zeros((rows, -(-2 * width // UNIT) * UNIT), np.float32)
        embedded = self.draft.embed(torch.from_numpy(tokens)).float().numpy()
        put_side_by_side(embedded, x, *self.norms, self.runner.model.epsilon, first)
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


def why_not(draft: Any) -> str:
    """Why PyTorch runs a draft; "" if it can be packed."""
    config = draft.config
    if type(draft).__name__ != "Eagle3" or config.head_dim % UNIT or draft.lm_head is None:
        return (
            f"it is a {type(draft).__name__}, has no head of its own, or its heads are no multiple "
            f"of {UNIT} numbers"
        )
    if draft.window is not None or any(
        p.ndim == 1 and "bias" in n for n, p in draft.named_parameters()
    ):
        return "it has a window or biases"
    if draft.norms.before_fc or draft.norms.each_before_fc:
        return "it has norms before its features"
    if not all(map(is_as_defined, draft.modules())):
        return "a module has hooks"
    return ""
