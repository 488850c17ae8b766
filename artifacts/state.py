"""The state of a text before a step: what chooses the step's tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sequoia_plan.artifacts.tree import NO_SPECULATION, TokenTree, tree_of

MAX_LOSS = 0.02
"""What a text may lose against plain decoding in the long run, as a share of its time."""
FIRST_BALANCE, MAX_BALANCE = 1.5, 5.0
"""Plain steps that a text may lose at its begin, and after it has gained any number of them."""
CATCH_UP = 0.5
"""Plain steps in which a draft reads what it missed, about: falling back costs as much."""
LEAST_SPEEDUP = 1 / (1 + MAX_LOSS + FIRST_BALANCE / 64)
"""What is promised to a text of 64 tokens on which nothing is accepted."""
PRIOR = 8.0
"""Accepted tokens that the plan's expectation counts for, beside those of the text."""
MEMORY = 64
"""Steps after which what a text accepted counts a third, about."""
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


def choices_at(tree: TokenTree, length: int, match_length: int, chooses: bool) -> list[Choice]:
    """The tree of such a text, and if a step `chooses`, the plan's rungs and no speculation."""
    tree = tree.for_context(length)
    plan: Any = tree.plan
    planned = tree.for_match(match_length)
    if not chooses:
        return [Choice(planned)]
    reached = [part for part in plan.by_match if part.match_length <= match_length]
    options = [(planned if planned.size > 1 else NO_SPECULATION, [plan, *reached][-1])]
    for rungs in plan.rungs[max(len(reached), 1) - 1 :][:1]:
        options += [(tree_of(rung), rung) for rung in rungs]
    choices = [
        Choice(t, p.expected_tokens, p.step_seconds / plan.plain_seconds) for t, p in options
    ]
    return [*choices, Choice(NO_SPECULATION)]


class State(NamedTuple):
    """What is known of a text from the steps before.

    Args:
        length: its tokens.
        match_length: tokens of the longest suffix that occurs earlier in it.
        balance: how many plain steps trees have gained on plain decoding. Below 0 a step has no
            tree; it then rises by `MAX_LOSS` a token.
        speed: tokens in the time of a plain step, lately: what time is worth.
        counts: of steps of this text whose spine is drafted, and of those whose is looked up, the
            tokens beyond one a step, and how many the plan expected; older steps count less.
    """

    length: int
    match_length: int
    balance: float = FIRST_BALANCE
    speed: float = 1.0
    counts: tuple[tuple[float, float], ...] = ((0.0, 0.0), (0.0, 0.0))

    def choose(self, choices: Sequence[Choice]) -> Choice:
        """Which choice the step takes: of the highest F - S t (planner/solving/match/portfolio.py).

        F is what the text's own tokens make of the plan's, and S the speed.
        """
        planned, plain = choices[0], choices[-1]

        def gain(choice: Choice) -> float:
            """Expected tokens less one, and less those that the step's time is worth."""
            yielded, expected = self.counts[choice.tree.looks_up]
            tokens = (choice.tokens - 1) * (PRIOR + yielded) / (PRIOR + expected)
            return tokens - self.speed * choice.cost / (1 + choice.doubt)

        best = plain if self.balance < 0 else max(choices, key=gain)
        is_better = self.balance < 0 or gain(best) > gain(planned) + EQUAL
        return best if is_better else planned

    def after_step(self, choice: Choice, num_tokens: int, match_length: int) -> State:
        """The state after a step that took `choice`; one that times its tree is not charged."""
        balance = self.balance
        if choice.doubt < IN_DOUBT:
            balance += num_tokens * (1 + MAX_LOSS) - choice.cost
        if balance < 0 <= self.balance:
            balance -= CATCH_UP
        counts = [(a - a / MEMORY, b - b / MEMORY) for a, b in self.counts]
        yielded, expected = counts[choice.tree.looks_up]
        counts[choice.tree.looks_up] = yielded + num_tokens - 1, expected + choice.tokens - 1
        return State(
            self.length + num_tokens,
            match_length,
            min(balance, max(MAX_BALANCE, self.balance)),
            max(1.0, self.speed + (num_tokens - self.speed * choice.cost) / MEMORY),
            tuple(counts),
        )
