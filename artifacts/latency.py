"""Times of one machine.

They are seconds of model passes by their size, of verification, and of streaming the target's
weights.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import Artifact, Count, Number, Seconds, Size

SecondsBySize = dict[Size, Seconds]
ModelName = Annotated[str, Meta(pattern="^(target|draft)$")]
Quartiles = dict[ModelName, dict[Size, tuple[Seconds, Seconds]]]


class VerificationCost(Artifact, frozen=True):
    """Seconds of a step besides its passes: verifying a drafted tree, committing the accepted path.

    They are base + by_node * (size - 1), and on a CPU all that is not a pass. Where one draft pass
    serves all levels, they include the drawing of the tree.
    """

    base: Annotated[Number, "seconds for any tree"]
    by_node: Annotated[Number, "seconds for each node but the root"]
    lookup: Annotated[Number, "seconds more where a step looks for the text's match"] = 0.0


class StreamCost(Artifact, frozen=True):
    """Time to read a streamed target's weights, which every pass of the target waits for."""

    seconds: Annotated[
        Seconds,
        "seconds of a pass right after another one. No step is shorter, because the weights "
        "must arrive",
    ]
    bytes: Annotated[Size, "bytes that a pass over one token reads"]
    expert_counts: Annotated[
        tuple[Count, ...],
        "of a mixture, how often each expert was chosen, layer by layer: those that were most "
        "often stay in memory",
    ] = ()


class Latency(Artifact, frozen=True):
    """Median seconds on this machine."""

    target: Annotated[
        SecondsBySize,
        "for each measured number of nodes, the median seconds of the target's pass over them. "
        "The number 1 must be there. Without `verification`, the seconds include verification "
        "and compaction of the KV cache for a tree of that size. With `stream`, they are of a "
        "pass after a pause in which the buffers of the streamed layers have filled",
    ]
    draft: Annotated[
        SecondsBySize,
        "for each measured number of nodes, the median seconds of one draft pass over them and "
        "of drawing their children; without the drawing where one pass serves all levels",
    ]
    overhead: Annotated[
        Number,
        "seconds of a step beyond its passes and `verification`: on CUDA the host's mask, random "
        "numbers, launches and transfer",
    ] = 0.0
    context: Annotated[Count, "tokens in the KV cache while the times were measured"] = 0
    samples: Annotated[dict[Size, Size], "how often each size was timed"] = {}
    quartiles: Annotated[
        Quartiles,
        "first and third quartile of the seconds of each measured size, after the drift that "
        "is common to all sizes is removed",
    ] = {}
    out_of_memory: Annotated[
        Size | None, "the smallest size for which the memory did not suffice"
    ] = None
    verification: Annotated[
        VerificationCost | None, "seconds of verifying any tree and of committing the accepted path"
    ] = None
    stream: Annotated[
        StreamCost | None,
        "time to stream the target's weights; missing if all of them are in memory",
    ] = None
    plain: Annotated[
        Seconds | None,
        "seconds of a whole step of plain decoding right after another one; on a CPU, because a "
        "step that drafts finds less of the weights in the processor's cache",
    ] = None

    def __post_init__(self) -> None:
        """Refuse a target that was not timed with one token, and a draft that was not timed."""
        if 1 not in self.target or not self.draft:
            raise SequoiaPlanError(
                "latency: found no measurement of the target at 1 token, the plain decoding that "
                "speed-ups are relative to, or none of the draft; expected both"
            )

    def without_spread(self) -> Latency:
        """The medians alone, as a plan records them."""
        return replace(self, samples={}, quartiles={}, out_of_memory=None)
