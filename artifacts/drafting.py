"""Which passes a draft makes to grow a token tree. The drafter declares them once; cost model, profiler and runtime ask here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from sequoia_plan.artifacts.schema import Artifact, Size, field


class Drafting(Artifact, frozen=True):
    """The passes of one kind of draft."""

    PREFIX: ClassVar[str] = "drafting"

    kind: Annotated[str, field("the kind of draft, as profiles and trees record it")]
    first: Annotated[Size, field("tokens in the first pass, the one that gives the root's children; see `first_by_depth`")]
    by_level: Annotated[
        bool,
        field(
            "true if every deeper level that has children takes a pass of its own, as wide as it has nodes with children; false if the first "
            "pass gives the laws of all levels"
        ),
    ]
    deepest: Annotated[Size | None, field("the most levels a tree may have, the root's included; missing if there is no limit")] = None
    first_by_depth: Annotated[
        bool,
        field("true if the first pass has `first` tokens for each level of the tree: it reads again as many tokens as a step may have accepted"),
    ] = False

    def first_pass(self, depth: int) -> int:
        """Tokens in the first pass of a step with a tree of `depth` levels."""
        return self.first * depth if self.first_by_depth else self.first

    def widths(self, parents: Sequence[int]) -> list[int]:
        """Tokens in each pass of a step, first to last.

        Args:
            parents: how many nodes have children on each level (`TokenTree.parents_by_level`); empty for a tree of one node.
        """
        if not parents:
            return []
        first = self.first_pass(len(parents) + 1)
        return [first, *(int(count) for count in parents[1:])] if self.by_level else [first]

    def narrowest(self, depth: int) -> list[int]:
        """Tokens in each pass of a tree of `depth` levels whose passes are as narrow as they can be."""
        return self.widths([1] * (depth - 1))


LANGUAGE_MODEL = Drafting("language model", first=2, by_level=True)
"""A language model with a KV cache of its own. Its first pass reads the root and the token before it, because an accepted leaf is a
token that the draft has not read yet."""

FEATURE_DRAFT = Drafting("feature draft", first=1, by_level=True, deepest=64, first_by_depth=True)
"""A draft that reads the target's hidden states. Its first pass reads the last tokens again, now with the target's own hidden states, as many
as a step may have accepted; deeper passes read what the draft itself said of the parent."""


def block_draft(block: int, levels: int) -> Drafting:
    """A draft that reads the target's hidden states and gives the laws of `levels` levels in one pass over a block of `block` tokens."""
    return Drafting("block draft", first=block, by_level=False, deepest=levels + 1)
