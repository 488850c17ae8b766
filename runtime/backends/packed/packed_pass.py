"""Passes of packed layers: their workers, their cache, and memory for what is between."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.backends.packed.attention import BATCHES, BLOCK, QUERIES, WORD_BYTES
from sequoia_plan.runtime.backends.packed.forward import (
    ROW_BYTES,
    UNIT,
    Inputs,
    Model,
    Outputs,
    Scratch,
    forward,
)
from sequoia_plan.runtime.backends.packed.tiles import aligned_zeros
from sequoia_plan.runtime.backends.packed.vectors import LANES
from sequoia_plan.runtime.base.cache import TreeCache, round_up
from sequoia_plan.runtime.base.weight_stream import WeightStream


class Workers:
    """Threads that run the parts of a pass. Each set of workers has its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.counter = aligned_zeros((8,), np.int64)
        self.lock = Lock()
        self.process = 0  # the one that the pool's threads are in

    def __reduce__(self) -> Any:
        """For pickle and copies: threads of their own."""
        return Workers, (self.count,)

    def run(self, function: Any, *arguments: Any) -> None:
        """Call a function once in each thread: with its number, their count, and `counter`."""
        if self.process != os.getpid():  # a fork has none of its parent's threads
            self.pool, self.process = ThreadPoolExecutor(self.count), os.getpid()
        self.counter[0] = 0
        address = self.counter.ctypes.data
        others: list[Future[None]] = []
        try:
            for worker in range(1, self.count):
                others.append(self.pool.submit(function, worker, self.count, address, *arguments))
            function(0, self.count, address, *arguments)
            for other in others:
                other.result()
        except BaseException:  # an interrupt: let go of those that wait for this thread
            self.counter[0] = np.iinfo(np.int64).max // 2
            wait(others)
            raise


def visible_slots(mask: Tensor) -> NDArray[np.bool_]:
    """bool [rows, slots in whole blocks] from an additive mask [rows, slots]."""
    rows, extent = mask.shape
    visible = np.zeros((rows, round_up(extent, BLOCK)), np.bool_)
    np.greater_equal(mask.float().numpy(), 0, out=visible[:, :extent])
    return visible


class PackedCache(TreeCache):
    """Keys and values of all layers, see `forward.Inputs`."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype,
        *, counts_positions: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(0, capacity, counts_positions=counts_positions)
        slots, bits = round_up(capacity, BLOCK), np.uint16 if dtype == torch.bfloat16 else np.uint32
        n = WORD_BYTES // np.dtype(bits).itemsize
        shape = (layers, heads, slots // n, head_dim, n)
        try:
            self.keys = aligned_zeros(
                (layers, heads, slots // BLOCK, head_dim // n, BLOCK, n), bits
            )
            self.values = aligned_zeros(shape, bits)
        except MemoryError as error:
            gigabytes = 2 * np.prod(shape) * np.dtype(bits).itemsize / 1e9
            raise SequoiaPlanError(
                f"KV cache: {capacity} tokens need {gigabytes:.3g} GB, more than there are; lower "
                "max_new_tokens"
            ) from error

    def take(self, other: Any, count: int) -> None:
        """See `TreeCache.take`."""
        super().take(other, count)
        blocks, words = -(-count // BLOCK), -(-count // self.keys.shape[5])
        self.keys[:, :, :blocks] = other.keys[:, :, :blocks]
        self.values[:, :, :words] = other.values[:, :, :words]

    def commit(self, slots: Tensor, start: Tensor) -> None:
        """See `TreeCache.commit`."""
        super().commit(slots, start)
        move_slots(self.keys, self.values, slots.numpy(), int(start))


@njit(nogil=True, cache=True)
def move_slots(keys: Any, values: Any, slots: Any, start: int) -> None:
    """Move entries to the slots from `start` on, in ascending order."""
    n = keys.shape[5]
    for place in range(slots.shape[0]):
        source, target = slots[place], start + place
        if source != target:
            keys[:, :, target // BLOCK, :, target % BLOCK] = keys[
                :, :, source // BLOCK, :, source % BLOCK
            ]
            values[:, :, target // n, :, n - 1 - target % n] = values[
                :, :, source // n, :, n - 1 - source % n
            ]


class PackedPass:
    """Runs packed layers over rows. Its scratch memory lets one pass run at a time.

    `streamed_layers` are those whose weights `stream` brings in every pass.
    """

    def __init__(
        self, model: Model, config: Any, vocabulary: int, kv_heads: int, dtype: torch.dtype,
        workers: int, stream: WeightStream | None = None, streamed_layers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.model, self.vocabulary, self.kv_heads, self.dtype = model, vocabulary, kv_heads, dtype
        self.width = config.hidden_size
        self.padded_width = round_up(self.width, UNIT)
        self.inner_width = round_up(config.intermediate_size, UNIT)
        self.rotary_embedding = LlamaRotaryEmbedding(config)
        self.workers, self.stream, self.streamed = Workers(workers), stream, streamed_layers
        self.rotary = np.zeros((0, 2, model.head_dim // 2), np.float32)
        self.scratch_rows = self.scratch_slots = 0

    def new_cache(self, capacity: int, *, counts_positions: bool) -> PackedCache:
        """A cache for a sequence of up to so many slots."""
        model = self.model
        return PackedCache(
            len(model.matrices), self.kv_heads, model.head_dim, capacity, self.dtype,
            counts_positions=counts_positions,
        )  # fmt: skip

    def __call__(
        self, cache: PackedCache, x: NDArray[np.float32], positions: NDArray[np.int64],
        slots: NDArray[np.int64], visible: NDArray[np.bool_], logits_to_keep: int = 0,
        layers: Sequence[int] = (), first: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over rows: their logits, and hidden states after so many `layers` (-1: normed).

        `x` float32 [rows, width]; `visible` and `first`: see `Inputs`. Returns float32 [rows to
        keep, vocabulary] and [rows, states * width], and notes in the cache if a logit is not
        finite.
        """
        rows, extent = visible.shape
        kept = logits_to_keep or rows
        logits = np.empty((kept, round_up(self.vocabulary, UNIT)), np.float32)
        hidden = np.empty((len(layers), rows, self.padded_width), np.float32)
        largest = np.empty((self.workers.count, kept), np.float32)
        outputs = Outputs(
            logits, hidden, np.array(layers, np.int64), largest, np.empty(largest.shape, np.int64),
            self.vocabulary,
        )  # fmt: skip
        spans = np.stack([visible.argmax(1), extent - visible[:, ::-1].argmax(1)], 1)
        with self.workers.lock:  # scratch memory serves one pass at a time
            self._reserve(rows, extent)
            self.reserve_rotary(cache.capacity)
            self.x[:, :rows, : self.width] = x
            inputs = Inputs(
                self.x, np.zeros((0, 0), np.float32) if first is None else first, positions, slots,
                visible, spans, self.rotary, cache.keys, cache.values,
            )  # fmt: skip
            for part in self._parts():
                self.workers.run(forward, 1, self.model, inputs, self.scratch, outputs, *part)
        logits = logits[:, : self.vocabulary]
        if not np.isfinite(largest.max(0)).all():
            cache.finite.fill_(False)
        states = torch.from_numpy(hidden)[:, :, : self.width].transpose(0, 1).flatten(1)
        return torch.from_numpy(logits), states

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Ranges of layers, each of which is in memory when it is yielded; the last has no end."""
        start, num_layers = 0, len(self.model.matrices)
        for number, layer in enumerate(self.streamed if self.stream else ()):
            assert self.stream
            if layer > start:
                yield start, layer
            self.stream.wait_for(number)
            yield layer, layer + 1
            self.stream.release(number)
            start = layer + 1
        yield start, num_layers + 1

    def reserve_rotary(self, positions: int) -> None:
        """Provide rotary embeddings of so many positions."""
        if len(self.rotary) < positions:
            places, half = torch.arange(positions)[None], self.model.head_dim // 2
            like = torch.zeros(1, dtype=torch.float32)
            cosines, sines = self.rotary_embedding(like, places)
            table = torch.stack([cosines[0, :, :half], sines[0, :, :half]], 1)
            self.rotary = table.contiguous().numpy()

    def _reserve(self, rows: int, slots: int) -> None:
        """Provide scratch memory for so many rows and slots; what is large enough is used again."""
        if rows <= self.scratch_rows and slots <= self.scratch_slots:
            return
        self.scratch_rows = rows = max(rows, self.scratch_rows)
        self.scratch_slots = slots = max(slots, self.scratch_slots)
        self.x, self.scratch = self.new_scratch(self.workers.count, rows, slots)

    def new_scratch(
        self, workers: int, rows: int, slots: int
    ) -> tuple[NDArray[np.float32], Scratch]:
        """Memory for passes of so many workers, rows and slots; the first is `Inputs.x`."""
        model = self.model
        widest = int(max(model.matrices[..., ROW_BYTES].max(initial=0), model.head[ROW_BYTES]))

        def floats(*shape: int) -> NDArray[np.float32]:
            return aligned_zeros(shape, np.float32)

        return floats(workers, rows, self.padded_width), Scratch(
            normed=floats(workers, rows, self.padded_width),
            encoded=aligned_zeros((workers, rows, widest)),
            attention=floats(workers, QUERIES * BATCHES, LANES + 2 * model.head_dim + slots),
            heads=floats(rows, model.heads + 2 * self.kv_heads, model.head_dim),
            attended=floats(rows, model.heads, model.head_dim),
            added=floats(rows, self.padded_width),
            gate=floats(rows, self.inner_width),
            up=floats(rows, self.inner_width),
        )


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of cached keys and values of a model in a dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
