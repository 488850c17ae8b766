"""The KV cache of the compiled pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.cache import TreeCache, round_up
from sequoia_plan.runtime.compiled.packing import aligned_zeros
from sequoia_plan.runtime.compiled.vectors import LANES


class CompiledCache(TreeCache):
    """Keys in blocks of 16 slots, and values by slot, of all layers (see `forward.Inputs`)."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype,
        *, counts_positions: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(0, capacity, counts_positions=counts_positions)
        slots = round_up(capacity, LANES)
        bits = np.uint16 if dtype == torch.bfloat16 else np.uint32
        shape = (layers, heads, slots // LANES, head_dim, LANES)
        try:
            self.keys = aligned_zeros(shape, bits)
            self.values = aligned_zeros((layers, heads, slots, head_dim), bits)
        except MemoryError as error:
            gigabytes = 2 * np.prod(shape) * np.dtype(bits).itemsize / 1e9
            raise SequoiaPlanError(
                f"KV cache: {capacity} tokens need {gigabytes:.3g} GB, more than there are; lower "
                "max_new_tokens"
            ) from error

    def commit(self, slots: Tensor, start: Tensor) -> None:
        """See `TreeCache.commit`."""
        super().commit(slots, start)
        move_slots(self.keys, self.values, slots.numpy(), int(start))


@njit(nogil=True, cache=True)
def move_slots(keys: Any, values: Any, slots: Any, start: int) -> None:
    """Move entries to the slots from `start` on, in ascending order."""
    for place in range(slots.shape[0]):
        source, target = slots[place], start + place
        if source != target:
            keys[:, :, target // LANES, :, target % LANES] = keys[
                :, :, source // LANES, :, source % LANES
            ]
            values[:, :, target] = values[:, :, source]
