"""Where a forward pass waits for weights that are streamed; the package `offload` streams them."""

from collections.abc import Sequence
from typing import NoReturn, Protocol

from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError


class WeightStream(Protocol):
    """Brings the weights of a model's streamed layers into a ring of slots, in every pass.

    The weights of streamed layer k go to slot k modulo the number of slots.
    """

    memory: list[Tensor]
    bytes: int
    can_be_captured: bool
    expert_counts: tuple[int, ...] = ()
    """How often each expert was chosen, by which those stay in memory that were most often."""

    def keep_most_chosen(self, counts: Sequence[int] = ()) -> None:
        """Let the experts chosen most often stay in memory; by default, so far."""
        return None

    def begin_step(self) -> None:
        """A decoding step begins; its pass will need the first layers."""
        return None

    def wait_for(self, layer: int) -> None:
        """Wait for the weights of the streamed layer with this number."""

    def release(self, layer: int) -> None:
        """The pass has used the weights of this layer; its slot may be filled again."""

    def wait_until_full(self) -> None:
        """Wait until all slots are full, as they are after a pause."""
        return None

    def close(self) -> None:
        """Stop streaming."""


def refuse_copies(owner: object) -> NoReturn:
    """Raise SequoiaPlanError, in place of pickling or copying a reader of a stream's slots."""
    raise SequoiaPlanError(
        "target: its layers are streamed, so it can neither be pickled nor copied; load it "
        "where it is needed"
    )
