"""Layers whose weights are read from a file in every pass, some layers ahead of the computation.

Threads read into every free slot, in the order of the layers. After the last layer they go on with
the first ones, so the slots fill while the next tree is drafted.
"""

import threading
from collections.abc import Sequence

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
CHUNK_BYTES = 4 << 20
"""Bytes that a thread reads at once."""


class DiskStream(WeightStream):
    """Slots of memory that threads fill with blocks of a file, in order, in every pass.

    Blocks have running numbers that continue from pass to pass: with n
    blocks, number k stands for the weights of streamed layer k modulo n.
    """

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
        self.state_changed = threading.Condition()
        self.is_closed = self.is_paused = False
        self.error: SequoiaPlanError | None = None
        self.active_reads = 0
        self._start_at(0)
        self.threads = [
            threading.Thread(target=self._read_chunks, daemon=True, name="sequoia-plan weights")
            for _ in range(THREADS)
        ]
        for thread in self.threads:
            thread.start()

    def wait_for(self, layer: int) -> None:
        """Wait until the weights of this streamed layer are in their slot."""
        slot = layer % len(self.memory)
        with self.state_changed:
            if layer != self.current_block % len(self.blocks):  # the previous pass was abandoned
                self._restart_at(layer)
            self.state_changed.wait_for(
                lambda: (
                    self.block_in_slot[slot] == self.current_block or self.error or self.is_closed
                )
            )
            if self.is_closed:
                raise SequoiaPlanError(f"{self.file.path}: is closed; load the models again")
            if error := self.error:
                self._restart_at(layer)
                raise error
        if self.memory[slot] is not self.host_memory[slot]:
            self.memory[slot].copy_(self.host_memory[slot])

    def release(self, layer: int) -> None:
        """Let the slot of this layer be filled again: the pass has used its weights."""
        with self.state_changed:
            self.is_free[layer % len(self.memory)] = True
            self.current_block += 1
            self.state_changed.notify_all()

    def wait_until_full(self) -> None:
        """Wait until all slots are full, as they are after a pause."""
        with self.state_changed:
            self.state_changed.wait_for(
                lambda: self.error or self.is_closed or not (any(self.is_free) or self.active_reads)
            )

    def close(self) -> None:
        """End the threads and close the file. A later pass raises an error."""
        with self.state_changed:
            self.is_closed = True
            self.state_changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
        self.file.close()

    def _restart_at(self, layer: int) -> None:
        """Drop what was read, and start again with this layer once no thread reads any more."""
        self.is_paused = True
        self.state_changed.wait_for(lambda: self.active_reads == 0)
        self.is_paused, self.error = False, None
        self._start_at(layer)
        self.state_changed.notify_all()

    def _start_at(self, layer: int) -> None:
        """Set the state of a stream with empty slots whose pass needs this layer next."""
        slots = len(self.memory)
        self.current_block = layer
        """Number of the block that the pass uses now, or will use next."""
        self.next_block = layer
        """Number of the block that threads read now."""
        self.next_offset = 0
        """Offset in that block of the next chunk to read."""
        self.is_free = [True] * slots
        self.block_in_slot = [-1] * slots
        """Number of the complete block in each slot; -1 for none."""
        self.missing_bytes = [0] * slots
        """Bytes of each slot's block that are not read yet."""

    def _slot_of(self, block_number: int) -> int:
        """The slot of a block, whose running number continues from pass to pass."""
        return block_number % len(self.blocks) % len(self.memory)

    def _read_chunks(self) -> None:
        """Read one chunk after another, until the stream is closed; each thread runs this."""
        while (chunk := self._next_chunk()) is not None:
            error: SequoiaPlanError | None = None
            is_complete = False
            try:
                is_complete = self._read_chunk(*chunk)
            except SequoiaPlanError as failure:
                error = failure
            except Exception as failure:  # the pass that waits for this block must learn of it
                error = SequoiaPlanError(f"{self.file.path}: cannot be read ({failure})")
            with self.state_changed:
                self.active_reads -= 1
                self.error = error or self.error
                if is_complete:
                    self.block_in_slot[self._slot_of(chunk[0])] = chunk[0]
                self.state_changed.notify_all()

    def _read_chunk(self, block_number: int, start: int) -> bool:
        """Read a chunk into its slot; a block is checked when it is complete for the first time."""
        layer, slot = block_number % len(self.blocks), self._slot_of(block_number)
        block = self.blocks[layer]
        if layer == 0 and start == 0:
            self.file.check_unchanged()
        chunk = self.host_views[slot][start : min(start + CHUNK_BYTES, block.size)]
        self.file.read(block.offset + start, chunk)
        with self.state_changed:
            self.missing_bytes[slot] -= len(chunk)
            is_complete = self.missing_bytes[slot] == 0
        if is_complete and block not in self.checked_blocks:
            self.file.check(block, self.host_views[slot])
            self.checked_blocks.add(block)
        return is_complete

    def _next_chunk(self) -> tuple[int, int] | None:
        """Wait for work. Returns a block's number and an offset in it; None once it is closed."""
        with self.state_changed:
            while not self.is_closed:
                slot = self._slot_of(self.next_block)
                block = self.blocks[self.next_block % len(self.blocks)]
                has_slot = self.next_offset > 0 or self.is_free[slot]
                if self.is_paused or self.error or not has_slot:
                    self.state_changed.wait()
                    continue
                if self.next_offset == 0:
                    self.is_free[slot] = False
                    self.missing_bytes[slot] = block.size
                chunk = self.next_block, self.next_offset
                self.active_reads += 1
                self.next_offset += CHUNK_BYTES
                if self.next_offset >= block.size:
                    self.next_block += 1
                    self.next_offset = 0
                return chunk
            return None
