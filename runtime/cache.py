"""The KV cache of one sequence, in fixed memory, written slot by slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCache(Cache):
    """Keys and values of every layer in one tensor [layers, 2, 1, heads, capacity, head_dim].

    The caller says where the next forward writes (`slots`) and how far it looks (`extent`): a step keeps both fixed in
    shape, and what lies between the last committed token and the extent is hidden by its mask.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.extent = capacity
        self.slots: Tensor | None = None
        self.memory: Tensor | None = None
        super().__init__(layers=[_Layer(self, index) for index in range(layers)])

    def at(self, slots: Tensor, extent: int) -> TreeCache:
        """Let the next forward write its tokens to `slots` (int64 [tokens]) and attend to slots below `extent`."""
        self.slots, self.extent = slots, extent
        return self

    def keep(self, rows: Tensor, start: Tensor) -> None:
        """Move the entries at `rows` (int64 [k]) to start, start + 1, ..., in one gather for all layers."""
        assert self.memory is not None
        slots = start + torch.arange(rows.numel(), device=rows.device)
        self.memory.index_copy_(4, slots, self.memory.index_select(4, rows))

    def allocate(self, key_states: Tensor) -> Tensor:
        """The memory, on first use: only the model knows heads, dtype and device. Zeros, so that what is hidden is finite."""
        if self.memory is None:
            _, heads, _, head_dim = key_states.shape
            self.memory = key_states.new_zeros(len(self.layers), 2, 1, heads, self.capacity, head_dim)
        return self.memory


class _Layer(CacheLayerMixin):
    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.allocate(key_states)[self.index]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.cache.slots, key_states)
        self.values.index_copy_(2, self.cache.slots, value_states)
        return self.keys[:, :, : self.cache.extent], self.values[:, :, : self.cache.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        return self.cache.extent

    def get_max_length(self) -> int:
        return self.cache.capacity
