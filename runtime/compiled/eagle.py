"""The compiled pass of an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.runtime.compiled.cache import CompiledCache
from sequoia_plan.runtime.compiled.compiled_pass import CompiledPass
from sequoia_plan.runtime.compiled.forward import UNIT, project, put_side_by_side
from sequoia_plan.runtime.compiled.packing import Arena, in_8_bits, pack
from sequoia_plan.runtime.compiled.weights import blocks_of, describe, pack_model
from sequoia_plan.runtime.models.compiled_passes import passes
from sequoia_plan.runtime.models.fused_layer import is_as_defined
from sequoia_plan.runtime.models.model_state import Copy, State, Watch, copied, weights


class CompiledEagle(Copy):
    """Runs the passes of a draft that reads tokens with features (`draft.eagle_model.Eagle3`)."""

    def __init__(self, draft: Any) -> None:
        self.watch = Watch(_copied)
        self.pack(draft)

    def pack(self, draft: Any) -> None:
        """See `Copy`."""
        config, first = draft.config, draft.layers[0]
        self.dtype = torch.bfloat16 if draft.dtype == torch.bfloat16 else torch.float32
        head = draft.get_output_embeddings()
        packed = pack_model(
            list(draft.layers), draft.norm, head, config, config.head_dim, self.dtype.itemsize,
            convert=in_8_bits,
        )  # fmt: skip
        self.fc = pack(in_8_bits(blocks_of(draft.fc.weight)), Arena())
        self.runner = CompiledPass(
            packed, config.hidden_size, config.intermediate_size, len(head.weight),
            config.num_key_value_heads, draft.rotary_emb, self.dtype, 1,
        )  # fmt: skip
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

    @property
    def formats(self) -> str:
        """The formats of its weights, as files record them."""
        return "+".join(self.runner.packed.formats)

    def new_cache(self, capacity: int, *, counts_positions: bool) -> CompiledCache:
        """A cache for a sequence of up to so many slots."""
        return self.runner.new_cache(capacity, counts_positions=counts_positions)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """See `EagleModel.fuse`: [rows, states * width] -> float32 [rows, width]."""
        rows = np.zeros((len(hidden_states), self.fc.inputs), np.float32)
        rows[:, : hidden_states.shape[1]] = hidden_states.float().numpy()
        features = np.empty((len(rows), self.fc.padded_outputs), np.float32)
        project(describe(self.fc), rows, features)
        return torch.from_numpy(features)[:, : self.fc.outputs]

    def __call__(
        self, cache: CompiledCache, embedded: Tensor, features: Tensor, positions: Tensor,
        slots: Tensor, mask: Tensor, logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over rows: the logits of the last ones, and all rows' outputs.

        `embedded`, `features` [rows, width].
        """
        rows, width = features.shape
        x = features.float().numpy()
        first = np.zeros((rows, -(-2 * width // UNIT) * UNIT), np.float32)
        epsilon = self.runner.packed.model.epsilon
        put_side_by_side(embedded.float().numpy(), x, *self.norms, epsilon, first)
        if self.residual_is_normed:
            x = first[:, width : 2 * width]
        return self.runner(
            cache, x, positions, slots, mask, logits_to_keep, self.output_layers, first
        )


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
        return f"{type(draft).__name__} with heads of {config.head_dim} numbers"
    if draft.window is not None or any(
        p.ndim == 1 and "bias" in n for n, p in draft.named_parameters()
    ):
        return "it has a window or biases"
    if not all(map(is_as_defined, draft.modules())):
        return "a module has hooks"
    return ""
