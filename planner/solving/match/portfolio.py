"""Trees by match: one tree for each match class, together the fastest in the long run.

Before each step, the match is the longest suffix of the committed tokens that occurs earlier in
them, and its length decides the class of the step (artifacts/lookup.py). In class c the step runs
the tree T_c, whose spine (the root, its first child, that node's first child, ...) may be looked up
in the text at no cost. If w_c is the share of steps in class c, decoding makes

    S = sum over c of w_c F(T_c) / sum over c of w_c t(T_c)

tokens a second, where F is the expected tokens and t the seconds of a step. At the highest S each
class has the tree of the largest F - S t: all of them pay the same price for a second. So each
class can be solved by itself against the others, whose tokens and seconds count as they are.

The shares depend on the trees, and so do the looked-up tokens that steps come upon, and the tokens
that the draft has to catch up with: recorded.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE
from sequoia_plan.planner.solving.match.looked_up import fastest_looked_up_tree
from sequoia_plan.planner.solving.problem import MAX_WORK, FastestTree, SpeedProblem
from sequoia_plan.planner.solving.speed.fastest import fastest_tree

MAX_ASCENTS = 50
"""Rounds in which each class is solved once; five are usually enough."""


@dataclass(frozen=True)
class MatchProblem:
    """What the tree of one match class is solved for: all drafted, or with a looked-up spine."""

    match_length: int
    drafted: SpeedProblem
    looked_up: SpeedProblem | None = None

    def of(self, tree: TokenTree) -> SpeedProblem:
        """The problem that a tree solves, by whether its spine is looked up."""
        if not tree.looks_up:
            return self.drafted
        assert self.looked_up is not None
        return self.looked_up

    def fastest(self, present: FastestTree, **beside: Any) -> FastestTree:
        """The fastest tree, or `present`; `beside`: fields of the problem for other steps."""
        best = fastest_tree(_cut_levels(replace(self.drafted, **beside), present.speed), present)
        if self.looked_up is None:
            return best
        result = fastest_looked_up_tree(replace(self.looked_up, **beside), best)
        return result._replace(bound=max(best.bound, result.bound))


def _cut_levels(problem: SpeedProblem, speed: float) -> SpeedProblem:
    """The problem cut to the levels that trees faster than `speed` may have, by `quick_bound`."""
    for num_levels in range(min(len(problem.rates), problem.max_size - 1), 0, -1):
        problem = replace(problem, rates=problem.rates[:num_levels])
        if problem.quick_bound(num_levels + 1) > speed:  # of trees with all of these levels
            return problem
    return replace(problem, rates=problem.rates[:0])


@dataclass(frozen=True)
class Portfolio:
    """One tree for each match class, their tokens a second, and what no other trees exceed."""

    trees: tuple[TokenTree, ...]
    speed: float
    bound: float


def fastest_portfolio(
    problems: Sequence[MatchProblem],
    shares: Floats,
    start: Sequence[TokenTree],
    max_work: int = MAX_WORK,
) -> Portfolio:
    """Find the trees that make the most tokens a second together.

        repeat until no class has a faster tree:
            for each class: find the tree T of the largest (F(T) + F') / (t(T) + t'),
                where F' and t' are the others' tokens and seconds for each step of this class

    F(T) and t(T) are the expected tokens and seconds of a step with the tree T, w_c the share of
    class c, and S the tokens a second of all classes together. Each round raises S. In the end
    every class has a tree of the largest F - S t at the common S, so no other trees are faster
    together.

    If no tree of class c makes more than S + d_c tokens a second with the others' trees, then for
    any tree T of the class F(T) - S t(T) exceeds that of its present tree by at most
    d_c (t(T) + t'). The sum of this over classes, each with its share, divided by the seconds of
    a step, bounds what any trees make: S + max over c of d_c + sum over c of d_c w_c t' / shortest,
    where the shortest step is the one without speculation.

    Args:
        problems: what each class is solved for, with the same step times.
        shares: float64 [classes], the share of steps in each class, all above 0; the sum is 1.
        start: the trees to begin with, by class.
        max_work: how many nodes and stairs of cost curves one search may look at.
    """
    trees = list(start)
    figures = step_figures(problems, trees)
    excess = np.full(len(problems), np.inf)  # d_c
    speed = tokens_per_second(shares, figures)
    for _ in range(MAX_ASCENTS):
        is_improved = False
        for c, problem in enumerate(problems):
            others = np.delete(shares, c) / shares[c] @ np.delete(figures, c, axis=0)
            tokens, seconds = others.tolist()
            present = FastestTree(trees[c], speed, speed)
            best = problem.fastest(
                present, other_tokens=tokens, other_seconds=seconds, max_work=max_work
            )
            excess[c] = max(0.0, best.bound - speed)
            if best.speed > speed * (1 + OPTIMALITY_TOLERANCE):
                trees[c], is_improved = best.tree, True
                figures = step_figures(problems, trees)
                speed = tokens_per_second(shares, figures)
        if not is_improved:
            break
    seconds_of_class = shares * figures[:, 1]
    other_seconds = seconds_of_class.sum() - seconds_of_class  # w_c t'
    shortest = problems[0].drafted.times.step_seconds(TokenTree.chain(1))
    bound = speed + excess.max() + float(excess @ other_seconds) / shortest
    return Portfolio(tuple(trees), speed, bound)


def step_figures(problems: Sequence[MatchProblem], trees: Sequence[TokenTree]) -> Floats:
    """Expected tokens and seconds of a step, float64 [match classes, 2]; a tree for each class."""
    pairs = [(problem.of(tree), tree) for problem, tree in zip(problems, trees, strict=True)]
    return np.array([[expected_tokens(tree, p.rates), p.step_seconds(tree)] for p, tree in pairs])


def tokens_per_second(shares: Floats, figures: Floats) -> float:
    """Tokens a second over all steps; `shares` float64 [classes], `figures` of `step_figures`."""
    tokens, seconds = shares @ figures
    return float(tokens / seconds)
