"""The packed pass of an EAGLE-3 draft."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.files.metadata import module_metadata
from sequoia_plan.models.files.stored import ModuleSource
from sequoia_plan.models.layers.fused_layer import is_as_defined
from sequoia_plan.models.loaded_model import Traits
from sequoia_plan.models.module_state import Watch, check_mode, everything
from sequoia_plan.models.packed.backend import PackedBackend, multiplied
from sequoia_plan.models.packed.forward import UNIT, normalise
from sequoia_plan.models.packed.packed_pass import (
    PackedCache,
    PackedPass,
    cache_dtype,
    visible_slots,
)
from sequoia_plan.models.packed.tiles import Matrix
from sequoia_plan.models.packed.weights import PackedWeights, Storage, model_of, packed_in_memory

IN_4_BITS = Storage(bits=4, head_bits=4)


class PackedEagle:
    """Runs an EAGLE-3 draft by the packed pass, in 4 bits; methods are as in `HiddenStateDraft`."""

    feature_dtype = torch.float32
    notes_finite, traits = True, Traits(is_compiled=True, reads_features=True)
    weights: PackedWeights | None = None

    def __init__(self, draft: Any) -> None:
        self.draft, self.version = draft, 0
        self.pack()

    def can_be_captured(self) -> bool:
        return False

    def weight_memory(self) -> tuple[tuple[int, int], ...]:
        return self.draft.weight_memory()

    def metadata(self) -> dict[str, object]:
        return module_metadata(self.draft) | {"placement": "compiled", "weights": "Q4_1"}

    def __getstate__(self) -> dict[str, object]:
        """For pickle and copies: the copy of the draft, whose weights `check` packs."""
        return {"draft": self.draft, "version": self.version}

    def pack(self) -> None:
        """Make the packed weights and their pass from the draft's, as they are now."""
        draft, self.watch = self.draft, Watch(everything)
        config, dtype = draft.config, cache_dtype(draft.dtype)
        source = ModuleSource(draft)
        source.tensors = {
            name if name.startswith("lm_head.") else f"model.{name}": tensor
            for name, tensor in source.tensors.items()
        }
        self.weights = packed_in_memory(source, IN_4_BITS)
        model = model_of(self.weights, config, config.head_dim, dtype.itemsize)
        self.fc = self.weights.matrix("model.fc.weight")
        # for prompts; in a step the target's workers run its passes
        self.runner = PackedPass(model, config, self.weights.head.outputs, dtype, workers=1)
        self.runner.owners = self.weights
        self.norms = [
            self.weights.vector(f"model.layers.0.{name}.weight")
            for name in ("input_layernorm", "hidden_norm")
        ]
        self.output_layers = (-1 if draft.norms.output else len(draft.layers),)
        self.residual_is_normed = draft.norms.before_residual
        self.watch.look(draft)

    def check(self) -> None:
        """Pack the weights anew if the draft changed, or raise SequoiaPlanError."""
        check_mode(self.draft)
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

    def embedding(self, target: PackedBackend) -> Matrix:
        """The embeddings that it reads; `target`: the backend of its target."""
        assert self.weights
        return target.embedding if self.draft.embed_tokens is None else self.weights.embedding

    def features_of(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [rows, layers * width] -> features float32 [rows, width]."""
        return multiplied(self.fc, hidden_states.float())

    def new_cache(self, capacity: int, *, counts_positions: bool) -> PackedCache:
        """A cache of so many slots."""
        return self.runner.new_cache(capacity, counts_positions=counts_positions)

    def read(
        self, cache: PackedCache, tokens: Tensor, features: Tensor, rows: Sequence[Tensor],
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `HiddenStateDraft.read`; the pass has cosines and sines of its own."""
        slots, positions, mask, *_ = rows
        residual = features.numpy()
        num_tokens, width = residual.shape
        # what the first layer's attention reads: normed embedding and feature side by side
        attended = np.zeros((num_tokens, round_up(2 * width, UNIT)), np.float32)
        embedded = self.draft.embed(tokens).float().numpy()
        epsilon, (embedding_norm, feature_norm) = self.runner.model.epsilon, self.norms
        for embedding, feature, row in zip(embedded, residual, attended, strict=True):
            normalise(embedding, embedding_norm, epsilon, row)
            normalise(feature, feature_norm, epsilon, row[width:])
        if self.residual_is_normed:
            residual = attended[:, width : 2 * width]
        logits, outputs = self.runner(
            cache, residual, positions.numpy(), slots.numpy(), visible_slots(mask), logits_to_keep,
            self.output_layers, attended,
        )  # fmt: skip
        return logits, outputs[-logits_to_keep:]


def why_not(draft: Any) -> str:
    """Why a draft cannot be packed, so that PyTorch runs it; "" if it can."""
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
