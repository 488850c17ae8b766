"""The state of a text before a step: what chooses the step's tree."""

from __future__ import annotations

from typing import NamedTuple

from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.tree import NO_SPECULATION, TokenTree

MAX_LOSS = 0.02
"""What a text may lose against plain decoding in the long run, as a share of its time."""
FIRST_BALANCE, MAX_BALANCE = 1.5, 5.0
"""Plain steps that a text may lose at its begin, and after it has gained any number of them."""
CATCH_UP = 0.5
"""Plain steps in which a draft reads what it missed, about: falling back costs as much."""
LEAST_SPEEDUP = 1 / (1 + MAX_LOSS + FIRST_BALANCE / 64)
"""What is promised to a text of 64 tokens on which nothing is accepted."""


class State(NamedTuple):
    """What is known of a text from its committed tokens and from planned times alone.

    Args:
        length: its tokens.
        match_length: tokens of the longest suffix that occurs earlier in it.
        balance: how many plain steps its trees have gained on plain decoding, by the planned times
            of its steps. Below 0 a step has no tree; it then rises by `MAX_LOSS` a token.
    """

    length: int
    match_length: int
    balance: float = FIRST_BALANCE

    def tree_of(self, tree: TokenTree) -> TokenTree:
        """Which of the trees of `tree` the step takes."""
        if self.balance < 0:
            return NO_SPECULATION
        return tree.for_context(self.length).for_match(self.match_length)

    def after_step(self, tree: TokenTree, num_tokens: int, match_length: int) -> State:
        """The state after a step with the tree that `tree` has for this state."""
        plan = tree.for_context(self.length).plan
        balance = self.balance + num_tokens * (1 + MAX_LOSS)
        balance -= self.planned_seconds(plan) / plan.plain_seconds if plan.plain_seconds else 1.0
        if balance < 0 <= self.balance:
            balance -= CATCH_UP
        return State(
            self.length + num_tokens, match_length, min(balance, max(MAX_BALANCE, self.balance))
        )

    def planned_seconds(self, plan: Plan) -> float:
        """Duration of the step in this state; 0 where the plan predicts no times."""
        if self.balance < 0:
            return plan.plain_seconds or 0.0
        reached = [part for part in plan.by_match if part.match_length <= self.match_length]
        return (reached[-1] if reached else plan).step_seconds or 0.0
