"""Trees by match: one tree for each class of match, together the fastest in the long run.

Before each step, the match is the longest suffix of the committed tokens that occurs earlier in
them, and its length decides the class of the step (artifacts/lookup.py). In class c the step runs
the tree T_c, whose spine (the root, its first child, that node's first child, ...) may be looked up
in the text at no cost. If w_c is the share of steps in class c, decoding makes

    S = sum over c of w_c F(T_c) / sum over c of w_c t(T_c)

tokens a second, where F is the expected tokens and t the seconds of a step. At the highest S each
class has the tree of the largest F - S t: all of them pay the same price for a second. So each
class can be solved by itself against the others, whose tokens and seconds count as they are.

The shares depend on the trees, and so do the looked-up tokens that steps come upon, and the tokens
that the draft has to catch up with. The recorded texts of a profile, decoded again on paper
(replay.py), give all three for any trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sequoia_plan.artifacts import Acceptance, Profile, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.lookup import LookupCounts
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE, MatchPlan
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.match.acceptance import (
    drafted_acceptance,
    looked_up_acceptance,
    looked_up_as_visited,
)
from sequoia_plan.planner.solving.match.looked_up import fastest_looked_up_tree
from sequoia_plan.planner.solving.match.replay import (
    MAX_RUN,
    RecordedText,
    recorded_texts,
    replay,
)
from sequoia_plan.planner.solving.speed.costs import OtherSteps
from sequoia_plan.planner.solving.speed.fastest import (
    MAX_WORK,
    FastestTree,
    fastest_tree,
    quick_bound,
)

MAX_REPLAYS = 10
"""Rounds of solving and of counting the shares of classes anew."""
MIN_SHARE = 1e-4
"""A class that never came up counts as if it had this share of steps: it has a tree as well."""
MAX_UNREAD = 64
"""Tokens that the draft may leave unread; it then reads them in any case."""
MIN_REPLAYED_SHARE = 0.01
"""The recorded texts decide about the tree of a class with this share of their steps or more."""
MAX_ASCENTS = 50
"""Rounds in which each class is solved once; five are usually enough."""


@dataclass(frozen=True)
class Limits:
    """What trees may be."""

    budget: int
    depth: int
    drafted_depth: int
    branching: int | None = None


@dataclass(frozen=True)
class MatchProblem:
    """What is known of steps in one class of match."""

    match_length: int
    drafted: Acceptance
    looked_up: Acceptance | None = None
    catch_up: tuple[float, ...] = (0.0,)
    looked_up_catch_up: tuple[float, ...] = (0.0,)

    def acceptance(self, tree: TokenTree) -> Acceptance:
        """The acceptance of a tree, by whether its spine is looked up."""
        if not tree.looks_up:
            return self.drafted
        assert self.looked_up is not None
        return self.looked_up

    def catch_up_seconds(self, tree: TokenTree, times: StepTime) -> float:
        """How long the draft takes, on average, to catch up after a step with a tree."""
        seconds = self.looked_up_catch_up if tree.looks_up else self.catch_up
        return seconds[min(times.num_unread(tree), len(seconds) - 1)]


@dataclass(frozen=True)
class Portfolio:
    """One tree for each class of match.

    `shares` float64 [classes].
    """

    trees: tuple[TokenTree, ...]
    shares: Floats
    speed: float
    bound: float


def fastest_portfolio(
    problems: Sequence[MatchProblem],
    shares: Floats,
    times: StepTime,
    limits: Limits,
    start: Sequence[TokenTree],
    max_work: int = MAX_WORK,
) -> Portfolio:
    """Find the trees that make the most tokens a second together.

        repeat until no class has a faster tree:
            for each class: find the tree T of the largest (F(T) + F') / (t(T) + t'),
                where F' and t' are tokens and seconds of the other classes for each step of this

    Each round raises S. In the end every class has a tree of the largest F - S t at the common S,
    so no other trees are faster together.

    If no tree of class c makes more than S + d_c tokens a second with the others' trees, then for
    any tree T of the class F(T) - S t(T) exceeds that of its present tree by at most
    d_c (t(T) + t'). The sum of this over classes, each with its share, divided by the seconds of
    a step, bounds what any trees make: S + max over c of d_c + sum over c of d_c w_c t' / plain,
    where plain is the shortest step, without speculation.

    Args:
        problems: acceptance by class of match.
        shares: float64 [classes], the share of steps in each class, all above 0; the sum is 1.
        times: the step times.
        limits: what trees may be.
        start: the trees to begin with, by class.
        max_work: how many nodes and stairs of cost curves one search may look at.
    """
    trees = list(start)
    tokens, seconds = (np.array(values) for values in _step_figures(problems, trees, times))
    excess = np.full(len(problems), np.inf)  # d_c
    speed = float(shares @ tokens / (shares @ seconds))
    for _ in range(MAX_ASCENTS):
        is_improved = False
        for c, problem in enumerate(problems):
            other_steps = _other_steps(c, shares, tokens, seconds)
            present = FastestTree(trees[c], speed, speed)
            best = _fastest_of_class(problem, times, limits, present, max_work, other_steps)
            excess[c] = max(0.0, best.bound - speed)
            if best.speed > speed * (1 + OPTIMALITY_TOLERANCE):
                trees[c], is_improved = best.tree, True
                (tokens[c],), (seconds[c],) = _step_figures([problem], [best.tree], times)
                speed = float(shares @ tokens / (shares @ seconds))
        if not is_improved:
            break
    other_seconds = shares @ seconds - shares * seconds  # w_c t'
    bound = speed + excess.max() + float(excess @ other_seconds) / times.plain_seconds()
    return Portfolio(tuple(trees), shares, speed, bound)


def _step_figures(
    problems: Sequence[MatchProblem], trees: Sequence[TokenTree], times: StepTime
) -> tuple[list[float], list[float]]:
    """Expected tokens and seconds of a step in each class of match."""
    tokens, seconds = [], []
    for problem, tree in zip(problems, trees, strict=True):
        tokens.append(expected_tokens(tree, problem.acceptance(tree).rates))
        seconds.append(times.step_seconds(tree) + problem.catch_up_seconds(tree, times))
    return tokens, seconds


def _other_steps(c: int, shares: Floats, tokens: Floats, seconds: Floats) -> OtherSteps:
    """Expected tokens and seconds of other classes' steps for each step of class c.

    `shares`, `tokens`, `seconds` float64 [classes].
    """
    is_other = np.arange(len(shares)) != c
    weights = shares[is_other] / shares[c]
    return OtherSteps(float(weights @ tokens[is_other]), float(weights @ seconds[is_other]))


def _fastest_of_class(
    problem: MatchProblem,
    times: StepTime,
    limits: Limits,
    present: FastestTree,
    max_work: int,
    other_steps: OtherSteps,
) -> FastestTree:
    """The fastest tree of one class of match together with the other classes' steps."""
    rows = problem.drafted.at_depth(limits.drafted_depth, limits.branching)
    best = fastest_tree(
        _promising_levels(rows, limits.budget, times, present, other_steps),
        limits.budget,
        times,
        max_work,
        other_steps,
        present,
        problem.catch_up,
    )
    bound = best.bound
    if problem.looked_up is not None and limits.depth > 1:
        rows = problem.looked_up.at_depth(limits.depth, limits.branching)
        best = fastest_looked_up_tree(
            rows, limits.budget, times, best, max_work, other_steps, problem.looked_up_catch_up
        )
        bound = max(bound, best.bound)
    return FastestTree(best.tree, best.speed, bound)


def _promising_levels(
    rows: Floats, budget: int, times: StepTime, present: FastestTree, other_steps: OtherSteps
) -> Floats:
    """The rows of the levels that a tree faster than the present one may have.

    A tree with more levels is slower by a bound that takes no search. `rows` float64 [levels,
    classes, branching].
    """
    max_size = min(budget, times.largest_size())
    for num_levels in range(min(len(rows), max_size - 1), 0, -1):
        shallow_rows = rows[:num_levels]
        bound = quick_bound(shallow_rows, num_levels + 1, max_size, times, other_steps)
        if bound > present.speed:
            return shallow_rows
    return rows[:0]


@dataclass(frozen=True)
class SolvedPortfolio:
    """The trees by match, and what is known of them on the recorded texts.

    Speeds and the bound are in tokens a second; `tree_speed` is that of the base tree alone.
    """

    tree: TokenTree
    by_match: tuple[MatchPlan, ...]
    bound: float
    tree_speed: float
    replayed_speed: float | None


def solve_portfolio(
    profile: Profile, base_tree: TokenTree, times: StepTime, limits: Limits
) -> SolvedPortfolio:
    """Find the trees by match for a profile.

        trees = `base_tree` for every class
        repeat until no other trees are faster on the recorded texts:
            shares, catching up = those of the recorded texts, decoded again with these trees
            trees = the fastest portfolio with these

    Args:
        profile: the measurements, with counts by class of match.
        base_tree: the fastest single tree without lookup.
        times: the step times.
        limits: what trees may be.
    """
    lookup = profile.lookup
    assert lookup is not None
    problems = match_problems(profile)
    recording = Recording(recorded_texts(lookup), counted_shares(lookup), problems, times)
    base = recording.decode((base_tree,) * len(problems))
    decoded, bound = _fastest_on_recorded_texts(recording, base, limits)
    problems, trees = decoded.problems, decoded.trees
    tokens, seconds = _step_figures(problems, trees, times)
    by_match = tuple(
        MatchPlan(
            match_length=problem.match_length,
            share=float(decoded.shares[c]),
            acceptance=problem.acceptance(trees[c]).without_counts(),
            expected_tokens=tokens[c],
            step_seconds=seconds[c],
            catch_up_seconds=problem.catch_up_seconds(trees[c], times),
        )
        for c, problem in enumerate(problems)
    )
    replayed_speed = None
    if decoded.tokens_per_step is not None:
        replayed_speed = decoded.tokens_per_step / float(decoded.shares @ np.array(seconds))
    return SolvedPortfolio(
        _with_by_match(problems, trees), by_match, bound, base.speed, replayed_speed
    )


def match_problems(profile: Profile) -> list[MatchProblem]:
    """What a profile counted of each class of match.

    A class with too few counts of looked-up tokens has those of the class before it.
    """
    assert profile.lookup is not None
    problems: list[MatchProblem] = []
    for match_class in profile.lookup.classes:
        drafted = drafted_acceptance(profile, match_class)
        looked_up = None
        if match_class.match_length > 0:
            looked_up = looked_up_acceptance(match_class, drafted) or problems[-1].looked_up
        problems.append(MatchProblem(match_class.match_length, drafted, looked_up))
    return problems


@dataclass(frozen=True)
class DecodedAgain:
    """Trees by match, and what decoding the recorded texts with them comes to.

    `shares` float64 [classes].
    """

    trees: tuple[TokenTree, ...]
    shares: Floats
    problems: list[MatchProblem]
    speed: float
    tokens_per_step: float | None


@dataclass(frozen=True)
class Recording:
    """What a profile recorded for decoding again on paper.

    `shares` float64 [classes].
    """

    texts: Sequence[RecordedText]
    shares: Floats
    problems: Sequence[MatchProblem]
    times: StepTime

    def decode(self, trees: tuple[TokenTree, ...]) -> DecodedAgain:
        """Decode the recorded texts again with the tree of each class of match.

        Without recorded texts, shares and looked-up tokens are those that the profile counted, and
        the draft's catching up is left out.
        """
        counts, problems, tokens_per_step = self.shares, list(self.problems), None
        if self.texts:
            acceptances = [
                problem.acceptance(tree) for problem, tree in zip(problems, trees, strict=True)
            ]
            result = replay(self.texts, trees, acceptances)
            counts, tokens_per_step = result.shares, result.tokens_per_step
            for c, problem in enumerate(self.problems):
                visits_by_run = result.visits_by_run[c]
                catch_up = _catch_up(result.transitions[c], trees, self.times)
                problems[c] = replace(
                    problem,
                    looked_up=problem.looked_up
                    and looked_up_as_visited(problem.looked_up, visits_by_run),
                    catch_up=catch_up,
                    looked_up_catch_up=_looked_up_catch_up(catch_up, visits_by_run),
                )
        shares = np.maximum(counts, MIN_SHARE)
        shares /= shares.sum()
        tokens, seconds = _step_figures(problems, trees, self.times)
        step_tokens = tokens_per_step or float(shares @ np.array(tokens))
        speed = step_tokens / float(shares @ np.array(seconds))
        return DecodedAgain(trees, shares, problems, speed, tokens_per_step)


def counted_shares(lookup: LookupCounts) -> Floats:
    """The share of the profile's own steps in each class of match, float64 [classes]."""
    drafted = [match_class.drafted for match_class in lookup.classes]
    counts = np.array([counts.trials[0].sum() if counts else 0.0 for counts in drafted])
    shares: Floats = counts / max(counts.sum(), 1.0)
    return shares


def _fastest_on_recorded_texts(
    recording: Recording, base: DecodedAgain, limits: Limits
) -> tuple[DecodedAgain, float]:
    """The fastest trees by match, with the shares that the recorded texts give for themselves.

    Shares, catching up and the looked-up tokens that steps come upon depend on the trees, so the
    recorded texts decide whether new trees are faster, all together or one at a time. A tenth of
    the usual work is enough until none are.
    """
    best, trees_so_far = base, set(base.trees)
    for _ in range(MAX_REPLAYS):
        result = _solve_beside(best, recording.times, limits, MAX_WORK // 10)
        trees_so_far |= set(result.trees)
        candidates = [result.trees, *_with_one_of(best.trees, result.trees)]
        fastest = max(map(recording.decode, candidates), key=lambda decoded: decoded.speed)
        if fastest.speed <= best.speed * (1 + OPTIMALITY_TOLERANCE):
            break
        best = fastest
    if recording.texts:
        best = _with_trees_exchanged(recording, best, trees_so_far, limits)
        best = _with_rare_classes_solved(recording, best, limits)
    return best, _solve_beside(best, recording.times, limits, MAX_WORK).bound


def _with_one_of(
    trees: tuple[TokenTree, ...], others: tuple[TokenTree, ...]
) -> Iterator[tuple[TokenTree, ...]]:
    """Yields the trees by class with the tree of one class replaced, for each that differs."""
    for c, tree in enumerate(others):
        if tree != trees[c]:
            yield (*trees[:c], tree, *trees[c + 1 :])


def _with_trees_exchanged(
    recording: Recording, best: DecodedAgain, trees: set[TokenTree], limits: Limits
) -> DecodedAgain:
    """Trees by match that no exchange of one class's tree makes faster on the recorded texts.

    A tree changes the shares of other classes: after a short lookup chain that was right, the next
    match is a longer one. So trees that are not the fastest with given shares are tried as well.
    """
    longest = min(limits.depth, limits.budget, recording.times.largest_size(), MAX_RUN)
    chains = [TokenTree(TokenTree.chain(n).parents, looks_up=True) for n in range(2, longest + 1)]
    # in an order that does not depend on hashes
    sorted_trees = sorted(trees, key=lambda tree: (tree.looks_up, tree.size, tree.parents.tolist()))
    is_improved = True
    while is_improved:
        is_improved = False
        for c, problem in enumerate(recording.problems):
            if best.shares[c] < MIN_REPLAYED_SHARE:
                continue
            for tree in (*sorted_trees, *chains):
                if tree == best.trees[c] or (tree.looks_up and problem.looked_up is None):
                    continue
                decoded = recording.decode((*best.trees[:c], tree, *best.trees[c + 1 :]))
                if decoded.speed > best.speed * (1 + OPTIMALITY_TOLERANCE):
                    best, is_improved = decoded, True
    return best


def _with_rare_classes_solved(
    recording: Recording, best: DecodedAgain, limits: Limits
) -> DecodedAgain:
    """Trees by match in which a class that the texts hardly come upon is solved for its own counts.

    Recorded texts are short, and a long match is rare in them; a longer text has it often. So such
    a class takes the tree that the price of time and all of its counted positions give.
    """
    is_rare = best.shares < MIN_REPLAYED_SHARE
    problems = [
        counted if is_rare[c] else best.problems[c] for c, counted in enumerate(recording.problems)
    ]
    decoded = replace(best, problems=problems)
    solved = _solve_beside(decoded, recording.times, limits, MAX_WORK // 10)
    trees = tuple(solved.trees[c] if is_rare[c] else tree for c, tree in enumerate(best.trees))
    return replace(recording.decode(trees), problems=problems)


def _solve_beside(
    decoded: DecodedAgain, times: StepTime, limits: Limits, max_work: int
) -> Portfolio:
    """The fastest portfolio with the shares and the seconds to catch up of these trees."""
    return fastest_portfolio(
        decoded.problems, decoded.shares, times, limits, decoded.trees, max_work
    )


def _catch_up(
    steps_after: Floats, trees: Sequence[TokenTree], times: StepTime
) -> tuple[float, ...]:
    """How many seconds the draft takes on average to catch up if 0, 1, 2, ... tokens are unread.

    `steps_after` float64 [classes].
    """
    shares = steps_after / max(steps_after.sum(), 1e-300)
    return tuple(
        float(shares @ np.array([times.catch_up_seconds(num_unread, tree) for tree in trees]))
        for num_unread in range(MAX_UNREAD + 1)
    )


def _looked_up_catch_up(catch_up: Sequence[float], visits_by_run: Floats) -> tuple[float, ...]:
    """How many seconds the draft takes on average to catch up if 0, 1, 2, ... tokens are looked up.

    A step whose next r tokens are those of the lookup chain accepts r + 1 nodes at most.
    `visits_by_run` float64 [runs].
    """
    shares = visits_by_run / max(visits_by_run.sum(), 1e-300)
    num_accepted = np.arange(1, len(shares) + 1)
    seconds = np.array(catch_up)
    return tuple(
        float(shares @ seconds[np.minimum(num_accepted, num_looked_up)])
        for num_looked_up in range(len(catch_up))
    )


def _with_by_match(problems: Sequence[MatchProblem], trees: Sequence[TokenTree]) -> TokenTree:
    """The first tree, with the others in `by_match` where they differ from the one before."""
    by_match: dict[int, TokenTree] = {}
    last = trees[0]
    for problem, tree in zip(problems[1:], trees[1:], strict=True):
        if tree != last:
            by_match[problem.match_length] = TokenTree(tree.parents, looks_up=tree.looks_up)
        last = tree
    return TokenTree(trees[0].parents, by_match=by_match)
