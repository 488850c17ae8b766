"""Everything that a decoding step changes: tokens, caches and random numbers of the sequence at hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.cache import TreeCache


class Turns:
    """Requests of several threads take turns: one has the sequence until its text is complete."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()  # a copy of a decoder, and of the model that keeps one, has turns of its own

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait until no other thread has the sequence, and have it.

        Raises:
            SequoiaPlanError: if this thread has it already: waiting for itself would take forever.
        """
        if self.owner == threading.get_ident():
            raise SequoiaPlanError("decoder: found in the middle of another sequence of this thread; finish or close that one (steps(...).close()) first")
        with self.lock:
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = None


class Sequence:
    """The sequence that is being decoded, in memory that stays where it is from step to step.

    Attributes:
        tokens: int64 [capacity], the token in each slot: committed ones up to the root's slot, the drafted tree's after it.
        length: int64 [1], the root's slot, which is the number of committed tokens before it.
        target, draft: the models' caches; the draft's has no capacity if nothing drafts.
        features: [nodes, width], the target's hidden states for each node of the drafted tree, if the drafter reads them.
        bits: int32, random numbers of 31 bits for the drawing of children; uniforms: float64 [2] for verification.
        version: how often memory that graphs read was allocated anew; graphs captured before that are of no use.
        weights: where the models' weights were last seen; None before.
        turns: whose sequence it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(0, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.target = self.draft = TreeCache(0, 0, device)
        self.features = torch.zeros(0, 0, device=device)
        self.bits = torch.empty(0, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(2, dtype=torch.float64, device=device)
        self.generator = torch.Generator(device)
        self.version = 0
        self.weights: tuple[int, ...] | None = None
        self.turns = Turns()

    def reserve(self, capacity: int, target: Callable[[int], TreeCache], draft: Callable[[int], TreeCache] | None) -> None:
        """Memory for `capacity` slots; memory that is large enough is used again.

        Args:
            target, draft: make a cache of so many slots.

        Raises:
            SequoiaPlanError: if there is not the memory.
        """
        if self.tokens.numel() >= capacity:
            return
        device = self.tokens.device
        self.tokens, self.target, self.draft = self.tokens[:0], TreeCache(0, 0, device), TreeCache(0, 0, device)  # let the old memory go first
        self.target = target(capacity)
        if draft:
            self.draft = draft(capacity)
        self.tokens = torch.zeros(capacity, dtype=torch.long, device=device)
        self.version += 1

    def reserve_features(self, nodes: int, width: int, dtype: torch.dtype) -> None:
        """Memory for the hidden states of so many nodes, and for twice as many as before."""
        had = self.features.shape[0]
        if had < nodes:
            self.features = torch.zeros(max(nodes, 2 * had), width, dtype=dtype, device=self.tokens.device)
            self.version += had > 0  # no graph has read what was not there

    def changed(self, size: int) -> list[Tensor]:
        """What a step with a tree of `size` nodes both reads and changes. Reads the length on the host."""
        root = int(self.length)
        return [self.tokens, self.length, *self.target.views(root, size), *self.draft.views(root, size)]

    def read_from(self, weights: tuple[int, ...]) -> None:
        """Note where the models' weights are (`capture.addresses`)."""
        self.version += self.weights not in (None, weights)
        self.weights = weights

    def reserve_random_numbers(self, bits: int) -> None:
        """Memory for so many numbers, and for twice as many as before: it is seldom allocated anew."""
        had = self.bits.numel()
        if had < bits:
            self.bits = torch.empty(max(bits, 2 * had), dtype=torch.int32, device=self.bits.device)
            self.version += had > 0  # no graph has read what was not there

    def refill_random_numbers(self, bits: int) -> None:
        """Draw what the next step needs: so many numbers of 31 bits, and the two uniform numbers."""
        self.reserve_random_numbers(bits)
        self.bits[:bits].random_(generator=self.generator)
        self.uniforms.uniform_(generator=self.generator)
