"""Which passes a draft makes to grow a token tree. The drafter declares them once; cost model, profiler and runtime ask here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from sequoia_plan.artifacts.schema import Artifact, Size, field


class Drafting(Artifact, frozen=True):
    """The passes of one kind of draft."""

    PREFIX: ClassVar[str] = "drafting"

    kind: Annotated[str, field("the kind of draft, as profiles and trees record it")]
    first: Annotated[Size, field("tokens in the first pass, the one that gives the root's children")]
    by_level: Annotated[
        bool,
        field(
            "true if every deeper level that has children takes a pass of its own, as wide as it has nodes with children; false if the first "
            "pass gives the laws of all levels"
        ),
    ]
    deepest: Annotated[Size | None, field("the most levels a tree may have, the root's included; missing if there is no limit")] = None

    def widths(self, parents: Sequence[int]) -> list[int]:
        """Tokens in each pass of a step, first to last.

        Args:
            parents: how many nodes have children on each level (`TokenTree.parents_by_level`); empty for a tree of one node.
        """
        if not parents:
            return []
        return [self.first, *(int(count) for count in parents[1:])] if self.by_level else [self.first]

    def narrowest(self, depth: int) -> list[int]:
        """Tokens in each pass of a tree of `depth` levels whose passes are as narrow as they can be."""
        return self.widths([1] * (depth - 1))


LANGUAGE_MODEL = Drafting("language model", first=2, by_level=True)
"""A language model with a KV cache of its own. Its first pass reads the root and the token before it, because an accepted leaf is a
token that the draft has not read yet."""
