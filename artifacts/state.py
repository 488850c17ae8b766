"""The state of a text before a step: what chooses the step's tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sequoia_plan.artifacts.expected_tokens import most_valuable_nodes
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree import NO_SPECULATION, TokenTree

MAX_LOSS = 0.02
"""What a text may lose against plain decoding in the long run, as a share of its time."""
FIRST_BALANCE, MAX_BALANCE = 1.5, 5.0
"""Plain steps that a text may lose at its begin, and after it has gained any number of them."""
LEAST_SPEEDUP = 1 / (1 + MAX_LOSS + FIRST_BALANCE / 64)
"""What is promised to a text of 64 tokens on which nothing is accepted."""
PRIOR = 8.0
"""Accepted tokens that what was known before a text counts for, beside those of the text."""
MEMORY, LONG_MEMORY = 64, 2048
"""Steps after which what a text accepted counts a third, about, and what all texts did."""
RUNGS = (2, 4, 8, 16, 32)
"""Nodes of the trees that steps may take in place of the plan's."""
IN_DOUBT = 0.4
"""Doubt from which a step is one that times its tree, and is not charged."""
EQUAL = 0.08
"""Expected tokens by which another tree must be better than the plan's."""


class Choice(NamedTuple):
    """A tree that a step may take.

    Args:
        tree: the tree.
        tokens: tokens that its step yields on average by the plan.
        cost: duration of its step in plain steps, as planned or as measured.
        doubt: the step may well take 1 + doubt times less; 0 for a time that is planned or new.
    """

    tree: TokenTree
    tokens: float = 1.0
    cost: float = 1.0
    doubt: float = 0.0


PLAIN = Choice(NO_SPECULATION)


def choices_of(tree: TokenTree, match_length: int, has_rungs: bool = True) -> list[Choice]:
    """The trees that a step with such a match may take: the plan's first, no speculation last.

    Between them are rungs, trees of the most valuable nodes within the levels of the plan's tree,
    the largest first; where the plan's tree is a chain, they are chains.
    """
    plan: Any = tree.plan
    planned, plain, choices = tree.for_match(match_length), plan.plain_seconds, [PLAIN]
    # the plan of the match class, where there are any
    class_plan = [plan, *(p for p in plan.by_match if p.match_length <= match_length)][-1]
    if has_rungs and plan.latency and class_plan.acceptance:
        times = StepTime(plan.latency, plan.drafting, bool(plan.by_match))
        rates = class_plan.acceptance.rates[:, :, : 1 if planned.branching == 1 else None]
        for size in RUNGS:
            nodes = most_valuable_nodes(rates, size, planned.depth)
            if len(nodes) == size <= times.largest_size():
                rung = TokenTree.from_parents(parent for _, parent in nodes)
                rung = replace(rung, looks_up=planned.looks_up)
                tokens = math.fsum(value for value, _ in nodes)
                choices.insert(0, Choice(rung, tokens, times.step_seconds(rung) / plain))
    own = Choice(planned, class_plan.expected_tokens, class_plan.step_seconds / plain)
    return [own if planned.size > 1 else PLAIN, *choices]


Counts = tuple[tuple[float, float], ...]
NO_COUNTS: Counts = ((0.0, 0.0), (0.0, 0.0))


class State(NamedTuple):
    """What is known of a text from the steps before.

    Args:
        length: its tokens.
        match_length: tokens of the longest suffix that occurs earlier in it.
        balance: how many plain steps trees have gained on plain decoding. Below 0 a step has no
            tree; it then rises by `MAX_LOSS` a token.
        speed: tokens in the time of a plain step, lately: what time is worth.
        counts: of steps whose spine is drafted, and of those whose is looked up, the
            tokens beyond one a step, and how many the plan expected; older steps count less.
        all_counts: the same of this text and those before.
    """

    length: int
    match_length: int
    balance: float = FIRST_BALANCE
    speed: float = 1.0
    counts: Counts = NO_COUNTS
    all_counts: Counts = NO_COUNTS

    def choose(self, choices: Sequence[Choice]) -> Choice:
        """The choice for a step: the highest F - S t (planner/solving/match/portfolio.py).

        F: its expected tokens, corrected by what this text has accepted. S: `speed`. t: its cost,
        or the least it may be if that is in doubt. `choices`: the plan's own first, which others
        must beat by `EQUAL`, and plain steps last, taken while the balance is below 0.
        """
        if self.balance < 0:
            return choices[-1]

        def gain(choice: Choice) -> float:
            """F - S t, less the one token that any step yields."""
            tokens = (choice.tokens - 1) * self._accepted_share(choice.tree.looks_up)
            return tokens - self.speed * choice.cost / (1 + choice.doubt)

        best = max(choices, key=gain)
        return best if gain(best) > gain(choices[0]) + EQUAL else choices[0]

    def _accepted_share(self, looks_up: bool) -> float:
        """Tokens beyond one a step, as a share of the plan's, where the spine is looked up or not.

        The share begins as 1, all texts move it, and then this one; each moves it more, the more
        tokens the plan expected of its steps.
        """
        ratio = 1.0
        for counts in (self.all_counts, self.counts):
            yielded, expected = counts[looks_up]
            ratio = (PRIOR * ratio + yielded) / (PRIOR + expected)
        return ratio

    def after_step(self, choice: Choice, num_tokens: int, match_length: int) -> State:
        """The state after a step that took `choice`; one that times its tree is not charged."""
        balance = self.balance
        if choice.doubt < IN_DOUBT:
            balance += num_tokens * (1 + MAX_LOSS) - choice.cost

        def counted(counts: Counts, memory: int) -> Counts:
            """The counts with those of this step, after older ones have faded by 1 / memory."""
            faded = [(a - a / memory, b - b / memory) for a, b in counts]
            yielded, expected = faded[choice.tree.looks_up]
            faded[choice.tree.looks_up] = yielded + num_tokens - 1, expected + choice.tokens - 1
            return tuple(faded)

        return State(
            self.length + num_tokens,
            match_length,
            min(balance, MAX_BALANCE),
            max(1.0, self.speed + (num_tokens - self.speed * choice.cost) / MEMORY),
            counted(self.counts, MEMORY),
            counted(self.all_counts, LONG_MEMORY),
        )
