"""Trees by match on each kind of prompts: the kind's recorded texts, decoded again on paper.

A kind differs from the others in its texts, and in how often drafted children are accepted. A
profile has the texts by kind, and the counts by kind over all classes of match. So the probability
of a drafted child in a class is that of the class times what the kind has in place of all prompts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, Counts, Profile, TokenTree
from sequoia_plan.artifacts.acceptance import rounded
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.lookup import LookupCounts
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.match.acceptance import MIN_TRIALS
from sequoia_plan.planner.solving.match.portfolio import MatchProblem
from sequoia_plan.planner.solving.match.recorded import Recording, counted_shares, match_problems
from sequoia_plan.planner.solving.match.replay import recorded_texts


def figures_by_kind(
    profile: Profile, tree: TokenTree, times: StepTime
) -> dict[str, dict[str, Any]]:
    """The plan's speed-ups over plain decoding and tokens a step by kind of profiled prompts."""
    lookup, counts = profile.lookup, profile.acceptance.counts
    figures: dict[str, dict[str, Any]]
    figures = {name: {} for name in ("speedup_by_kind", "tokens_by_kind", "text_speedups")}
    if lookup is None or counts is None:
        return figures
    problems, shares = match_problems(profile), counted_shares(lookup)
    trees = tuple(tree.for_match(problem.match_length) for problem in problems)
    plain_seconds = times.plain_seconds()
    for kind, texts in lookup.texts.items():
        kind_texts = recorded_texts(LookupCounts(lookup.classes, {kind: texts}))
        if kind_texts and kind in profile.kinds:
            ratios = _acceptance_ratios(profile.kinds[kind], counts)
            of_kind = [_for_kind(problem, ratios) for problem in problems]
            together, *alone = (
                Recording(texts, shares, of_kind, times).decode(trees)
                for texts in (kind_texts, *([text] for text in kind_texts))
            )
            figures["speedup_by_kind"][kind] = together.speed * plain_seconds
            # a step yields a token at least, and less is rounding
            figures["tokens_by_kind"][kind] = max(1.0, together.tokens_per_step or 1.0)
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
