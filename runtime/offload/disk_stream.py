"""Layers whose weights are read from a file in every pass, some layers ahead of the computation.

Threads read into every free slot, in the order of the layers. After the last layer they go on with
the first ones, so the slots fill while the next tree is drafted.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain

import torch

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.weight_stream import WeightStream
from sequoia_plan.runtime.offload.weight_file import (
    WeightBlock,
    WeightFile,
    aligned_memory,
    bytes_of,
)

THREADS = 2
"""Threads that read."""
THREAD_NAME = "sequoia-plan weights"
CHUNK_BYTES = 4 << 20
"""Bytes that a thread reads at once."""


class DiskStream(WeightStream):
    """Slots of memory that threads fill with blocks of a file, in order, in every pass."""

    can_be_captured = False  # the host waits for its threads, and copies memory that is not pinned

    def __init__(
        self, file: WeightFile, blocks: Sequence[WeightBlock], slots: int, device: torch.device
    ) -> None:
        self.file, self.blocks = file, list(blocks)
        self.bytes = sum(block.size for block in blocks)
        self.host_memory = [
            aligned_memory(max(block.size for block in blocks[slot::slots]))
            for slot in range(min(slots, len(blocks)))
        ]
        self.host_views = [bytes_of(memory) for memory in self.host_memory]
        self.memory = [memory.to(device) for memory in self.host_memory]
        self.checked_blocks: set[WeightBlock] = set()
        self.threads = ThreadPoolExecutor(THREADS, THREAD_NAME)
        self.layer_in_slot = [-1] * len(self.memory)
        """The layer whose weights each slot has or gets; -1 after an error."""
        self.reads: list[list[Future[None]]] = [[] for _ in self.memory]
        """The reads of that layer, a chunk each."""
        for layer in range(len(self.memory)):
            self._begin_reads(layer)

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
                self.file.check(block, self.host_views[slot])
                self.checked_blocks.add(block)
        except SequoiaPlanError:
            self.layer_in_slot[slot] = -1
            raise
        if self.memory[slot] is not self.host_memory[slot]:
            self.memory[slot].copy_(self.host_memory[slot])

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
        is_own_thread = threading.current_thread().name.startswith(THREAD_NAME)
        self.threads.shutdown(wait=not is_own_thread)
        self.file.close()

    def _begin_reads(self, layer: int) -> None:
        """Let the threads read a layer's block into its slot, after what they read already."""
        slot = layer % len(self.memory)
        self.layer_in_slot[slot] = layer
        starts = range(0, self.blocks[layer].size, CHUNK_BYTES)
        try:
            self.reads[slot] = [self.threads.submit(self._read, layer, start) for start in starts]
        except RuntimeError as error:
            raise SequoiaPlanError(f"{self.file.path}: is closed; load the models again") from error

    def _read(self, layer: int, start: int) -> None:
        """Read the chunk of a layer's block that begins at `start`."""
        if layer == start == 0:
            self.file.check_unchanged()
        block, memory = self.blocks[layer], self.host_views[layer % len(self.memory)]
        self.file.read(block.offset + start, memory[start : min(start + CHUNK_BYTES, block.size)])
