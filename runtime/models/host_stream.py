"""Layers whose weights are copied from the host's pinned memory to a CUDA device in every pass, always some layers ahead.

A step begins by sending the first layers on their way, which then travel while the draft grows its tree. Everything that a step copies, it
also waits for, so a step can be captured as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.stream import attach
from sequoia_plan.runtime.models.weight_file import Block, WeightFile


def stream_from_host(model: Any, file: WeightFile, layers: Mapping[nn.Module, Block], slots: int, device: torch.device) -> None:
    """Let `layers`, in the order in which a pass runs them, take their weights from host memory, which `file` fills once.

    Raises:
        SequoiaPlanError: if the file is damaged, or the memory cannot be pinned.
    """
    blocks = [pin(file.memory_of(block)) for block in layers.values()]
    file.close()
    attach(model, HostRing(blocks, slots, device), layers)


def pin(memory: Tensor) -> Tensor:
    """Let the device read `memory` by itself. `Tensor.pin_memory` would take up to twice as much, rounded to a power of two.

    Raises:
        SequoiaPlanError: if the driver refuses.
    """
    failure = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if failure:
        raise SequoiaPlanError(f"offload host: {memory.numel()} bytes of host memory cannot be pinned (CUDA error {failure}); free some, or use --offload disk")
    return memory


class HostRing:
    """Slots of device memory that a stream of copies fills, in order, in each pass.

    Args:
        blocks: uint8, pinned: what a pass needs, in order; blocks k and k + `slots` share slot k mod `slots`.

    Attributes:
        memory: uint8, the slots.
        bytes: what one pass copies.
    """

    def __init__(self, blocks: Sequence[Tensor], slots: int, device: torch.device) -> None:
        self.blocks, self.device = list(blocks), device
        self.bytes = sum(block.numel() for block in blocks)
        self.memory = [torch.empty(max(block.numel() for block in blocks[slot::slots]), dtype=torch.uint8, device=device) for slot in range(slots)]
        self.copies = torch.cuda.Stream(device)
        self.arrived: list[Any] = [None] * slots
        self.begun, self.turn = False, 0  # has this pass's first copy begun, and which block is taken next

    def begin(self) -> None:
        """Send the first blocks of the next pass on their way, if they are not yet."""
        if self.begun and self.turn == 0:
            return
        self.begun, self.turn = True, 0
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        for turn in range(len(self.memory)):
            self._copy(turn)

    def take(self, turn: int) -> None:
        """Let the computation wait for block `turn`."""
        if turn == 0:
            self.begin()
        torch.cuda.current_stream(self.device).wait_event(self.arrived[turn % len(self.memory)])

    def release(self, turn: int) -> None:
        """The pass needs block `turn` no more: once it has computed so far, the next block takes its slot."""
        self.turn = turn + 1
        if turn + len(self.memory) < len(self.blocks):
            self.copies.wait_event(torch.cuda.current_stream(self.device).record_event())
            self._copy(turn + len(self.memory))
        elif self.turn == len(self.blocks):
            self.begun, self.turn = False, 0

    def fill(self) -> None:
        """Nothing is copied before a step begins."""

    def close(self) -> None:
        """Give the pinned memory back."""
        for block in self.blocks:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self.blocks = []

    def _copy(self, turn: int) -> None:
        slot, block = turn % len(self.memory), self.blocks[turn]
        with torch.cuda.stream(self.copies):
            self.memory[slot][: block.numel()].copy_(block, non_blocking=True)
        self.arrived[slot] = self.copies.record_event()
