"""Layers whose weights are read from a file in every pass, some layers ahead of the computation.

Threads read into every free slot, in the order of the layers. After the last layer they go on with
the first ones, so the slots fill while the next tree is drafted.
"""

import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.base.forks import renewed_in_forks
from sequoia_plan.models.base.weight_stream import WeightStream
from sequoia_plan.models.offload.weight_file import (
    ALIGNMENT,
    CHUNK_BYTES,
    Place,
    WeightBlock,
    WeightFile,
    aligned_memory,
    bytes_of,
)

THREADS = 2  # threads that read
THREAD_NAME = "sequoia-plan weights"


class DiskStream(WeightStream):
    """Slots of memory that threads fill with blocks of a file, in order, in every pass."""

    can_be_captured = False  # the host waits for its threads, and copies memory that is not pinned

    def __init__(
        self,
        file: WeightFile,
        blocks: Sequence[WeightBlock],
        slots: int,
        device: torch.device,
        expert_bytes: int = 0,
    ) -> None:
        self.file, self.blocks = file, list(blocks)
        self.bytes = sum(block.size for block in blocks)
        self.host_memory = [
            aligned_memory(max(block.size for block in blocks[slot::slots]))
            for slot in range(min(slots, len(blocks)))
        ]
        self.memory = [memory.to(device) for memory in self.host_memory]
        self.checked_blocks: set[WeightBlock] = set()
        self.sizes = [0] * len(self.memory)
        """Bytes of the block that each slot has or gets, from its start on."""
        self.routed: list[Sequence[Place]] = [() for _ in blocks]
        """Tensors of each layer with a row for each expert; a pass reads those that it chooses."""
        self.expert_bytes = expert_bytes
        """Memory for experts that stay in it."""
        self.counts: Counter[tuple[int, int]] = Counter()
        """How often each expert was chosen so far, by its layer and row."""
        self.kept: dict[tuple[int, int], list[Tensor]] = {}
        """The experts that stay in memory, once a pass has read them, and their weights."""
        renewed_in_forks(self)._at_fork_reinit()  # makes threads and locks, here and in each fork
        for layer in range(len(self.memory)):
            self._begin_reads(layer)

    def _at_fork_reinit(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, THREAD_NAME)
        self.layer_in_slot = [-1] * len(self.memory)
        """The layer whose weights each slot has or gets; -1 after an error."""
        self.reads: list[list[Future[None]]] = [[] for _ in self.memory]
        """The reads of that layer, a chunk each."""

    def wait_for(self, layer: int) -> None:
        """Wait until the weights of this streamed layer are in their slot.

        A block is checked when it is complete for the first time.
        """
        slot, block = layer % len(self.memory), self.blocks[layer]
        if self.layer_in_slot[slot] != layer:  # the previous pass was given up
            wait(self.reads[slot])
            self._begin_reads(layer)
        try:
            for read in self.reads[slot]:
                read.result()
            if block not in self.checked_blocks:
                self.file.check(block, zlib.crc32(bytes_of(self.host_memory[slot])[: block.size]))
                self.checked_blocks.add(block)
        except SequoiaPlanError:
            self.layer_in_slot[slot] = -1
            raise
        self.bytes = self.sizes[slot] + (self.bytes if layer else 0)
        self._to_device(slot, 0, self.sizes[slot])

    def read_chosen(self, layer: int, chosen: Tensor) -> None:
        """Bring the experts that a layer chose (`chosen`: their rows) into its slot.

        If the slot has the whole block, nothing is read; an expert that is kept is copied.
        """
        slot = layer % len(self.memory)
        counts = Counter((layer, row) for row in chosen.flatten().tolist())
        self.counts.update(counts)
        ranges = []  # of bytes to read
        for expert in counts:
            if self.sizes[slot] == 0 and not self.kept.get(expert):
                for weights in self._weights(*expert):
                    start = weights.data_ptr() - self.memory[slot].data_ptr()
                    end = round_up(start + weights.nbytes, ALIGNMENT)
                    ranges.append((start // ALIGNMENT * ALIGNMENT, end))
        self.reads[slot] = self._submit(layer, ranges)
        kept = self.kept.keys() & counts
        for expert in kept:
            for weights, copy in zip(self._weights(*expert), self.kept[expert], strict=False):
                weights.copy_(copy)
        for read in self.reads[slot]:
            read.result()
        for start, end in ranges:
            self._to_device(slot, start, end)
        for expert in kept:
            self.kept[expert] = self.kept[expert] or [w.clone() for w in self._weights(*expert)]
        self.bytes += sum(end - start for start, end in ranges)

    def keep_most_chosen(self, counts: Sequence[int] = ()) -> None:
        """Let the experts that were chosen most often stay in memory, as many as fit.

        `counts`: of each expert, by layer and row. If they are not as many as there are experts,
        the stream's own count decides.
        """
        experts = sorted(self.counts)
        if len(counts) == len(experts):
            self.counts = Counter(dict(zip(experts, counts, strict=True)))
        self.expert_counts = tuple(self.counts[expert] for expert in experts)
        sizes = (sum(weights.nbytes for weights in self._weights(*expert)) for expert in experts)
        most_chosen = self.counts.most_common(self.expert_bytes // max(sizes, default=1))
        self.kept = {expert: self.kept.get(expert, []) for expert, _ in most_chosen}

    def _weights(self, layer: int, row: int) -> list[Tensor]:
        """An expert's rows of its layer's routed tensors, in their slot."""
        memory = self.memory[layer % len(self.memory)]
        return [place.view(memory)[row] for place in self.routed[layer]]

    def release(self, layer: int) -> None:
        """Let the slot of this layer be filled again: the pass has used its weights."""
        following = layer + len(self.memory)
        self._begin_reads(following if following < len(self.blocks) else layer % len(self.memory))

    def wait_until_full(self) -> None:
        """Wait until all slots are full, as they are after a pause."""
        wait(chain.from_iterable(self.reads))

    def close(self) -> None:
        """End the threads and close the file. A later pass raises an error."""
        # garbage may be collected in one of the threads, which cannot wait for itself
        self.threads.shutdown(wait=not threading.current_thread().name.startswith(THREAD_NAME))
        self.file.close()

    def _begin_reads(self, layer: int) -> None:
        """Let the threads read a layer's block into its slot, after what they read already."""
        slot = layer % len(self.memory)
        self.layer_in_slot[slot], block = layer, self.blocks[layer]
        # to be checked, a block is read whole once
        size = 0 if block in self.checked_blocks and self.routed[layer] else block.size
        self.sizes[slot] = size
        chunks = [(start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)]
        self.reads[slot] = self._submit(layer, chunks)

    def _submit(self, layer: int, ranges: Sequence[tuple[int, int]]) -> list[Future[None]]:
        """Let the threads read ranges (first byte, end) of a layer's block into its slot."""
        try:
            return [self.threads.submit(self._read, layer, start, end) for start, end in ranges]
        except RuntimeError as error:
            raise SequoiaPlanError(f"{self.file.path}: is closed; load the models again") from error

    def _to_device(self, slot: int, start: int, end: int) -> None:
        """Copy what was read to the device that computes."""
        if self.memory[slot] is not self.host_memory[slot]:
            self.memory[slot][start:end].copy_(self.host_memory[slot][start:end])

    def _read(self, layer: int, start: int, end: int) -> None:
        """Read the bytes from `start` to `end` of a layer's block into the layer's slot."""
        memory = bytes_of(self.host_memory[layer % len(self.memory)])
        self.file.read(self.blocks[layer].offset + start, memory[start:end])
