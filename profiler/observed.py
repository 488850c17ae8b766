"""Acceptance as observed, prompt by prompt: totals by level and node class, and their precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Counts, TokenTree
from sequoia_plan.artifacts.counts import ALL_KINDS, MAX_KINDS, ClassCounts, Floats, Ints
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.promise import MIN_PROMPTS
from sequoia_plan.artifacts.uncertainty import Z95, jackknife_error

LEVELS = 4
"""Levels that are counted separately with `TREE`, the last one together with all below it."""
MAX_LEVELS = 12
"""Levels that are counted separately with any tree, at most."""
TREE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
"""The tree that writes the text, unless another one is given. The precision of a measurement is
that of the expected tokens of the tree that writes."""
STREAMED_TREE = TokenTree.from_parents(
    [-1, *(max(4 * n - 3, 0) for n in range(16) for _ in range(4))]
)
"""The same where each pass streams the target's weights: 65 nodes cost no more than ten there."""


@dataclass(frozen=True)
class ObservedAcceptance:
    """What was observed with one sampling; levels and node classes are as in `Acceptance`.

    `trials` int64 [prompts, levels, node classes]; `counts` float64 [prompts, levels, node classes,
    ranks]; `lookup`: tallies of `LookupTrials` by prompt; `tree` writes the text.
    """

    trials: Ints
    counts: Floats
    lookup: Sequence[dict[str, Any] | None] = ()
    tree: TokenTree = TREE

    def totals(self) -> Counts:
        """Counts over all prompts, down to the last level with trials; there must be one.

        `trials` int64 [levels, classes], `counts` float64 [levels, classes, ranks]; nodes on the
        spine are of class 0, all others of class 1. Rounded as a file has them, which has both
        classes together and the part off the spine.
        """
        num_levels = int(np.flatnonzero(self.trials.sum((0, 2)))[-1]) + 1
        trials, counts = (n.sum(0)[:num_levels] for n in (self.trials, self.counts))
        total, off_spine = counts.sum(1).round(4), _clipped_off_spine(trials, counts).round(4)
        return Counts(trials, np.stack([total - off_spine, off_spine], 1))

    def by_prompt(self, kinds: Sequence[str]) -> dict[str, tuple[ClassCounts, ...]]:
        """Counts of each prompt, all levels together, by kind."""
        prompts: dict[str, tuple[ClassCounts, ...]] = {}
        trials, counts = self.trials.sum((1, 2)).tolist(), self.counts.sum((1, 2)).round(4)
        for kind, number, accepted in zip(kinds, trials, counts.tolist(), strict=False):
            prompts[kind] = (*prompts.get(kind, ()), ClassCounts(number, tuple(accepted)))
        return prompts

    def precision(self) -> float:
        """Half of the 95 % interval of the expected tokens of `tree`, as a share of them.

        For given step times, the predicted speed-up has the same relative interval. The standard
        error comes from a jackknife over prompts, because texts differ more than positions within
        one text. The result is inf for fewer than `MIN_PROMPTS` prompts.
        """
        if len(self.trials) < MIN_PROMPTS:
            return float("inf")
        # all levels and node classes together, without one prompt after the other
        trials, counts = self.trials.sum((1, 2)), self.counts.sum((1, 2))
        rates = (counts.sum(0) - counts) / np.maximum(trials.sum() - trials, 1)[:, None]
        tokens = np.array([expected_tokens(self.tree, p[None, None]) for p in rates])
        return Z95 * jackknife_error(tokens) / float(tokens.mean())


def _clipped_off_spine(trials: Ints, counts: Floats) -> Floats:
    """Counts off the spine, scaled so that neither node class has more counts than trials.

    Counts were scaled to what a verifier accepts, so they may exceed trials. What is too much for
    one class goes to the other, so the sum stays. `trials` [levels, 2] and `counts` [levels, 2,
    ranks] are those on the spine and off it. Returns float64 [levels, ranks].
    """
    shares = np.minimum(1, trials / np.maximum(counts.sum(-1), 1e-300))[..., None]
    total, off_spine = counts.sum(1), counts[:, 1] * shares[:, 1]
    spine = total - off_spine
    spine *= np.minimum(1, trials[:, 0] / np.maximum(spine.sum(-1), 1e-300))[:, None]
    return total - spine


def named_kinds(kinds: Sequence[str | None]) -> list[str]:
    """The kinds of prompts; `all` for each if one has none, or there are more than a file names."""
    are_named = all(kinds) and len(set(kinds)) <= MAX_KINDS
    return [str(kind) if are_named else ALL_KINDS for kind in kinds]


def num_counted_levels(tree: TokenTree) -> int:
    """How many levels are counted separately if `tree` writes the text.

    They are the tree's levels that have children, but no fewer than `LEVELS` and at most
    `MAX_LEVELS`.
    """
    return min(max(tree.depth - 1, LEVELS), MAX_LEVELS)


def max_children_by_level(tree: TokenTree) -> Ints:
    """int64 [counted levels]: the most children of any node; the last one with all below it."""
    max_children = np.zeros(num_counted_levels(tree), np.int64)
    levels = np.minimum(tree.position_ids, len(max_children) - 1)
    np.maximum.at(max_children, levels, tree.child_count)
    return max_children


def collect(tallies: Sequence[dict[str, Any]], tree: TokenTree = TREE) -> ObservedAcceptance:
    """Combine the tallies of `ForcedAcceptance` of all prompts with one sampling."""
    trials = np.array([tally["trials"] for tally in tallies], np.int64)
    counts = np.array([tally["counts"] for tally in tallies], np.float64)
    if tallies[0]["reached"]:  # of `traversal`, whose counts are still those of `sequoia`
        reached = np.array([tally["reached"] for tally in tallies]).sum(0)
        totals = counts.sum(2)
        multiplied = as_traversal_accepts(totals, trials.sum(2), reached, tree)
        # both node classes of a level and rank change by the same factor
        counts *= (multiplied / np.maximum(totals, 1e-300))[:, :, None]
    return ObservedAcceptance(trials, counts, [tally["lookup"] for tally in tallies], tree)


def as_traversal_accepts(counts: Floats, trials: Ints, reached: Floats, tree: TokenTree) -> Floats:
    """The counts of `sequoia`, changed to what `traversal` accepts of the same draws.

    The counts of ranks that `tree` has on a level are multiplied by how many times as often
    `traversal` as `sequoia` gets past that level. The counts of the other ranks stay as they are,
    unless a prompt's level would then have more counts than trials: both are then scaled down to
    fit. `counts` float64 [prompts, levels, ranks]; `trials` int64 [prompts, levels]; `reached`
    float64 [2, levels of `tree`]: how often `sequoia` and `traversal` get to each level.
    """
    ratio = acceptance_ratio(reached, counts.shape[1])
    max_children = max_children_by_level(tree)
    is_in_tree = np.arange(counts.shape[2]) < max_children[:, None]  # [levels, ranks]
    inside = np.where(is_in_tree, counts * ratio[:, None], 0.0)
    inside *= np.minimum(1, trials / np.maximum(inside.sum(-1), 1e-9))[..., None]
    outside = np.where(is_in_tree, 0.0, counts)
    room = (trials - inside.sum(-1)) / np.maximum(outside.sum(-1), 1e-9)
    return inside + outside * np.clip(room, 0, 1)[..., None]


def acceptance_ratio(reached: Floats, num_levels: int) -> Floats:
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
