"""The passes with which a draft model drafts a token tree.

The drafter declares them once. The cost model, the profiler and the runtime ask here.
"""

from collections.abc import Sequence
from typing import Annotated

from sequoia_plan.artifacts.schema import Artifact, Size


class Drafting(Artifact, frozen=True):
    """The draft passes of one type of draft model."""

    draft_type: Annotated[str, "type of the draft, as profiles and trees record it"]
    first_width: Annotated[
        Size,
        "tokens in the first pass, which gives the root's children; see `first_width_is_per_level`",
    ]
    drafts_by_level: Annotated[
        bool,
        "true if every deeper level that has children takes a pass of its own, over its nodes "
        "with children; false if the first pass gives the probabilities of all levels",
    ]
    max_depth: Annotated[
        Size | None,
        "largest number of levels of a tree, including the root's; missing if there is no limit",
    ] = None
    first_width_is_per_level: Annotated[
        bool,
        "true if the first pass has `first_width` tokens for each level of the tree: it "
        "repeats as many tokens as a step may have accepted",
    ] = False

    def first_pass_width(self, depth: int) -> int:
        """Number of tokens in the first draft pass of a step, for a tree of `depth` levels."""
        return self.first_width * depth if self.first_width_is_per_level else self.first_width

    def pass_widths(self, num_parents_by_level: Sequence[int]) -> list[int]:
        """Number of tokens in each draft pass of a step, first to last.

        Args:
            num_parents_by_level: number of nodes with children on each level that has a draft
                pass, from the root's level on; empty if nothing is drafted.
        """
        if not num_parents_by_level:
            return []
        first_pass = self.first_pass_width(depth=len(num_parents_by_level) + 1)
        if not self.drafts_by_level:
            return [first_pass]
        return [first_pass, *map(int, num_parents_by_level[1:])]

    def num_unread(self, depth: int, num_passes: int) -> int:
        """How many of the last tokens the draft may not have read after a step.

        They are many after a step whose spine (first children from the root on) was looked up and
        not drafted.

        Args:
            depth: levels of the step's tree, the root's included.
            num_passes: draft passes of the step.
        """
        if not self.drafts_by_level:
            return 0
        if self.first_width_is_per_level and num_passes:
            return depth - 1  # all but the root, which are read once more
        return depth - num_passes

    def catch_up_width(self, num_unread: int, num_passes: int) -> int:
        """Number of tokens that the draft reads in a pass of its own before a step; 0 for none.

        The first pass of a step reads as many of the last tokens as a step with the same tree can
        have accepted. If more are unread, a pass before it reads all of them; it is as wide as the
        next power of two. A compiled step has no such pass: its first one reads any number.

        Args:
            num_unread: how many tokens the draft may not have read.
            num_passes: draft passes of the step; without any, nothing need be read.
        """
        num_read_first = self.first_pass_width(depth=num_passes + 1) - 1  # besides the root
        if not num_passes or num_unread <= num_read_first:
            return 0
        return 1 << (num_unread - 1).bit_length()


LANGUAGE_MODEL = Drafting("language model", first_width=2, drafts_by_level=True)
"""A language model with a KV cache of its own.

Its first pass takes the root and the token before it, because the draft has not run yet on an
accepted leaf.
"""

EAGLE_DRAFT = Drafting(
    "feature draft",
    first_width=1,
    drafts_by_level=True,
    max_depth=64,
    first_width_is_per_level=True,
)
"""An EAGLE draft: its input is the target's hidden states.

Its first pass repeats the last tokens, as many as a step may have accepted, now with the target's
own hidden states. Deeper passes take the draft's own output at the parent.
"""


def dflash_draft(block_size: int, levels: int) -> Drafting:
    """A DFlash draft: its input is the target's hidden states, and one pass serves all levels.

    Args:
        block_size: tokens in that pass.
        levels: levels below the root's that it gives probabilities for.
    """
    return Drafting(
        "block draft", first_width=block_size, drafts_by_level=False, max_depth=levels + 1
    )
