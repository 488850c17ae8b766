"""What steps take on the machine as it is now."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.state import Choice
from sequoia_plan.artifacts.tree import NO_SPECULATION

MIN_PLAIN = 1.5
"""What timed plain steps must count for, because others are timed in them."""
MEMORY, STALE = 16, 2048
"""Steps of a tree that its mean counts, and steps of any after which one counts a third, about."""
SURPRISE, MAX_CHANGE = 0.25, 0.03
"""Two steps in a row that differ so much from their means halve what all count for, and what their
tree has counted for is gone; else a step moves its mean by so much at most. In logarithms."""


class Clock:
    """Times the steps of a pair of models as texts take them, and none beside.

    `plain` is the mean logarithm of a plain step's seconds, `means` are those of the times of trees
    over the planned, in plain steps. A tree that was timed n times lately may take 1 / (1 + n * n)
    less than its mean: so it is taken, and timed, if it could then be the best.
    """

    def __init__(self) -> None:
        self.now, self.follows_plain, self.plain = time.perf_counter, False, 0.0
        self.last_mean = self.last_change = 0.0
        self.means = {NO_SPECULATION: 0.0}
        self.counts: defaultdict[TokenTree, float] = defaultdict(float)

    def measured(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """The choices as measured; the last, plain steps, alone while those are to be timed.

        What was not timed differs from its plan as the last timed tree does.
        """
        if self.counts.get(NO_SPECULATION, 0.0) < MIN_PLAIN:
            return choices[-1:]
        return [
            choice._replace(
                cost=choice.cost * math.exp(self.means.get(choice.tree, self.last_mean)),
                doubt=1 / (1 + self.counts[choice.tree] ** 2),
            )
            for choice in choices
        ]

    def note(self, choice: Choice, seconds: float) -> Choice:
        """Count a step of these seconds; returns its measured choice with what it now costs."""
        tree, follows_plain = choice.tree, self.follows_plain
        self.follows_plain = is_plain = tree.size == 1
        if is_plain and not follows_plain:
            return choice  # it finds less of the weights in the processor's cache
        if not self.counts:
            self.plain = math.log(seconds)
        change, last_change = math.log(seconds / choice.cost) - self.plain, self.last_change
        self.last_change = change
        fade = 1 - 1 / STALE
        if min(abs(change), abs(last_change)) > SURPRISE:
            fade, self.counts[tree] = 1 / 2, min(self.counts[tree], 1.0)
        for other in self.counts:
            self.counts[other] *= fade
        change /= min(1 + self.counts[tree], MEMORY)
        if self.counts[tree] > 1:
            change = max(-MAX_CHANGE, min(change, MAX_CHANGE))
        self.counts[tree] += 1
        if is_plain:
            self.plain += change
            return choice
        self.means[tree] = self.last_mean = self.means.get(tree, self.last_mean) + change
        return choice._replace(cost=choice.cost * math.exp(change))
