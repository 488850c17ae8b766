"""Passes of packed layers: their workers, their cache, and memory for what is between."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.cache import TreeCache, round_up
from sequoia_plan.models.base.dtype import Float32, Int64
from sequoia_plan.models.base.forks import renewed_in_forks
from sequoia_plan.models.base.weight_stream import WeightStream
from sequoia_plan.models.packed.attention import BATCHES, BLOCK, QUERIES, WORD_BYTES
from sequoia_plan.models.packed.forward import ROW_BYTES, UNIT, Model, Reader, copy, forward
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.models.packed.tiles import aligned_zeros
from sequoia_plan.models.packed.vectors import LANES
from sequoia_plan.models.packed.workers import COUNTER_WORDS

NOTHING, NO_ROWS = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


class Workers:
    """Threads that share the work of a pass: the caller's, and `count` - 1 of a pool.

    `counter` is what `workers.wait` and `workers.take` count in.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.counter = aligned_zeros((COUNTER_WORDS,), np.int64)
        renewed_in_forks(self)._at_fork_reinit()

    def _at_fork_reinit(self) -> None:
        self.lock, self.pool = Lock(), ThreadPoolExecutor(self.count)

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies: threads of their own."""
        return Workers, (self.count,)

    def run(self, function: Callable[..., object], *arguments: object) -> None:
        """Call function(worker, count, address of `counter`, *arguments) once in each thread."""
        self.counter[:] = 0
        address = self.counter.ctypes.data
        others: list[Future[object]] = []
        try:
            for worker in range(1, self.count):
                others.append(self.pool.submit(function, worker, self.count, address, *arguments))
            function(0, self.count, address, *arguments)
            for other in others:
                other.result()
        except BaseException:  # an interrupt: let go of those that wait for this thread
            self.counter[:] = 1 << 40  # more than there are rounds, or things to take
            wait(others)
            raise


def visible_slots(mask: Tensor) -> NDArray[np.bool_]:
    """bool [rows, slots in whole blocks] from an additive mask [rows, slots]."""
    rows, extent = mask.shape
    visible = np.zeros((rows, round_up(extent, BLOCK)), np.bool_)
    np.greater_equal(mask.float().numpy(), 0, out=visible[:, :extent])
    return visible


class PackedCache(TreeCache):
    """Keys and values of all layers, see `forward.Reader`."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, capacity: int, dtype: torch.dtype,
        counts_positions: bool,
    ) -> None:  # fmt: skip
        super().__init__(0, capacity, counts_positions=counts_positions)
        self.clear()
        slots, per_word = round_up(capacity, BLOCK), WORD_BYTES // dtype.itemsize
        shape = (layers, heads, slots // per_word, head_dim, 2)
        try:
            self.keys = aligned_zeros(
                (layers, heads, slots // BLOCK, head_dim // per_word, BLOCK, 2), np.uint16
            )
            self.values = aligned_zeros(shape, np.uint16)
        except MemoryError as error:
            gigabytes = 4 * np.prod(shape) / 1e9
            raise SequoiaPlanError(
                f"KV cache: {capacity} tokens need {gigabytes:.3g} GB, more than there are; lower "
                "max_new_tokens"
            ) from error

    def clear(self) -> None:
        """See `TreeCache.clear`; `waiting` has the arguments of a pass that `may_wait`."""
        self.waiting: list[tuple[object, ...]] = []

    def take(self, other: TreeCache, count: int) -> None:
        super().take(other, count)
        blocks = -(-count // BLOCK)
        words = blocks * self.values.shape[2] // self.keys.shape[2]
        self.keys[:, :, :blocks] = other.keys[:, :, :blocks]
        self.values[:, :, :words] = other.values[:, :, :words]

    def commit(self, slots: Tensor, start: Tensor) -> None:
        super().commit(slots, start)
        move_slots(self.keys, self.values, slots.numpy(), int(start))


@compiled
def move_slots(keys, values, slots, start):
    """Move the entries of `slots`, int64 [k], which ascend, to the slots start, start + 1, ...

    `keys` and `values`: see `forward.Reader`.
    """
    per_word = values.shape[3] // keys.shape[3]  # numbers of a word: 2 in bfloat16, 1 in float32
    for index in range(slots.shape[0]):
        source, target = slots[index], start + index
        if source == target:
            continue
        for layer in range(keys.shape[0]):
            for head in range(keys.shape[1]):
                key, value = keys[layer, head], values[layer, head]
                old, new = key[source // BLOCK], key[target // BLOCK]
                old_value, new_value = value[source // per_word], value[target // per_word]
                for half in range(2):  # of the words, as 16-bit numbers
                    copy(old[:, source % BLOCK, half], new[:, target % BLOCK, half])
                    if half >= per_word - 1:  # both in float32; in bfloat16 each slot has one
                        old_half, new_half = half - source % per_word, half - target % per_word
                        copy(old_value[:, old_half], new_value[:, new_half])


class PackedPass:
    """Runs packed layers over rows (tokens). Its scratch memory lets one pass run at a time.

    `streamed_layers` are those whose weights `stream` brings in every pass; the head's parts count
    as layers. `dtype` is the cache's; `rotary` float32 [positions, 2, head_dim / 2], cosines and
    sines. `owners` own the memory of the weights, of which `model` has addresses.
    """

    owners: object = None

    def __init__(
        self, model: Model, config: PreTrainedConfig, vocabulary: int, dtype: torch.dtype,
        workers: int, stream: WeightStream | None = None, streamed_layers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.model, self.vocabulary, self.dtype = model, vocabulary, dtype
        self.width, self.kv_heads = config.hidden_size, config.num_key_value_heads
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
            counts_positions,
        )  # fmt: skip

    def __call__(
        self, cache: PackedCache, x: Float32, positions: Int64,
        slots: Int64, visible: NDArray[np.bool_], logits_to_keep: int,
        layers: Sequence[int], first: Float32 = NO_ROWS,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over rows: logits, and the hidden states after each of `layers` (-1: normed).

        `x` float32 [rows, width], embeddings; `visible` bool [rows, extent]; `first`: what the
        first layer attends to instead of the normed `x` (see `Reader`). Returns float32 [rows to
        keep, vocabulary] and [rows, states * width], and notes in the cache if a logit is not
        finite.
        """
        rows, extent = visible.shape
        kept = logits_to_keep or rows
        spans = np.stack([visible.argmax(1), extent - visible[:, ::-1].argmax(1)], 1)
        with self.workers.lock:  # scratch memory serves one pass at a time
            if rows > self.scratch_rows or extent > self.scratch_slots:  # it only grows
                self.scratch_rows = max(rows, self.scratch_rows)
                self.scratch_slots = max(extent, self.scratch_slots)
                sizes = self.workers.count, self.scratch_rows, self.scratch_slots
                self.scratch = self.new_scratch(*sizes)
            self.scratch["x"][:, :rows, : self.width] = x
            reader = self.new_reader(
                cache, self.workers.count, kept, layers, self.vocabulary, **self.scratch,
                attended_first=first, slots=slots, positions=positions, visible=visible,
                spans=spans, tokens=NOTHING, read_slots=NOTHING, last=NOTHING,
            )  # fmt: skip
            if self.stream and cache.may_wait:  # with its scratch memory
                cache.waiting, self.scratch_rows = [(reader, rows, 0, kept)], 0
            else:
                self.run(cache, reader, rows, 0, kept)
        if not np.isfinite(reader.largest.max(0)).all():
            cache.finite.fill_(False)
        logits = torch.from_numpy(reader.logits[:, : self.vocabulary])
        states = torch.from_numpy(reader.hidden[:, :rows, : self.width])
        return logits, states.transpose(0, 1).flatten(1)

    def run(self, cache: PackedCache, *arguments: object) -> None:
        """Run a pass; `arguments` are those of `forward` from `reader` to `kept`.

        One that waits in the cache runs along, first in each layer: weights are streamed once.
        """
        passes, cache.waiting = [*cache.waiting, arguments], []
        for layers in self.layer_ranges():
            for others in passes:
                self.workers.run(forward, 1, *others, *layers)

    def layer_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of layers (the head's parts follow them), each in memory when it is yielded."""
        start, num_layers = 0, len(self.model.matrices) + len(self.model.head)
        for number, layer in enumerate(self.streamed):
            assert self.stream
            if layer > start:
                yield start, layer
            self.stream.wait_for(number)
            yield layer, layer + 1
            self.stream.release(number)
            start = layer + 1
        if start < num_layers:
            yield start, num_layers

    def new_reader(
        self, cache: PackedCache, workers: int, kept: int, layers: Sequence[int], vocabulary: int,
        **others: NDArray[np.generic],
    ) -> Reader:  # fmt: skip
        """What passes read, with memory for logits of `kept` rows and for hidden states.

        `layers`: see `Reader`; `others`: its other fields, those of `new_scratch` among them.
        """
        if len(self.rotary) < cache.capacity:
            numbers, half = torch.arange(cache.capacity)[None], self.model.head_dim // 2
            cosines, sines = self.rotary_embedding(torch.zeros(1, dtype=torch.float32), numbers)
            self.rotary = torch.stack([cosines[0, :, :half], sines[0, :, :half]], 1).numpy()
        return Reader(
            model=self.model, rotary=self.rotary, keys=cache.keys, values=cache.values,
            logits=np.empty((kept, round_up(self.vocabulary, UNIT)), np.float32),
            hidden=np.zeros((len(layers), len(others["heads"]), self.padded_width), np.float32),
            state_layers=np.array(layers, np.int64), largest=np.zeros((workers, kept), np.float32),
            best=np.zeros((workers, kept), np.int64), vocabulary=vocabulary, **others,
        )  # fmt: skip

    def new_scratch(self, workers: int, rows: int, slots: int) -> dict[str, NDArray[np.generic]]:
        """Memory for passes of so many workers, rows and slots: fields of a `Reader`, by name.

        What every worker computes for itself has memory for each of them.
        """
        model = self.model
        widest = int(max(model.matrices[..., ROW_BYTES].max(initial=0), model.head[0, ROW_BYTES]))
        own, inner = (workers, rows, self.padded_width), (rows, self.inner_width)
        shapes = {
            "x": own,
            "normed": own,
            "attention": (workers, QUERIES * BATCHES, LANES + 2 * model.head_dim + slots),
            # heads' queries, keys and values
            "heads": (rows, model.heads + 2 * self.kv_heads, model.head_dim),
            "attended": (rows, model.heads, model.head_dim),
            "added": own[1:],
            "gate": inner,
            "up": inner,
        }
        memory = {name: aligned_zeros(shape, np.float32) for name, shape in shapes.items()}
        return memory | {"encoded": aligned_zeros((workers, rows, widest))}


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of cached keys and values of a model in a dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
