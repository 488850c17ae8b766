"""Layers whose weights are copied from pinned host memory to a CUDA device in every pass.

Copies run some layers ahead of the computation. A step begins by starting the copies of the first
layers, which then run while the tree is drafted. A step waits for everything that it copies, so it
can be captured as one CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.weight_stream import WeightStream


def pin(memory: Tensor) -> Tensor:
    """Pin host memory in place, so that the device can read it by itself.

    `Tensor.pin_memory` would allocate up to twice as much, rounded to a power of two.
    """
    error_code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error_code:
        raise SequoiaPlanError(
            f"offload host: {memory.numel()} bytes of host memory cannot be pinned "
            f"(CUDA error {error_code}); free some, or use --offload disk"
        )
    return memory


class HostStream(WeightStream):
    """Slots of device memory that a CUDA stream of copies fills, in order, in every pass."""

    can_be_captured = True

    def __init__(self, blocks: Sequence[Tensor], slots: int, device: torch.device) -> None:
        self.blocks, self.device = list(blocks), device
        self.bytes = sum(block.numel() for block in blocks)
        sizes = (max(block.numel() for block in blocks[slot::slots]) for slot in range(slots))
        self.memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        # streams of another priority are others than those that graphs are captured on
        self.copies = torch.cuda.Stream(device, priority=-1)
        self.copy_finished: dict[int, torch.cuda.Event] = {}
        """By slot, the event that its last copy ends with."""
        self.has_begun = False
        """Whether the first copies of the next, or current, pass have started."""
        self.next_layer = 0
        """The layer that the pass will need next."""

    def begin_step(self) -> None:
        """Start the copies of the next pass's first blocks, if they have not started yet."""
        if self.has_begun and self.next_layer == 0:
            return
        self.has_begun, self.next_layer = True, 0
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        for layer in range(len(self.memory)):
            self._copy(layer)

    def wait_for(self, layer: int) -> None:
        """Let the computation wait for the weights of this streamed layer."""
        if layer == 0:
            self.begin_step()
        event = self.copy_finished[layer % len(self.memory)]
        torch.cuda.current_stream(self.device).wait_event(event)

    def release(self, layer: int) -> None:
        """Let the next block take the slot of this layer, once the layer has been computed."""
        self.next_layer = layer + 1
        if layer + len(self.memory) < len(self.blocks):
            self.copies.wait_event(torch.cuda.current_stream(self.device).record_event())
            self._copy(layer + len(self.memory))
        elif self.next_layer == len(self.blocks):
            self.has_begun, self.next_layer = False, 0

    def close(self) -> None:
        """Unpin the host memory."""
        for block in self.blocks:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self.blocks = []

    def _copy(self, layer: int) -> None:
        """Start the copy of this layer's weights into their slot."""
        slot, block = layer % len(self.memory), self.blocks[layer]
        with torch.cuda.stream(self.copies):
            self.memory[slot][: block.numel()].copy_(block, non_blocking=True)
        self.copy_finished[slot] = self.copies.record_event()
