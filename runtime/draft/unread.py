"""Committed tokens that the draft has not read, and how it catches up with them.

A step whose spine is looked up (artifacts/lookup.py) may accept tokens on which the draft did not
run. Their number is on the host: the step's own result says how many nodes were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.draft.drafter import Drafter

CATCH_UP_TOKENS = 64
"""The most tokens that the draft may leave unread, and that it reads at once to catch up."""


def catch_up(
    drafter: Drafter, sequence: SequenceState, tree: TokenTree, length: int, extent: int
) -> None:
    """Let the draft read what it has not read, if a step with `tree` needs it or it is too much.

    Afterwards, all that the step may accept without the draft counts as unread, until
    `note_accepted` says what was accepted.
    """
    drafts = bool(tree.num_drafted_levels)
    is_needed = drafts and sequence.num_unread > drafter.num_read_again(tree)
    is_full = sequence.num_unread + tree.depth > CATCH_UP_TOKENS
    if sequence.num_unread and (is_needed or is_full):
        # a power of two, so that passes have few shapes; slot 0 is never unread
        count = min(1 << (sequence.num_unread - 1).bit_length(), length - 1)
        if count > 0:
            slots = torch.arange(length - count, length, device=sequence.tokens.device)
            drafter.catch_up(sequence, slots, extent)
        sequence.num_unread = 0
    if drafts:
        sequence.num_unread = drafter.max_unread(tree)
    else:
        sequence.num_unread += min(drafter.max_unread(tree) + 1, tree.depth)


def note_accepted(sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
    """Take off what the last step, with `tree`, did not accept; `path` has the accepted nodes."""
    num_unread = sequence.num_unread - (tree.depth - len(path))
    # no pass reads a leaf, also one above the last level
    ends_in_leaf = not tree.child_count[path[-1]]
    sequence.num_unread = max(num_unread, min(ends_in_leaf, sequence.num_unread))
