"""What steps take on the machine as it is now."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.state import Choice

RUN = 24
"""Plain steps in a row that are timed at first, by the least of them: a processor's cache may
have weights only while they are read again and again (measured: 7.3 ms after a pause, then 4.1)."""
MEMORY, STALE = 16, 2048
"""Steps of a tree that its mean counts, and steps of any after which one counts a third, about."""
LEAST = 1e-9
"""Seconds of a step, where a clock stands still or goes back."""
FIRST = 4
"""So many first steps of a tree count by the least of them: the others found nothing in caches."""
DOUBT = 0.5
"""A tree that was timed n times lately may take less than its mean by `DOUBT / (1 + n * n)`."""
SHARE = 0.01
"""Of the time that trees take, what timing plain steps again may cost: they may be faster now."""
SURPRISE, MAX_CHANGE = 0.25, 0.03
"""Two steps in a row that differ so much from their means halve what all count for, and what their
tree has counted for is gone; else a step moves its mean by so much at most. In logarithms."""


Shape = tuple[int, int]
"""The nodes of a tree and its drafted levels: steps of trees of one shape take the same time."""
PLAIN_SHAPE: Shape = (1, 0)


def shape_of(tree: TokenTree) -> Shape:
    """The shape of a tree."""
    return tree.size, tree.num_drafted_levels


class Clock:
    """Times the steps that texts take anyway, to correct the times that a plan has for trees.

    A plain step has no tree, and is the unit in which plans give times. `plain_log` is the
    logarithm of its seconds here. For each shape, `means` has the logarithm of measured over
    planned time, and `counts` how many steps that mean counts. `plain_run` is the number of plain
    steps in a row up to now, `since_plain` the planned time, in plain steps, since the last whole
    run of them.
    """

    def __init__(self) -> None:
        self.now, self.plain_run, self.plain_log = time.perf_counter, 0, 0.0
        self.last_mean, self.last_error, self.times_plain = 0.0, 0.0, False
        self.since_plain, self.has_warned = math.inf, False
        self.means = {PLAIN_SHAPE: 0.0}
        self.counts: defaultdict[Shape, float] = defaultdict(float)

    def measured(self, choices: Sequence[Choice], speed: float) -> Sequence[Choice]:
        """The choices with their costs and doubts as measured so far.

        While plain steps are to be timed anew, only the last choice, which is the plain step.
        `speed`: tokens that are generated in the time of a plain step.
        """
        # a run of plain steps loses RUN * (1 - 1 / speed) of their time against trees
        self.times_plain |= self.since_plain * SHARE > RUN * (1.05 - 1 / speed)
        self.times_plain &= self.plain_run <= RUN
        if self.times_plain:
            return choices[-1:]
        return [  # a tree that was not timed is off its plan as the last timed one is
            choice._replace(
                cost=choice.cost * math.exp(self.means.get(shape, self.last_mean)),
                doubt=DOUBT / (1 + self.counts[shape] ** 2),
            )
            for choice in choices
            for shape in [shape_of(choice.tree)]
        ]

    def note(self, choice: Choice, seconds: float) -> Choice:
        """Move a shape's mean by a step; returns `choice`, from `measured`, at its new cost."""
        shape, seconds = shape_of(choice.tree), max(seconds, LEAST)
        is_plain = shape == PLAIN_SHAPE
        self.plain_run = self.plain_run + 1 if is_plain else 0
        self.since_plain = 0.0 if self.plain_run > RUN else self.since_plain + choice.cost
        if self.plain_run == 1:
            return choice  # it finds less of the weights in the processor's cache
        if not self.counts:  # the first step that counts
            self.plain_log = math.log(seconds)
        count = self.counts[shape]
        is_known = self.plain_run > RUN if is_plain else count >= FIRST
        # the logarithm of the step's seconds over those expected, `cost` times a plain step's
        change = error = math.log(seconds / choice.cost) - self.plain_log
        last_error, self.last_error = self.last_error, error if is_known else 0.0
        fade = 1 - 1 / STALE
        if min(abs(self.last_error), abs(last_error)) > SURPRISE:  # the machine has changed
            fade, count = 0.5, min(count, 1.0)
        for other in self.counts:
            self.counts[other] *= fade
        if is_known:
            change = max(-MAX_CHANGE, min(error / min(1 + count, MEMORY), MAX_CHANGE))
        elif error > 0:  # one of the first steps, of which the fastest counts
            change = 0.0 if is_plain else error / (1 + count)
        self.counts[shape] = count * fade + 1
        if is_plain:
            self.plain_log += change
            return choice
        self.means[shape] = self.last_mean = self.means.get(shape, self.last_mean) + change
        return choice._replace(cost=choice.cost * math.exp(change))
