"""What was observed of acceptance, prompt by prompt: totals by level, how sure they are, and how much more often `traversal` accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts import LevelCounts, Lift, TokenTree
from sequoia_plan.artifacts.profile import MOST_KINDS, Counts
from sequoia_plan.artifacts.uncertainty import Z95, gradient, jackknife

LEVELS = 4
"""Levels told apart, the last one with all below it."""
TREE = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])
"""Decodes the text of `forced`, and stands for any tree where precision is asked for."""
WIDEST = np.array([TREE.child_count[TREE.position_ids == level].max() for level in range(LEVELS)])
"""The most children a node of `TREE` has on each level."""
LEAST_PROMPTS = 8
"""Fewer say nothing about how prompts differ."""


@dataclass(frozen=True)
class Acceptance:
    """What was observed under one setting, prompt by prompt.

    Args:
        trials: int64 [prompts, levels], accepted nodes observed.
        counts: float64 [prompts, levels, ranks], how many of their children of each rank were accepted, or were expected to be.
        reached: of `traversal`, float64 [prompts, 2, levels of `TREE`]: what `methods.BothRules` adds up.
        off: the part of trials and counts that belongs to accepted nodes off the spine; None if nobody told them apart.
    """

    trials: NDArray[np.int64]
    counts: NDArray[np.float64]
    reached: NDArray[np.float64] | None = None
    off: Acceptance | None = None

    def lift(self) -> Lift | None:
        """How much more often `traversal` accepts, level by level, and how sure that is: a jackknife over prompts."""
        if self.reached is None:
            return None
        depth = min(LEVELS, int(np.flatnonzero(self.trials.sum(0))[-1]) + 1)
        ratio = _lift(self.reached.sum(0))[:depth]
        covariance: tuple[tuple[float, ...], ...] = ()
        groups = len(self.reached)
        if groups >= LEAST_PROMPTS:
            off = np.log(np.maximum([_lift(self.reached.sum(0) - one)[:depth] for one in self.reached], 1e-9))
            off -= off.mean(0)
            covariance = tuple(map(tuple, (off.T @ off * (groups - 1) / groups).round(9).tolist()))
        return Lift(tuple(ratio.round(6).tolist()), tuple(WIDEST[:depth].tolist()), covariance)

    def levels(self) -> tuple[LevelCounts, ...]:
        """Totals of each level, down to the last one seen."""
        return self._totals(np.ones(len(self.trials), bool))

    def part(self, chosen: NDArray[np.bool_]) -> Acceptance:
        """What was observed on some of the prompts, bool [prompts]."""
        reached = None if self.reached is None else self.reached[chosen]
        return Acceptance(self.trials[chosen], self.counts[chosen], reached, self.off and self.off.part(chosen))

    def by_kind(self, kinds: Sequence[str | None]) -> dict[str, tuple[LevelCounts, ...]]:
        """`levels` of each kind of prompts; none if a prompt has no kind, or there are more kinds than a profile holds.

        Args:
            kinds: of the prompts in turn; those of further rounds follow from the start again.
        """
        named = np.array([kinds[i % len(kinds)] or "" for i in range(len(self.trials))])
        names = list(dict.fromkeys(named.tolist()))
        return {} if "" in names or len(names) > MOST_KINDS else {name: self._totals(named == name) for name in names}

    def _totals(self, chosen: NDArray[np.bool_]) -> tuple[LevelCounts, ...]:
        trials, counts = self.trials[chosen].sum(0), self.counts[chosen].sum(0)
        seen = int(np.flatnonzero(self.trials.sum(0))[-1]) + 1
        off: list[Counts | None] = [None] * seen
        if self.off is not None:
            of_them = self.off.trials[chosen].sum(0)
            apart = _within(self.off.counts[chosen].sum(0), counts, of_them, trials - of_them).round(4).tolist()
            off[1:] = [Counts(int(n), tuple(row)) for n, row in zip(of_them[1:seen], apart[1:seen], strict=True)]
        return tuple(LevelCounts(int(n), tuple(row), part) for n, row, part in zip(trials[:seen], counts[:seen].round(4).tolist(), off, strict=True))

    def precision(self) -> float:
        """Half the 95 % interval of a tree's expected tokens (`TREE`), relative: of its predicted speed-up too, step times given.

        Jackknife over prompts, whose texts differ more than positions within one; inf for fewer than eight.
        """
        error, mean = self._error()
        return Z95 * error / mean

    def effective_trials(self) -> int:
        """The effective sample size: independent trials that would leave the same interval. Fewer than there were, as positions of one text
        resemble each other."""
        p = self.counts.sum((0, 1)) / self.trials.sum()
        slope = gradient(TREE, p[None])[0]
        error, _ = self._error()
        return int(min(self.trials.sum(), np.ceil((p @ slope**2 - (p @ slope) ** 2) / max(error, 1e-9) ** 2) if np.isfinite(error) else np.inf))

    def _error(self) -> tuple[float, float]:
        """Standard error of F(`TREE`), and F."""
        if len(self.trials) < LEAST_PROMPTS:
            return float("inf"), 1.0
        return jackknife(TREE, self.trials.sum(1, keepdims=True), self.counts.sum(1, keepdims=True))


def collect(tallies: Sequence[Any], place: int) -> Acceptance:
    """What prompts add up to under the setting at `place`; the tallies are those of `Forced` or `Counted`, one a prompt."""
    mine = [tally[place] for tally in tallies]
    trials, counts = np.array([t["trials"] for t in mine], np.int64), np.array([t["counts"] for t in mine], np.float64)
    total, off = counts.sum(2), counts[:, :, 1]
    reached = np.array([t["reached"] for t in mine]) if mine[0]["reached"] else None
    if reached is not None:
        plain, total = total, lifted(total, trials.sum(2), reached.sum(0))
        off = off * total / np.maximum(plain, 1e-300)  # of one level, the classes are lifted alike
    return Acceptance(trials.sum(2), total, reached, Acceptance(trials[:, :, 1], off))


def _within(off: NDArray[np.float64], total: NDArray[np.float64], trials: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [levels, ranks] off the spine, moved so that they are at most their `trials`, and the rest of `total` at most the `others`."""
    off = off * np.minimum(1, trials / np.maximum(off.sum(-1), 1e-300))[:, None]
    rest = total - off
    moved: NDArray[np.float64] = total - rest * np.minimum(1, others / np.maximum(rest.sum(-1), 1e-300))[:, None]
    return moved


def _lift(reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [levels]: how many times as often the second rule gets past each level, from `methods.BothRules.reached`."""
    past = reached[:, 1:] / np.maximum(reached[:, :-1], 1e-9)
    lift: NDArray[np.float64] = np.where(past[0] > 0, past[1] / np.maximum(past[0], 1e-9), 1.0)
    return lift[:LEVELS]


def lifted(counts: NDArray[np.float64], trials: NDArray[np.int64], reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """`counts` of the first rule as the second one accepts: ranks that `TREE` has on a level in proportion, the others as they are, or what
    those leave."""
    known = np.arange(counts.shape[2]) < WIDEST[:, None]
    inside = np.where(known, counts * _lift(reached)[:, None], 0.0)
    inside *= np.minimum(1, trials / np.maximum(inside.sum(-1), 1e-9))[..., None]
    outside = np.where(known, 0.0, counts)
    room = (trials - inside.sum(-1)) / np.maximum(outside.sum(-1), 1e-9)
    return inside + outside * np.clip(room, 0, 1)[..., None]
