"""Recorded texts, decoded again on paper with trees by match.

The shares of classes of match depend on the trees, and so do the looked-up tokens that steps come
upon, and the tokens that the draft has to catch up with. The recorded texts of a profile give all
three for any trees (replay.py).

A kind of prompts differs from the others in its texts, and in how often drafted children are
accepted. A profile has the texts by kind, and the counts by kind over all classes of match. So the
probability of a drafted child in a class is that of the class times what the kind has in place of
all prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, Counts, Profile, TokenTree
from sequoia_plan.artifacts.acceptance import rounded
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.lookup import LookupCounts
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.match.acceptance import (
    MIN_TRIALS,
    drafted_acceptance,
    looked_up_acceptance,
    looked_up_as_visited,
)
from sequoia_plan.planner.solving.match.portfolio import (
    MatchProblem,
    step_figures,
    tokens_per_second,
)
from sequoia_plan.planner.solving.match.replay import RecordedText, recorded_texts, replay

MIN_SHARE = 1e-4
"""A class that never came up counts as if it had this share of steps: it has a tree as well."""
MAX_UNREAD = 64
"""Tokens that the draft may leave unread; it then reads them in any case."""


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
    tokens_per_step: float


@dataclass(frozen=True)
class Recording:
    """What a profile recorded for decoding again on paper: one text at least."""

    texts: Sequence[RecordedText]
    problems: Sequence[MatchProblem]
    times: StepTime

    def decode(self, trees: tuple[TokenTree, ...]) -> DecodedAgain:
        """Decode the recorded texts again with the tree of each class of match."""
        pairs = zip(self.problems, trees, strict=True)
        result = replay(self.texts, trees, [problem.acceptance(tree) for problem, tree in pairs])
        problems = []
        for c, problem in enumerate(self.problems):
            visits = result.visits_by_run[c]
            catch_up = _catch_up(result.transitions[c], trees, self.times)
            looked_up = problem.looked_up and looked_up_as_visited(problem.looked_up, visits)
            problems.append(
                replace(
                    problem,
                    looked_up=looked_up,
                    catch_up=catch_up,
                    looked_up_catch_up=_looked_up_catch_up(catch_up, visits),
                )
            )
        shares = np.maximum(result.shares, MIN_SHARE)
        shares /= shares.sum()
        figures = step_figures(problems, trees, self.times)
        figures[:, 0] = result.tokens_per_step
        speed = tokens_per_second(shares, figures)
        return DecodedAgain(trees, shares, problems, speed, result.tokens_per_step)


def _catch_up(
    steps_after: Floats, trees: Sequence[TokenTree], times: StepTime
) -> tuple[float, ...]:
    """How many seconds the draft takes on average to catch up if 0, 1, 2, ... tokens are unread.

    `steps_after` float64 [classes].
    """
    seconds = [
        [times.catch_up_seconds(num_unread, tree) for tree in trees]
        for num_unread in range(MAX_UNREAD + 1)
    ]
    return tuple((np.array(seconds) @ _as_shares(steps_after)).tolist())


def _looked_up_catch_up(catch_up: Sequence[float], visits_by_run: Floats) -> tuple[float, ...]:
    """How many seconds the draft takes on average to catch up if 0, 1, 2, ... tokens are looked up.

    A step whose next r tokens are those of the lookup chain accepts r + 1 nodes at most.
    `visits_by_run` float64 [runs].
    """
    num_accepted = np.arange(1, len(visits_by_run) + 1)
    num_unread = np.minimum.outer(np.arange(len(catch_up)), num_accepted)
    return tuple((np.array(catch_up)[num_unread] @ _as_shares(visits_by_run)).tolist())


def _as_shares(counts: Floats) -> Floats:
    """Counts as shares of their sum."""
    shares: Floats = counts / max(counts.sum(), 1e-300)
    return shares


def figures_by_kind(
    profile: Profile, tree: TokenTree, recording: Recording
) -> dict[str, dict[str, Any]]:
    """The plan's speed-ups over plain decoding and tokens a step by kind of profiled prompts."""
    figures: dict[str, dict[str, Any]]
    figures = {name: {} for name in ("speedup_by_kind", "tokens_by_kind", "text_speedups")}
    lookup, counts = profile.lookup, profile.acceptance.counts
    assert lookup is not None
    trees = tuple(tree.for_match(problem.match_length) for problem in recording.problems)
    plain_seconds = recording.times.plain_seconds()
    for kind, texts in lookup.texts.items():
        kind_texts = recorded_texts(LookupCounts(lookup.classes, {kind: texts}))
        if kind_texts and counts and kind in profile.kinds:
            ratios = _acceptance_ratios(profile.kinds[kind], counts)
            of_kind = [_for_kind(problem, ratios) for problem in recording.problems]
            together, *alone = (
                Recording(texts, of_kind, recording.times).decode(trees)
                for texts in (kind_texts, *([text] for text in kind_texts))
            )
            figures["speedup_by_kind"][kind] = together.speed * plain_seconds
            # a step yields a token at least, and less is rounding
            figures["tokens_by_kind"][kind] = max(1.0, together.tokens_per_step)
            speedups = sorted(text.speed * plain_seconds for text in alone)
            figures["text_speedups"][kind] = tuple(speedups)
    return figures


def _acceptance_ratios(kind: Counts, counts: Counts) -> Floats:
    """How many times as often a kind accepts the child of each rank, float64 [ranks].

    `MIN_TRIALS` more trials that are as all prompts keep ratios of few counts near 1.
    """
    expected = counts.accepted.sum((0, 1)) / counts.trials.sum()
    kind_counts, kind_trials = kind.accepted.sum((0, 1)), kind.trials.sum()
    kind_rates = (kind_counts + MIN_TRIALS * expected) / (kind_trials + MIN_TRIALS)
    ratios: Floats = np.where(expected > 0, kind_rates / np.maximum(expected, 1e-300), 1.0)
    return ratios


def _for_kind(problem: MatchProblem, ratios: Floats) -> MatchProblem:
    """The problem with a kind's drafted children; looked-up tokens come from its texts."""

    def scaled(rates: Floats) -> Floats:
        """The rates [..., ranks] times the ratios, with sums of at most 1."""
        result = rates * ratios[: rates.shape[-1]]
        return result / np.maximum(1.0, result.sum(-1, keepdims=True))

    drafted = Acceptance(rounded(scaled(problem.drafted.rates)))
    looked_up = problem.looked_up
    if looked_up is not None:
        rates = looked_up.rates.copy()
        rates[:, 1] = scaled(rates[:, 1])
        left = 1 - rates[:, 0, :1]  # of a node on the spine, after its looked-up child
        rates[:, 0, 1:] = scaled(rates[:, 0, 1:] / np.maximum(left, 1e-300)) * left
        looked_up = Acceptance(rounded(rates))
    return replace(problem, drafted=drafted, looked_up=looked_up)
