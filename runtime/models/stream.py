"""Layers whose weights are read from a file in every pass, always some layers ahead of the one that computes.

A few slots of memory form a ring. The parameters of streamed layer k are views of slot k mod `slots`, so nothing moves when a layer's
weights arrive. Threads read into every slot that is free, in the order of the layers, and go on with the first layers once the last one
is read: while the next tree is drafted, the slots fill.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.weight_file import Block, WeightFile, aligned_memory, bytes_of

THREADS = 2
CHUNK = 4 << 20
"""Bytes that a thread reads at once."""


class Stream(Protocol):
    """What brings the weights of a model's streamed layers.

    Attributes:
        memory: uint8, slots on the device that computes; the weights of streamed layer k are in slot k mod their number.
        bytes: what one pass brings.
    """

    memory: list[Tensor]
    bytes: int

    def begin(self) -> None:
        """A step begins, whose pass will need the first layers."""

    def take(self, turn: int) -> None:
        """Wait for the weights of streamed layer `turn`."""

    def release(self, turn: int) -> None:
        """The pass needs those weights no more."""

    def fill(self) -> None:
        """Wait until all slots are full, as they are after a pause."""

    def close(self) -> None:
        """Bring nothing any more."""


_streams: WeakKeyDictionary[Any, Stream] = WeakKeyDictionary()


def stream_of(model: Any) -> Stream | None:
    """What brings the weights of a streamed model; None for one that is all in memory."""
    return _streams.get(model)


def stream_layers(model: Any, file: WeightFile, layers: Mapping[nn.Module, Block], slots: int, device: torch.device) -> None:
    """Let `layers`, in the order in which a pass runs them, take their weights from `file`.

    Args:
        slots: how many layers' weights are in memory at once.
        device: where the model computes; each block is copied there once it is read.
    """
    attach(model, Ring(file, list(layers.values()), slots, device), layers)


def attach(model: Any, stream: Stream, layers: Mapping[nn.Module, Block]) -> None:
    """Make the parameters of each layer views of its slot, and let each pass wait for them. The stream is closed when the model is no longer used."""
    for turn, (layer, block) in enumerate(layers.items()):
        memory = stream.memory[turn % len(stream.memory)]
        set_parameters(layer, {name: place.view(memory) for name, place in block.tensors.items()})
        layer.register_forward_pre_hook(lambda *_, turn=turn: stream.take(turn))
        layer.register_forward_hook(lambda *_, turn=turn: stream.release(turn))
    _streams[model] = stream
    finalize(model, stream.close)


def set_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the parameters, and buffers, of `module` new tensors, by the last parts of their names."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = module.get_submodule(".".join(path))
        if last in owner._parameters:
            owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[last] = tensor


class Ring:
    """Slots of memory that threads fill with blocks of a file, in order, again and again.

    Args:
        blocks: what a pass needs, in order; blocks k and k + `slots` share slot k mod `slots`.
        device: where the pass computes; on another device than the CPU, `take` copies a block there.

    Attributes:
        memory: uint8, the slots as the pass sees them.
        bytes: what one pass reads.
    """

    def __init__(self, file: WeightFile, blocks: Sequence[Block], slots: int, device: torch.device) -> None:
        self.file, self.blocks = file, list(blocks)
        self.bytes = sum(block.size for block in blocks)
        self.read_into = [aligned_memory(max(block.size for block in blocks[slot::slots])) for slot in range(min(slots, len(blocks)))]
        self.views = [bytes_of(memory) for memory in self.read_into]
        self.memory = [memory.to(device) for memory in self.read_into]
        self.checked: set[Block] = set()
        self.changed = threading.Condition()
        self.closed = self.paused = False
        self.error: SequoiaPlanError | None = None
        self.reading = 0  # chunks that threads read at the moment
        self._begin_with(0)
        self.threads = [threading.Thread(target=self._read, daemon=True, name="sequoia-plan weights") for _ in range(THREADS)]
        for thread in self.threads:
            thread.start()

    def begin(self) -> None:
        """Nothing to do: the threads read ahead by themselves."""

    def take(self, turn: int) -> None:
        """Wait until block `turn` is in its slot.

        Raises:
            SequoiaPlanError: if it cannot be read; the next `take` tries again.
        """
        with self.changed:
            if turn != self.used % len(self.blocks):  # the pass before was given up
                self._restart(turn)
            slot = turn % len(self.memory)
            self.changed.wait_for(lambda: self.ready[slot] == self.used or self.error or self.closed)
            if self.closed:
                raise SequoiaPlanError(f"{self.file.path}: is closed; load the models again")
            if error := self.error:
                self._restart(turn)
                raise error
        if self.memory[slot] is not self.read_into[slot]:
            self.memory[slot].copy_(self.read_into[slot])

    def release(self, turn: int) -> None:
        """The pass needs block `turn` no more: its slot may be filled again."""
        with self.changed:
            self.free[turn % len(self.memory)] = True
            self.used += 1
            self.changed.notify_all()

    def fill(self) -> None:
        """Wait until all slots are full, as they are after a pause."""
        with self.changed:
            self.changed.wait_for(lambda: self.error or self.closed or not (any(self.free) or self.reading))

    def close(self) -> None:
        """End the threads and close the file. A pass that comes later raises an error."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
        self.file.close()

    def _restart(self, turn: int) -> None:
        """Forget what was read, once no thread reads any more, and begin with block `turn`."""
        self.paused = True
        self.changed.wait_for(lambda: self.reading == 0)
        self.paused, self.error = False, None
        self._begin_with(turn)
        self.changed.notify_all()

    def _begin_with(self, turn: int) -> None:
        slots = len(self.memory)
        self.used = self.next = turn  # blocks are counted on from pass to pass: how many were used, and which is read now
        self.at = 0  # bytes of that block which threads have taken on
        self.free, self.ready, self.left = [True] * slots, [-1] * slots, [0] * slots  # left: bytes that are not there yet

    def _read(self) -> None:
        """What a thread does."""
        while (chunk := self._next_chunk()) is not None:
            number, start = chunk
            turn = number % len(self.blocks)
            slot, block = turn % len(self.memory), self.blocks[turn]
            failure, complete = None, False
            try:
                if start == turn == 0:
                    self.file.check_unchanged()
                part = self.views[slot][start : min(start + CHUNK, block.size)]
                self.file.read(block.offset + start, part)
                with self.changed:
                    self.left[slot] -= len(part)
                    complete = self.left[slot] == 0
                if complete and block not in self.checked:
                    self.file.check(block, self.views[slot])
                    self.checked.add(block)
            except SequoiaPlanError as error:
                failure = error
            except Exception as error:  # whoever waits for this block must learn of it
                failure = SequoiaPlanError(f"{self.file.path}: cannot be read ({error})")
            with self.changed:
                self.reading -= 1
                if failure:
                    self.error = failure
                elif complete:
                    self.ready[slot] = number
                self.changed.notify_all()

    def _next_chunk(self) -> tuple[int, int] | None:
        """The number of a block, and where in it to read; None once the ring is closed."""
        with self.changed:
            while not self.closed:
                block, slot = self.blocks[self.next % len(self.blocks)], self.next % len(self.blocks) % len(self.memory)
                if not (self.paused or self.error) and (self.at or self.free[slot]):
                    if self.at == 0:
                        self.free[slot], self.left[slot] = False, block.size
                    chunk = self.next, self.at
                    self.at += CHUNK
                    self.reading += 1
                    if self.at >= block.size:
                        self.next, self.at = self.next + 1, 0
                    return chunk
                self.changed.wait()
            return None
