"""How probably drafted children are accepted: `Acceptance`, as measured or as given."""

from __future__ import annotations

from typing import Any

import numpy as np

from sequoia_plan.artifacts.counts import SUM_TOLERANCE, Counts, Floats, read_only
from sequoia_plan.artifacts.errors import SequoiaPlanError

CLASS_NAMES = ("on the spine", "off the spine")
MIN_TRIALS = 300
"""Accepted nodes off the spine; levels with fewer are taken together."""
FIRST_DEEP_LEVEL = 3
"""Levels from this one on resemble each other, and the deeper, the fewer trials they have."""
DEEP_TRIALS = 100
"""What the deep levels have in common counts as much on each of them as so many trials."""
OVERDISPERSION = 2.0
"""Variance of counts within one text over that of independent ones, about."""


class Acceptance:
    """How probably an accepted node's child of each rank is accepted.

    At most one child of a node is accepted, so the probabilities of its children add up to at most
    1. They depend on the node's level (the root's is 0; the last one holds for all deeper ones) and
    on its node class: 0 is "on the spine", which is the root, its first child, that node's first
    child, and so on; 1 is "off the spine". If there is one node class, it stands for both.

    Args:
        rates: float64 [levels, node classes, ranks], the probabilities.
        counts: all that was counted; None if the rates were given. It may tell node classes apart
            that differ by no more than noise and have one vector of rates.
    """

    def __init__(self, rates: Any, counts: Counts | None = None) -> None:
        self.rates, self.counts = read_only(rates), counts

    @classmethod
    def given(cls, value: Any) -> Acceptance:
        """Check rates from outside; an `Acceptance` is returned as it is.

        Args:
            value: p[rank], p[level][rank] or p[level][node class][rank].

        Raises:
            SequoiaPlanError: if it is not such a list, or a vector holds what is no probability or
                sums to more than 1.
        """
        if isinstance(value, Acceptance):
            return value
        expected = (
            "a list of probabilities p[1], p[2], ..., or a list of such lists or of pairs of them "
            f"({' and '.join(CLASS_NAMES)}), all of one length (pad with zeros)"
        )
        try:
            rates = np.asarray(value)
        except (ValueError, OverflowError):
            rates = np.array(None)
        is_shape = 1 <= rates.ndim <= 3 and rates.size and (rates.ndim < 3 or rates.shape[1] <= 2)
        if not is_shape or rates.dtype.kind not in "iuf":
            raise SequoiaPlanError(f"acceptance: found {value!r:.60}, expected {expected}")
        if rates.ndim < 3:
            rates = np.atleast_2d(rates)[:, None]
        with np.errstate(over="ignore"):
            sums = rates.sum(-1)
        is_possible = ((rates >= 0) & (rates <= 1)).all(-1) & (sums <= 1 + SUM_TOLERANCE)
        if not is_possible.all():
            level, node_class = np.argwhere(~is_possible)[0]
            vector = rates[level, node_class]
            raise SequoiaPlanError(
                f"acceptance: found {vector.tolist()!r:.60} at level {level}, "
                f"{CLASS_NAMES[node_class]}, with the sum {sums[level, node_class]:.6g}; expected "
                "probabilities from 0 to 1 that sum to at most 1 (at most one child is accepted)"
            )
        return cls(rates)

    @classmethod
    def counted(cls, counts: Counts) -> Acceptance:
        """Estimate the rates, to six digits, from counts.

        Raises:
            SequoiaPlanError: if the root's level has no trials.
        """
        if not counts.trials[0].any():
            raise SequoiaPlanError(
                "acceptance[0]: found no trials, expected some of the root, where every step begins"
            )
        return cls(rounded(estimate(counts.trials, counts.accepted)), counts)

    @classmethod
    def from_file(cls, document: Any) -> Acceptance:
        """Read counts by level, or rates as `given` takes them."""
        if isinstance(document, (list, tuple)) and document and isinstance(document[0], dict):
            return cls.counted(Counts.from_file(document))
        return cls.given(document)

    def to_file(self) -> list[Any]:
        """The counts by level, or the given rates with no more lists than needed."""
        if self.counts:
            return self.counts.to_file()
        num_levels, num_classes, _ = self.rates.shape
        if num_classes > 1:
            return self.rates.tolist()  # p[level][node class][rank]
        by_level = self.rates[:, 0].tolist()  # p[level][rank]
        return by_level if num_levels > 1 else by_level[0]

    def without_counts(self) -> Acceptance:
        """The rates alone."""
        return Acceptance(self.rates)

    def with_one_class(self) -> Acceptance:
        """The acceptance of both node classes together."""
        return Acceptance.counted(self.counts.with_one_class()) if self.counts else self

    def pooled(self) -> Floats:
        """The rates of all levels together, to six digits, float64 [ranks].

        Of rates that were given, those of the root.
        """
        if self.counts is None:
            return self.rates[0, 0]
        return rounded(self.counts.accepted.sum((0, 1)) / self.counts.trials.sum())

    def at_depth(self, depth: int, branching: int | None = None) -> Floats:
        """The rates for each level of trees with `depth` levels.

        Args:
            depth: levels of a tree, the root's included.
            branching: ranks to return; all if None.

        Returns:
            float64 [depth - 1, node classes, ranks].
        """
        levels = np.minimum(np.arange(depth - 1), len(self.rates) - 1)
        return np.ascontiguousarray(self.rates[levels, :, :branching])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Acceptance)
            and np.array_equal(self.rates, other.rates)
            and self.counts == other.counts
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Acceptance({self.to_file()})"


def rounded(rates: Floats) -> Floats:
    """Rates to six digits, with sums of at most 1: counts may exceed their trials by rounding."""
    rates = np.round(rates / np.maximum(1.0, rates.sum(-1, keepdims=True)), 6)
    largest = np.expand_dims(rates.argmax(-1), -1)
    excess = np.maximum(0.0, rates.sum(-1, keepdims=True) - 1)
    reduced = np.round(np.take_along_axis(rates, largest, -1) - excess, 6)
    np.put_along_axis(rates, largest, reduced, -1)
    return rates


def estimate(trials: Floats, accepted: Floats) -> Floats:
    """Rates from counts.

    Node classes are moved towards each other by the share of their difference that noise explains;
    if it explains all of it, there is one node class in the result. Levels with few trials off the
    spine are taken together there. Arrays are as in `Counts`.
    """
    num_classes = trials.shape[1]
    by_level = _level_rates(*_with_deep_trials(trials.sum(1), accepted.sum(1)))[:, None]
    if num_classes == 1:
        return by_level
    is_rare = trials[:, 1] < MIN_TRIALS
    is_rare[0] = False  # no node is off the spine there
    num_rare = max(is_rare.sum(), 1)
    pooled_trials, pooled_accepted = trials.copy(), accepted.copy()
    pooled_accepted[is_rare, 1] = accepted[is_rare, 1].sum(0) / num_rare
    pooled_trials[is_rare, 1] = trials[is_rare, 1].sum() / num_rare
    signal = _share_beyond_noise(trials, accepted, by_level[:, 0])
    if signal == 0:
        return by_level
    class_trials, class_accepted = _with_deep_trials(pooled_trials, pooled_accepted)
    is_observed = class_trials > 0
    by_class = class_accepted / np.where(is_observed, class_trials, 1)[..., None]
    by_class = np.where(is_observed[..., None], by_class, by_level)
    return by_level + signal * (by_class - by_level)


def _with_deep_trials(trials: Floats, accepted: Floats) -> tuple[Floats, Floats]:
    """Counts with `DEEP_TRIALS` more on each level below `FIRST_DEEP_LEVEL`.

    The further trials are accepted as those of all levels from `FIRST_DEEP_LEVEL` on together.
    """
    deep_trials = trials[FIRST_DEEP_LEVEL:].sum(0)
    deep_rates = accepted[FIRST_DEEP_LEVEL:].sum(0) / np.maximum(deep_trials, 1)[..., None]
    further = np.zeros_like(trials)
    further[FIRST_DEEP_LEVEL + 1 :] = np.where(deep_trials > 0, DEEP_TRIALS, 0)
    return trials + further, accepted + further[..., None] * deep_rates


def _level_rates(trials: Floats, accepted: Floats) -> Floats:
    """Accepted by trials, float64 [levels, ranks]; where there are none, of the level above."""
    source_levels = np.maximum.accumulate(np.where(trials > 0, np.arange(len(trials)), 0))
    return (accepted / np.maximum(trials, 1)[:, None])[source_levels]


def _share_beyond_noise(trials: Floats, accepted: Floats, level_rates: Floats) -> float:
    """The share of the squared difference between the node classes that noise does not explain."""
    # Where both classes accept alike and observations are independent, a level's squared difference
    # times this weight has the expectation sum over ranks of p (1 - p).
    weights = trials.prod(1) / np.maximum(trials.sum(1), 1)
    variances = (level_rates * (1 - level_rates)).sum(1)
    noise = OVERDISPERSION * ((weights > 0) * variances).sum()
    class_rates = accepted / np.maximum(trials, 1)[..., None]
    squared_differences = ((class_rates[:, 1] - class_rates[:, 0]) ** 2).sum(1)
    difference = (weights * squared_differences).sum()
    return max(0.0, 1 - noise / difference) if difference > 0 else 0.0
