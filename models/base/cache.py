"""The KV cache of one model and one sequence, allocated once and written by slot."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sequoia_plan.artifacts import SequoiaPlanError

LayerMemory = tuple[torch.device, torch.dtype, int, int]
"""What memory the keys, or the values, of one layer need: device, dtype, heads, head_dim."""

CacheLayout = tuple[tuple[LayerMemory, LayerMemory] | None, ...]
"""The memory of each layer's keys and values; None for a layer that writes none."""


def cache_argument(forward: Callable[..., object]) -> str:
    """The name under which a function of transformers takes its cache.

    `cache` from transformers 5.24 on, `past_key_values` before, and in models of other authors.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def cache_among(options: Mapping[str, object]) -> Cache | None:
    """The cache among the named arguments of a layer, under either name; None if there is none."""
    return options.get("cache", options.get("past_key_values"))


class TreeCache(Cache):
    """Keys and values of all layers, in one tensor for each kind of layer memory.

    A pass writes to `slots` (int64 [tokens]) and attends to slots below `extent`; `length` int64
    [tokens] is what a model that scales its queries by position asks for. `positions` int64
    [capacity]: of each slot, if windows count these; `finite` bool [1]: were all logits;
    `aux_hidden_states`: of the last pass, by number; `features`: see `EagleDrafter`; `blocks`: see
    `allocate`.
    """

    def __init__(
        self,
        layers: int | CacheLayout,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        counts_positions: bool = False,
    ) -> None:
        self.capacity = capacity
        self.extent = capacity
        self.length: Tensor | None = None
        self.slots: Tensor | None = None
        self.positions = torch.arange(capacity, device=device) if counts_positions else None
        self.finite = torch.ones(1, dtype=torch.bool, device=device)
        self.aux_hidden_states: dict[int, Tensor] = {}
        self.features = torch.zeros(0, 0, device=device)
        self.may_wait = False  # for the pass after it, and run with it: nobody needs its logits
        self.blocks: list[Tensor] = []
        layout = (None,) * layers if isinstance(layers, int) else layers
        super().__init__(layers=[])
        self.layers = [self.new_layer() for _ in layout]
        entries = Counter(memory for pair in layout for memory in pair or ())
        with torch.inference_mode(False):  # what it allocates cannot be written outside of it
            blocks = {memory: self.allocate(memory, count) for memory, count in entries.items()}
        next_entry: defaultdict[LayerMemory, Iterator[int]] = defaultdict(itertools.count)
        for layer, pair in zip(self.layers, layout, strict=True):
            if pair:
                layer.bind(*(blocks[memory][next(next_entry[memory])] for memory in pair))

    def new_layer(self) -> CacheLayer:
        """A layer without memory."""
        return CacheLayer(self)

    def clear(self) -> None:
        """Forget what a recurrent layer knows of the sequence; none is in this cache."""

    def save(self) -> None:
        """Let `roll_back` go back to here."""

    def roll_back(self, count: Tensor) -> None:
        """Let recurrent layers know only the first `count` (int64 [1]) tokens of the last pass."""

    def at(self, slots: Tensor, extent: int) -> TreeCache:
        """Let the next pass write to `slots` (int64 [tokens]), and attend to slots below `extent`.

        Returns the cache itself.
        """
        self.slots, self.extent = slots, extent
        return self

    def commit(self, slots: Tensor, start: Tensor) -> None:
        """Move the entries in `slots` (int64 [k]) to the slots start, start + 1, ... in place.

        `start` int64 [1].
        """
        destination = start + torch.arange(slots.numel(), device=slots.device)
        for block in self.blocks:
            entries = block.index_select(3, slots.to(block.device))
            block.index_copy_(3, destination.to(block.device), entries)
        if self.positions is not None:
            self.positions.index_copy_(0, destination, destination)

    def take(self, other: TreeCache, count: int) -> None:
        """Copy the first `count` slots from a cache of the same model."""
        for block, other_block in zip(self.blocks, other.blocks, strict=True):
            block[:, :, :, :count] = other_block[:, :, :, :count]
        self.features[: count + 1] = other.features[: count + 1]

    def views(self, start: int, count: int) -> list[Tensor]:
        """Views of all layers' keys and values in the slots start to start + count - 1."""
        return [block[:, :, :, start : start + count] for block in self.blocks]

    def allocate(self, memory: LayerMemory, entries: int) -> Tensor:
        """Memory for keys or values of `entries` layers: [entries, 1, heads, capacity, head_dim].

        It is zeros, because even keys that the mask hides must be finite.
        """
        device, dtype, heads, head_dim = memory
        shape = (entries, 1, heads, self.capacity, head_dim)
        try:
            self.blocks.append(torch.zeros(shape, dtype=dtype, device=device))
        except RuntimeError as error:  # torch.OutOfMemoryError is one too
            gigabytes = entries * heads * self.capacity * head_dim * dtype.itemsize / 1e9
            raise SequoiaPlanError(
                f"KV cache: {self.capacity} tokens need {gigabytes:.3g} GB on {device}, which has "
                "less; lower max_new_tokens"
            ) from error
        return self.blocks[-1]

    @property
    def layout(self) -> CacheLayout:
        """The memory of the layers that have run."""
        return tuple(
            (_memory_of(layer.keys), _memory_of(layer.values)) if layer.is_initialized else None
            for layer in self.layers
        )


class CacheLayer(CacheLayerMixin):
    """One layer of a TreeCache, with the methods that transformers calls."""

    def __init__(self, cache: TreeCache) -> None:
        super().__init__()
        self.cache = cache

    def bind(self, keys: Tensor, values: Tensor) -> None:
        """Use these tensors, [1, heads, capacity, head_dim] each."""
        self.keys, self.values, self.is_initialized = keys, values, True

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory like the keys and values of the first pass."""
        states = (self.cache.allocate(_memory_of(s), 1)[0] for s in (key_states, value_states))
        self.bind(*states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values, [1, heads, tokens, head_dim], to the cache's slots."""
        if not self.is_initialized:
            # a recurrent layer has a method of this name for its states
            CacheLayer.lazy_initialization(self, key_states, value_states)
        assert self.cache.slots is not None
        slots = self.cache.slots.to(self.keys.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.visible()

    def visible(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots that attention looks at."""
        return self.keys[:, :, : self.cache.extent], self.values[:, :, : self.cache.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots attention looks at, and the first of them."""
        return self.cache.extent, 0

    def get_seq_length(self) -> int | Tensor:
        """How many slots attention looks at, or a pass's number for each row."""
        return self.cache.extent if self.cache.length is None else self.cache.length

    def get_max_length(self) -> int:
        """How many slots there are."""
        return self.cache.capacity


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def _memory_of(states: Tensor) -> LayerMemory:
    """The memory that keys or values [1, heads, slots, head_dim] need."""
    return states.device, states.dtype, states.shape[1], states.shape[3]
