"""Everything that a decoding step changes: one sequence's tokens, caches, random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.base.forks import renewed_in_forks
from sequoia_plan.runtime.constraints.path_logits import PathLogits

TARGET_NOT_FINITE, DRAFT_NOT_FINITE = -1, -2
"""A step's count of accepted nodes is one of these if that model's logits were not finite."""
CATCH_UP_TOKENS = 64
"""The most tokens that a draft may leave unread, and that it reads at once to catch up."""


class SequenceLock:
    """Lets one thread at a time decode with a sequence, from its first step to its last."""

    owner: int | None = None

    def __init__(self) -> None:
        renewed_in_forks(self)._at_fork_reinit()

    def _at_fork_reinit(self) -> None:
        if self.owner != threading.get_ident():  # that thread is in the child
            self.lock, self.owner = threading.Lock(), None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait until no other thread holds the lock, then hold it."""
        if self.owner == threading.get_ident():
            raise SequoiaPlanError(
                "decoder: found in the middle of another sequence of this thread; finish or close "
                "that one (steps(...).close()) first"
            )
        with self.lock:
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = None


class SequenceState:
    """The sequence that is being decoded, in memory that stays in place from step to step.

    `tokens` int64 [capacity]; `length` int64 [1]; `aux_hidden_states` [nodes, width];
    `lookup_chain` int64 [nodes]; `uniforms` float64 [2] and `bits` int32 [n]: a step's random
    numbers. The target has read the tokens in the first `num_read` slots, the draft may not have
    read the last `num_unread`. `version` grows when memory moves, that of weights among it. With
    `keeps_logits`, steps return the logits of what they accept. Both caches are empty at first.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.zeros(0, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.target = self.draft = TreeCache(0, 0, device)
        self.aux_hidden_states = torch.zeros(0, 0, device=device)
        self.lookup_chain = torch.zeros(0, dtype=torch.long, device=device)
        self.num_read = self.num_unread = 0
        self.path_logits: PathLogits | None = None
        self.keeps_logits = False
        self.bits = torch.empty(0, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(2, dtype=torch.float64, device=device)
        self.generator = torch.Generator(device)
        self.version = 0
        self.weight_memory: object = None
        self.lock = SequenceLock()

    def __reduce__(self) -> tuple[type[SequenceState], tuple[torch.device]]:
        """Let a copy of a decoder start with a sequence of its own, without memory."""
        return SequenceState, (self.tokens.device,)

    @torch.inference_mode(False)  # what inference mode allocates cannot be written outside of it
    def reserve(
        self,
        capacity: int,
        new_target_cache: Callable[[int], TreeCache],
        new_draft_cache: Callable[[int], TreeCache] | None,
    ) -> None:
        """Provide `capacity` slots, of which the first `num_read` stay as they are, or none.

        Memory that is large enough is used again.
        """
        if self.tokens.numel() >= capacity:
            return
        device, kept = self.tokens.device, self.num_read
        tokens, target, draft = self.tokens, self.target, self.draft
        self.target = self.draft = TreeCache(0, 0, device)
        self.forget()
        if not kept:  # free the old memory before the new is allocated
            tokens, target, draft = self.tokens, self.target, self.target
        self.target = new_target_cache(capacity)
        if new_draft_cache:
            self.draft = new_draft_cache(capacity)
        self.tokens = torch.zeros(capacity, dtype=torch.long, device=device)
        self.take(tokens, target, draft, kept)
        self.version += 1

    def take(self, tokens: Tensor, target: TreeCache, draft: TreeCache, count: int) -> None:
        """Copy what another sequence read, `count` slots; none if a cache has no memory yet."""
        for own, other in ((self.target, target), (self.draft, draft)):
            if len(own.blocks) < len(other.blocks):
                count = 0  # its memory is allocated by the first pass
        if count:
            self.tokens[:count] = tokens[:count]
            self.target.take(target, count)
            self.draft.take(draft, count)
        self.num_read = count

    def forget(self) -> None:
        """Let the next text get new memory: what is in the caches may be incomplete or NaN."""
        self.tokens, self.num_read = self.tokens[:0], 0

    @torch.inference_mode(False)
    def reserve_rows(
        self, name: str, count: int, width: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> None:
        """Let the tensor `name` have `count` rows or more; if it grows, it at least doubles."""
        tensor = getattr(self, name)
        if len(tensor) < count:
            shape = (max(count, 2 * len(tensor)), *width)
            setattr(self, name, tensor.new_zeros(shape, dtype=dtype))
            self.version += len(tensor) > 0  # no graph holds the address of empty memory

    def num_shared(self, tokens: Tensor) -> int:
        """How many of the first of `tokens` (int64 [n]) the target has read, in the same slots."""
        count = min(self.num_read, tokens.numel())
        differs = self.tokens[:count] != tokens[:count]
        return int(differs.byte().argmax()) if bool(differs.any()) else count

    def refill_random_numbers(self, count: int) -> None:
        """Generate the next step's random numbers: `count` of 31 bits, and the two uniforms."""
        self.reserve_rows("bits", count)
        self.bits[:count].random_(generator=self.generator)
        self.uniforms.uniform_(generator=self.generator)

    def state_of_step(self, size: int) -> list[Tensor]:
        """The tensors that a step with a tree of `size` nodes both reads and changes.

        Of the caches, these are the slots of the tree. Finding them reads `length` on the host.
        """
        root = int(self.length)
        caches = (*self.target.views(root, size), *self.draft.views(root, size))
        return [self.tokens, self.length, self.lookup_chain, *caches]

    def note_weight_memory(self, memory: object) -> None:
        """Record the addresses of the models' weights; a change is a new `version`."""
        self.version += self.weight_memory not in (None, memory)  # 1 if they moved
        self.weight_memory = memory
