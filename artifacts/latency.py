"""What a machine takes: seconds of passes by their size, of verification, and of streaming the target's weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import Artifact, Count, Number, Seconds, Size, field

Curve = dict[Size, Seconds]
Rounds = Literal["tree", "level", "path", "walk"]
Quartiles = dict[Annotated[str, Meta(pattern="^(target|draft)$", title="target or draft")], dict[Size, tuple[Seconds, Seconds]]]


class Verification(Artifact, frozen=True):
    """Seconds that a step spends on judging a drawn tree and keeping what is accepted, and on drawing it where one pass drafts all levels:
    base + by_round x rounds + by_parent x nodes with children + by_child x (size - 1)."""

    PREFIX: ClassVar[str] = "latency.verification"

    base: Annotated[Number, field("seconds for any tree")]
    by_round: Annotated[Number, field("seconds for each round; children that are judged side by side are one round")]
    by_parent: Annotated[Number, field("seconds for each node that has children; with `walk`, for each node of the accepted path")]
    by_child: Annotated[Number, field("seconds for each node but the root")]
    rounds: Annotated[
        Rounds,
        field(
            "how many rounds a tree takes, by what runs on the device: `tree` if all nodes are judged at once (the most children any node has), "
            "`level` if levels are judged one after the other (the sum over levels of the most children a node of the level has), `path` if a "
            "node begins once its parent has judged it (the largest sum of ranks along a path), `walk` if only the accepted path is looked at "
            "(children rejected on it, as many as the acceptance lets expect)"
        ),
    ] = "tree"
    error: Annotated[Number, field("by how much the sum is off, relative: the residual standard error over the timed shapes")] = 0.0


class Stream(Artifact, frozen=True):
    """What a target that is streamed in every pass waits for."""

    PREFIX: ClassVar[str] = "latency.stream"

    seconds: Annotated[Seconds, field("a pass right after another one: no step is shorter, because its weights must arrive")]
    bytes: Annotated[Size, field("read in every pass")]


class Latency(Artifact, frozen=True):
    """Median seconds on this machine."""

    PREFIX: ClassVar[str] = "latency"
    ORDER: ClassVar[tuple[str, ...]] = ("context", "overhead", "target", "draft", "verification", "stream", "samples", "quartiles", "out_of_memory")

    target: Annotated[
        Curve,
        field(
            "nodes: median seconds of the target's pass over them; 1 must be there. Without `verification`, verification and KV compaction "
            "of a tree of that size are included. With `stream`, a pass after a pause in which the ring of layers has filled"
        ),
    ]
    draft: Annotated[Curve, field("nodes: median seconds of one draft pass and the drawing of its children; without it where one pass drafts all levels")]
    overhead: Annotated[
        Number, field("seconds of a step beyond passes and verification: mask and read-back; on CUDA also random numbers and launch", always=True)
    ] = 0.0
    context: Annotated[Count, field("tokens in the KV cache when measured", always=True)] = 0
    samples: Annotated[dict[Size, Size], field("how often each size was timed")] = {}
    quartiles: Annotated[
        Quartiles,
        field("first and third quartile of the times of a size that was measured, the drift common to all sizes taken out"),
    ] = {}
    out_of_memory: Annotated[Size | None, field("the smallest size there was no memory for")] = None
    verification: Annotated[Verification | None, field("what judging a tree and keeping what is accepted takes, for any tree")] = None
    stream: Annotated[Stream | None, field("what streaming the target's weights takes; missing if they are all in memory")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, curve in (("target", self.target), ("draft", self.draft)):
            if not curve:
                raise SequoiaPlanError(f"latency.{name}: empty, expected tokens: seconds")
        if 1 not in self.target:
            raise SequoiaPlanError("latency.target: no measurement at 1 token, the plain decoding that speed-ups are relative to")
        for size in self.samples:
            if size not in {*self.target, *self.draft}:
                raise SequoiaPlanError(f"latency.samples: found the size {size}, expected sizes that were measured")
        for name, pairs in self.quartiles.items():
            for size, (first, third) in pairs.items():
                if size not in getattr(self, name) or first > third:
                    raise SequoiaPlanError(
                        f"latency.quartiles.{name}[{size}]: found {[first, third]}, expected a measured size: [first quartile, third quartile]"
                    )
