"""Recorded texts, decoded again on paper with trees by match.

The shares of match classes depend on the trees, and so do the looked-up tokens that steps come
upon, and the tokens that the draft has to catch up with. The recorded texts of a profile give all
three for any trees (replay.py).

A kind of prompts differs from the others in its texts, and in how often drafted children are
accepted. A profile has the texts by kind, and the counts by kind over all match classes. So the
probability of a drafted child in a class is that of the class times what the kind has in place of
all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.acceptance import rounded
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.match.acceptance import (
    drafted_acceptance,
    looked_up_acceptance,
    looked_up_as_visited,
)
from sequoia_plan.planner.solving.match.portfolio import (
    MatchProblem,
    step_figures,
    tokens_per_second,
)
from sequoia_plan.planner.solving.match.replay import MAX_RUN, RecordedText, recorded_texts, replay
from sequoia_plan.planner.solving.problem import SpeedProblem
from sequoia_plan.planner.solving.promised import promised_figures, ratios_by_kind, scaled

MIN_SHARE = 1e-4
"""A class that never came up counts as if it had this share of steps: it has a tree as well."""
MAX_UNREAD = 64
"""Tokens that the draft may leave unread; it then reads them in any case."""


@dataclass(frozen=True)
class DecodedAgain:
    """Trees by match, and what decoding the recorded texts with them comes to.

    `shares` float64 [classes].
    """

    trees: tuple[TokenTree, ...]
    shares: Floats
    problems: list[MatchProblem]
    speed: float
    tokens_per_step: float


@dataclass(frozen=True)
class Recording:
    """What trees by match are solved for: texts (one at least) and counts by match class."""

    texts: Sequence[RecordedText]
    problems: Sequence[MatchProblem]

    @property
    def times(self) -> StepTime:
        """The step times of all problems."""
        return self.problems[0].drafted.times

    def without_lookup(self) -> Recording:
        """The same for steps that do not look for the match, with trees that are drafted."""
        times = replace(self.times, looks_up=False)
        problems = [replace(p, drafted=replace(p.drafted, times=times)) for p in self.problems]
        return Recording(self.texts, problems)

    def decode(self, trees: tuple[TokenTree, ...]) -> DecodedAgain:
        """Replay the recorded texts, without models, with the tree of each match class."""
        pairs = zip(self.problems, trees, strict=True)
        result = replay(self.texts, trees, [problem.of(tree).rates for problem, tree in pairs])
        seconds_by_next_tree = _catch_up_seconds(trees, self.times)  # [unread tokens, next tree]
        problems = []
        for match_class, problem in enumerate(self.problems):
            visits = result.visits_by_run[match_class]
            # on average over the classes of the step after, whose tree catches up
            catch_up = seconds_by_next_tree @ _as_shares(result.transitions[match_class])
            looked_up = problem.looked_up and replace(
                problem.looked_up,
                rates=looked_up_as_visited(problem.looked_up.rates, visits),
                catch_up=_looked_up_catch_up(catch_up, visits),
            )
            drafted = replace(problem.drafted, catch_up=tuple(catch_up.tolist()))
            problems.append(MatchProblem(problem.match_length, drafted, looked_up))
        shares = np.maximum(result.shares, MIN_SHARE)
        shares /= shares.sum()
        figures = step_figures(problems, trees)  # [match classes, (tokens, seconds)]
        figures[:, 0] = result.tokens_per_step  # as replayed, in place of what the rates expect
        speed = tokens_per_second(shares, figures)
        return DecodedAgain(trees, shares, problems, speed, result.tokens_per_step)


def recorded(
    profile: Profile, base: SpeedProblem, depth: int, branching: int | None
) -> Recording | None:
    """What a profile recorded for trees of at most `depth` levels; None without a text.

    `base` has the limits of drafted trees and the step times. A class with too few counts of
    looked-up tokens has those of the class before it.
    """
    lookup = profile.lookup
    if lookup is None:
        return None
    texts = recorded_texts(chain.from_iterable(lookup.texts.values()), lookup.match_lengths)
    base = replace(base, times=replace(base.times, looks_up=True))
    problems: list[MatchProblem] = []
    for match_class in lookup.classes:
        acceptance = drafted_acceptance(profile, match_class)
        drafted = replace(base, rates=acceptance.at_depth(len(base.rates) + 1, branching))
        looked_up = None
        if match_class.match_length > 0:
            looked_up = problems[-1].looked_up
            if looked_up_rates := looked_up_acceptance(match_class, acceptance):
                rates = looked_up_rates.at_depth(min(depth, MAX_RUN), branching)
                looked_up = replace(base, rates=rates)
        problems.append(MatchProblem(match_class.match_length, drafted, looked_up))
    return Recording(texts, problems) if texts else None


def _catch_up_seconds(trees: Sequence[TokenTree], times: StepTime) -> Floats:
    """Seconds in which the draft catches up with 0, 1, 2, ... unread tokens before each tree.

    Returns float64 [MAX_UNREAD + 1, trees].
    """
    all_passes = [tree.num_drafted_levels for tree in trees]
    seconds = {  # once for trees of as many passes: the replay asks for them again and again
        num_passes: [times.catch_up_seconds(n, num_passes) for n in range(MAX_UNREAD + 1)]
        for num_passes in set(all_passes)
    }
    return np.array([seconds[num_passes] for num_passes in all_passes]).T


def _looked_up_catch_up(catch_up: Floats, visits_by_run: Floats) -> tuple[float, ...]:
    """How many seconds the draft takes on average to catch up if 0, 1, 2, ... tokens are looked up.

    A step whose next r tokens are those of the lookup chain accepts r + 1 nodes at most.
    `catch_up` float64 [unread tokens]; `visits_by_run` float64 [runs].
    """
    num_accepted = np.arange(1, len(visits_by_run) + 1)
    num_unread = np.minimum.outer(np.arange(len(catch_up)), num_accepted)
    return tuple((catch_up[num_unread] @ _as_shares(visits_by_run)).tolist())


def _as_shares(counts: Floats) -> Floats:
    """Counts as shares of their sum."""
    return counts / max(counts.sum(), 1e-300)


def figures_by_kind(
    profile: Profile, trees: tuple[TokenTree, ...], recording: Recording
) -> dict[str, Any]:
    """Fields of a plan: predicted speed-ups over plain decoding, and tokens a step, by kind."""
    text_speedups: dict[str, tuple[float, ...]] = {}
    tokens_by_kind: dict[str, float] = {}
    lengths = [problem.match_length for problem in recording.problems]
    plain_seconds = recording.times.plain_seconds()

    def decode(texts: tuple[str, ...], ratios: Floats) -> DecodedAgain | None:
        """Decode texts again with these ratios; None if they are empty."""
        problems = [_for_kind(problem, ratios) for problem in recording.problems]
        of_kind = Recording(recorded_texts(texts, lengths), problems)
        return of_kind.decode(trees) if of_kind.texts else None

    for kind, (ratios, ratios_of_prompts) in ratios_by_kind(profile).items():
        texts = profile.lookup.texts.get(kind, ()) if profile.lookup else ()
        if together := decode(texts, ratios):
            # a step yields a token at least, and less is rounding
            tokens_by_kind[kind] = max(1.0, together.tokens_per_step)
            alone = map(decode, zip(texts), ratios_of_prompts)
            speedups = sorted(text.speed * plain_seconds for text in alone if text)
            text_speedups[kind] = tuple(speedups)
    return promised_figures({}, text_speedups) | {"tokens_by_kind": tokens_by_kind}


def _for_kind(problem: MatchProblem, ratios: Floats) -> MatchProblem:
    """A problem with the rates of drafted children times `ratios`, float64 [ranks], of a kind."""
    drafted = replace(problem.drafted, rates=rounded(scaled(problem.drafted.rates, ratios)))
    looked_up = problem.looked_up
    if looked_up is not None:
        rates = looked_up.rates.copy()
        rates[:, 1] = scaled(rates[:, 1], ratios)
        left = 1 - rates[:, 0, :1]  # of a node on the spine, after its looked-up child
        rates[:, 0, 1:] = scaled(rates[:, 0, 1:] / np.maximum(left, 1e-300), ratios) * left
        looked_up = replace(looked_up, rates=rounded(rates))
    return MatchProblem(problem.match_length, drafted, looked_up)
