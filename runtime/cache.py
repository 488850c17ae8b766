"""A model's KV cache of one sequence, in fixed memory, written slot by slot."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sequoia_plan.artifacts import SequoiaPlanError

Kind = tuple[torch.device, torch.dtype, int, int]
"""What memory a layer's keys or values need: device, dtype, heads, head_dim."""

Layout = tuple[tuple[Kind, Kind] | None, ...]
"""The kinds of each layer's keys and values; None for a layer that writes none."""


class TreeCache(Cache):
    """Keys and values in one tensor [entries, 1, heads, capacity, head_dim] for each kind of memory: one for most models.

    The caller says where the next forward writes (`slots`) and how far it looks (`extent`): a step keeps both fixed in
    shape, and what lies between the last committed token and the extent is hidden by its mask.

    Args:
        layers: how many the model has, or their layout once it is known; until then every entry has its own tensor.
        capacity: slots.
        device: of what is not keys and values.
        counts_positions: keep `positions` (int64 [capacity]), the position in the sequence of each slot's token.

    Attribute `finite` (bool [1]): did every row of logits of the sequence so far have a finite maximum? Attribute `heard`: the hidden
    states of the pass at hand that a hook has left, by number (taps.py).

    Raises:
        SequoiaPlanError: if there is not the memory.
    """

    def __init__(self, layers: int | Layout, capacity: int, device: torch.device | str = "cpu", *, counts_positions: bool = False) -> None:
        self.capacity = capacity
        self.extent = capacity
        self.slots: Tensor | None = None
        self.positions = torch.arange(capacity, device=device) if counts_positions else None
        self.finite = torch.ones(1, dtype=torch.bool, device=device)
        self.heard: dict[int, Tensor] = {}
        self.blocks: list[Tensor] = []
        layout: Layout = (None,) * layers if isinstance(layers, int) else layers
        super().__init__(layers=[_Layer(self) for _ in layout])
        blocks = {kind: self.allocate(kind, count) for kind, count in Counter(kind for pair in layout for kind in pair or ()).items()}
        entry: defaultdict[Kind, Iterator[int]] = defaultdict(itertools.count)
        for layer, pair in zip(self.layers, layout, strict=True):
            if pair:
                layer.bind(*(blocks[kind][next(entry[kind])] for kind in pair))

    def at(self, slots: Tensor, extent: int) -> TreeCache:
        """Let the next forward write its tokens to `slots` (int64 [tokens]) and attend to slots below `extent`."""
        self.slots, self.extent = slots, extent
        return self

    def keep(self, slots: Tensor, start: Tensor) -> None:
        """Move the entries in `slots` (int64 [k]) to start, start + 1, ..., in one gather for each kind of memory."""
        to = start + torch.arange(slots.numel(), device=slots.device)
        for block in self.blocks:
            block.index_copy_(3, to.to(block.device), block.index_select(3, slots.to(block.device)))
        if self.positions is not None:
            self.positions.index_copy_(0, to, to)

    def views(self, start: int, count: int) -> list[Tensor]:
        """The keys and values in so many slots from `start` on, in place."""
        return [block[:, :, :, start : start + count] for block in self.blocks]

    def allocate(self, kind: Kind, entries: int) -> Tensor:
        """A block of memory. Zeros, so that what is hidden is finite."""
        device, dtype, heads, head_dim = kind
        try:
            self.blocks.append(torch.zeros(entries, 1, heads, self.capacity, head_dim, dtype=dtype, device=device))
        except RuntimeError as error:  # CUDA's OutOfMemoryError is one too
            gigabytes = entries * heads * self.capacity * head_dim * dtype.itemsize / 1e9
            raise SequoiaPlanError(f"KV cache: {self.capacity} tokens need {gigabytes:.3g} GB on {device}, which has less; lower max_new_tokens") from error
        return self.blocks[-1]

    @property
    def layout(self) -> Layout:
        """What the layers that have been run need."""
        return tuple((_kind(layer.keys), _kind(layer.values)) if layer.is_initialized else None for layer in self.layers)


class _Layer(CacheLayerMixin):
    def __init__(self, cache: TreeCache) -> None:
        super().__init__()
        self.cache = cache

    def bind(self, keys: Tensor, values: Tensor) -> None:
        """Use [1, heads, capacity, head_dim] each."""
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.bind(*(self.cache.allocate(_kind(states), 1)[0] for states in (key_states, value_states)))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.cache.slots is not None
        slots = self.cache.slots.to(self.keys.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys[:, :, : self.cache.extent], self.values[:, :, : self.cache.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        return self.cache.extent

    def get_max_length(self) -> int:
        return self.cache.capacity


def _kind(states: Tensor) -> Kind:
    return states.device, states.dtype, states.shape[1], states.shape[3]
