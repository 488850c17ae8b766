"""The highest speed over every small tree, which no search may exceed, for any type of draft."""

from __future__ import annotations

from strategies import all_trees

from sequoia_plan.artifacts import Drafting
from sequoia_plan.artifacts.expected_tokens import expected_tokens

TREES = [tree for size in range(1, 8) for tree in all_trees(size)]
DFLASH = Drafting("block", first_width=2, drafts_by_level=False, max_depth=4)
"""One pass gives the probabilities of all levels."""
EAGLE = Drafting(
    "features", first_width=1, drafts_by_level=True, max_depth=5, first_width_is_per_level=True
)
"""The first pass is as wide as the tree is deep."""


def max_speed(rows, times, max_size):
    """Tokens a second of the fastest tree of up to seven nodes within the limits."""
    fits = [
        t
        for t in TREES
        if t.size <= max_size and t.depth <= len(rows) + 1 and t.branching <= rows.shape[-1]
    ]
    return max(expected_tokens(t, rows) / times.step_seconds(t) for t in fits)
