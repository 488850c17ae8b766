"""Acceptance as observed, prompt by prompt: totals by level, and their precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts import Counts, TokenTree
from sequoia_plan.artifacts.counts import MAX_KINDS
from sequoia_plan.artifacts.uncertainty import Z95, gradient, jackknife

LEVELS = 4
"""Levels that are counted separately with `TREE`, the last one together with all below it."""
MAX_LEVELS = 12
"""Levels that are counted separately with any tree, at most."""
TREE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
"""The tree that writes the text of the method `forced`, unless another one is given. The precision
of a measurement is that of the expected tokens of the tree that writes."""
MIN_PROMPTS = 8
"""Prompts that a standard error needs at least: fewer say nothing about how prompts differ."""


@dataclass(frozen=True)
class ObservedAcceptance:
    """What was observed with one sampling, prompt by prompt.

    `trials` int64 [prompts, levels]; `counts` float64 [prompts, levels, ranks].
    """

    trials: NDArray[np.int64]
    counts: NDArray[np.float64]
    off_spine: ObservedAcceptance | None = None
    lookup: Sequence[dict[str, Any] | None] = ()
    tree: TokenTree = TREE

    def totals(self) -> Counts:
        """Totals of each level, down to the last one with trials."""
        return self._totals(np.ones(len(self.trials), bool))

    def part(self, is_chosen: NDArray[np.bool_]) -> ObservedAcceptance:
        """What was observed on some of the prompts, bool [prompts]."""
        off_spine = self.off_spine and self.off_spine.part(is_chosen)
        return ObservedAcceptance(self.trials[is_chosen], self.counts[is_chosen], off_spine)

    def by_kind(self, kinds: Sequence[str | None]) -> dict[str, Counts]:
        """Totals of trials and counts by level, over the prompts of each kind."""
        kind_of_row = np.array([kinds[i % len(kinds)] or "" for i in range(len(self.trials))])
        distinct_kinds = list(dict.fromkeys(kind_of_row.tolist()))
        if "" in distinct_kinds or len(distinct_kinds) > MAX_KINDS:
            return {}
        return {kind: self._totals(kind_of_row == kind) for kind in distinct_kinds}

    def precision(self) -> float:
        """Half of the 95 % interval of the expected tokens of `tree`, as a share of them.

        For given step times, the predicted speed-up has the same relative interval. The standard
        error comes from a jackknife over prompts, because texts differ more than positions within
        one text. The result is inf for fewer than `MIN_PROMPTS` prompts.
        """
        error, expected_tokens = self._error()
        return Z95 * error / expected_tokens

    def effective_trials(self) -> int:
        """The effective sample size: how many independent trials would give the same interval.

        It is smaller than the number of trials, because positions of one text resemble each other.
        """
        p = self.counts.sum((0, 1)) / self.trials.sum()  # by rank, over all levels
        slope = gradient(self.tree, p[None, None])[0, 0]  # of F(tree), by rank
        error, _ = self._error()
        if not np.isfinite(error):
            return int(self.trials.sum())
        # a trial accepts the child of at most one rank: the variance of slope[rank] in one draw
        variance_of_one_trial = p @ slope**2 - (p @ slope) ** 2
        independent_trials = np.ceil(variance_of_one_trial / max(error, 1e-9) ** 2)
        return int(min(self.trials.sum(), independent_trials))

    def _error(self) -> tuple[float, float]:
        """The standard error of the expected tokens of `tree`, and the expected tokens.

        The error is inf for fewer than `MIN_PROMPTS` prompts.
        """
        if len(self.trials) < MIN_PROMPTS:
            return float("inf"), 1.0
        trials, counts = self.trials.sum(1), self.counts.sum(1)  # of all levels
        return jackknife(self.tree, trials[:, None, None].astype(float), counts[:, None, None])

    def _totals(self, is_chosen: NDArray[np.bool_]) -> Counts:
        """Trials and counts of each level and node class over some of the prompts.

        They reach down to the last level with trials on any prompt. `is_chosen` bool [prompts].
        """
        num_levels = int(np.flatnonzero(self.trials.sum(0))[-1]) + 1
        trials = self.trials[is_chosen].sum(0)[:num_levels]
        counts = self.counts[is_chosen].sum(0)[:num_levels]
        if self.off_spine is None:
            return Counts(trials[:, None], counts.round(4)[:, None])
        off_trials = self.off_spine.trials[is_chosen].sum(0)[:num_levels]
        off_counts = self.off_spine.counts[is_chosen].sum(0)[:num_levels]
        off_counts = _clipped(off_counts, counts, off_trials, trials - off_trials)
        off_trials[0], off_counts[0] = 0, 0.0  # the root is on the spine
        return Counts(
            np.stack([trials - off_trials, off_trials], 1),
            np.stack([counts.round(4) - off_counts.round(4), off_counts.round(4)], 1),
        )


def num_counted_levels(tree: TokenTree) -> int:
    """How many levels are counted separately if `tree` writes the text.

    They are the tree's levels that have children, but no fewer than `LEVELS` and at most
    `MAX_LEVELS`.
    """
    return min(max(tree.depth - 1, LEVELS), MAX_LEVELS)


def max_children_by_level(tree: TokenTree) -> NDArray[np.int64]:
    """int64 [counted levels]: the most children of any node; the last one with all below it."""
    max_children = np.zeros(num_counted_levels(tree), np.int64)
    levels = np.minimum(tree.position_ids, len(max_children) - 1)
    np.maximum.at(max_children, levels, tree.child_count)
    return max_children


def collect(tallies: Sequence[Any], setting: int, tree: TokenTree = TREE) -> ObservedAcceptance:
    """Combine the tallies of all prompts with one of the samplings."""
    sampling_tallies = [tallies_of_prompt[setting] for tallies_of_prompt in tallies]
    # [prompts, levels, classes] and [prompts, levels, classes, ranks]; class 0 is on the spine (the
    # node and all its ancestors are first children), class 1 off it
    trials = np.array([tally["trials"] for tally in sampling_tallies], np.int64)
    counts = np.array([tally["counts"] for tally in sampling_tallies], np.float64)
    total_trials, total_counts, off_counts = trials.sum(2), counts.sum(2), counts[:, :, 1]
    if sampling_tallies[0]["reached"]:  # of `traversal`, whose counts are still those of `sequoia`
        reached = np.array([tally["reached"] for tally in sampling_tallies])
        sequoia_counts = total_counts
        total_counts = as_traversal_accepts(sequoia_counts, total_trials, reached.sum(0), tree)
        # both classes of a level and rank change by the same factor
        off_counts = off_counts * total_counts / np.maximum(sequoia_counts, 1e-300)
    off_spine = ObservedAcceptance(trials[:, :, 1], off_counts)
    lookup = [tally["lookup"] for tally in sampling_tallies]
    return ObservedAcceptance(total_trials, total_counts, off_spine, lookup, tree)


def as_traversal_accepts(
    counts: NDArray[np.float64],
    trials: NDArray[np.int64],
    reached: NDArray[np.float64],
    tree: TokenTree = TREE,
) -> NDArray[np.float64]:
    """The counts of `sequoia`, changed to what `traversal` accepts of the same draws.

    The counts of ranks that `tree` has on a level are multiplied by how many times as often
    `traversal` as `sequoia` gets past that level. The counts of the other ranks stay as they are,
    unless a prompt's level would then have more counts than trials: they are scaled down to fit.
    `counts` float64 [prompts, levels, ranks]; `trials` int64 [prompts, levels]; `reached` float64
    [2, levels of `tree`].
    """
    ratio = acceptance_ratio(reached, counts.shape[1])
    max_children = max_children_by_level(tree)
    is_in_tree = np.arange(counts.shape[2]) < max_children[:, None]  # [levels, ranks]
    inside = np.where(is_in_tree, counts * ratio[:, None], 0.0)
    inside *= np.minimum(1, trials / np.maximum(inside.sum(-1), 1e-9))[..., None]
    outside = np.where(is_in_tree, 0.0, counts)
    room = (trials - inside.sum(-1)) / np.maximum(outside.sum(-1), 1e-9)
    return inside + outside * np.clip(room, 0, 1)[..., None]


def acceptance_ratio(reached: NDArray[np.float64], num_levels: int) -> NDArray[np.float64]:
    """float64 [num_levels]: how many times as often `traversal` as `sequoia` gets past each level.

    The last level is taken together with all below it. The ratio is 1 where there are no children.
    `reached` float64 [2, levels of the tree].
    """
    starts = np.arange(min(num_levels, reached.shape[1] - 1))
    # [2, levels]: how often either verifier is at a level, and how often it gets to the next one
    at_level = np.add.reduceat(reached[:, :-1], starts, axis=1)
    past_level = np.add.reduceat(reached[:, 1:], starts, axis=1)
    sequoia, traversal = past_level / np.maximum(at_level, 1e-9)
    ratio = np.ones(num_levels)
    ratio[starts] = np.where(sequoia > 0, traversal / np.maximum(sequoia, 1e-9), 1.0)
    return ratio


def _clipped(
    off_counts: NDArray[np.float64],
    counts: NDArray[np.float64],
    off_trials: NDArray[np.int64],
    spine_trials: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Counts off the spine, scaled so that neither class has more counts than trials.

    A node is on the spine if it and all its ancestors are first children, else off it.
    `off_counts`, `counts` float64 [levels, ranks]; `off_trials`, `spine_trials` int64 [levels].
    """
    off_share = np.minimum(1, off_trials / np.maximum(off_counts.sum(-1), 1e-300))
    off_counts = off_counts * off_share[:, None]
    spine_counts = counts - off_counts
    spine_share = np.minimum(1, spine_trials / np.maximum(spine_counts.sum(-1), 1e-300))
    # what is too much on the spine goes to the nodes off it, so the sum stays
    clipped: NDArray[np.float64] = counts - spine_counts * spine_share[:, None]
    return clipped
