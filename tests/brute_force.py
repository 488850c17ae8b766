"""Every small tree tried: what no search may beat, whichever passes the draft makes."""

from __future__ import annotations

from dataclasses import replace

from strategies import all_trees

from sequoia_plan.artifacts import Drafting
from sequoia_plan.artifacts.cost import expected_tokens

TREES = [tree for size in range(1, 8) for tree in all_trees(size)]
BLOCK = Drafting("block", first=2, by_level=False, deepest=4)
"""One pass gives the laws of all levels."""
FEATURES = Drafting("features", first=1, by_level=True, deepest=5, first_by_depth=True)
"""The first pass is as wide as the tree is deep."""


def most_speed(rows, times, most):
    """Of every tree of up to seven nodes within the limits."""
    fits = [t for t in TREES if t.size <= most and t.depth <= len(rows) + 1 and t.branching <= rows.shape[-1]]
    times = replace(times, acceptance=rows)
    return max(expected_tokens(t, rows) / times.step(t) for t in fits)
