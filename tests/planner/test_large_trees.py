"""Acceptance as a large tree meets it: counted on the text that it wrote, deep levels included."""

import numpy as np
import pytest
from toys import PROMPTS, toy_pair

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.acceptance import DEEP_TRIALS, FIRST_DEEP_LEVEL, estimate
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner import solve
from sequoia_plan.profiler.measure import measure_acceptance
from sequoia_plan.profiler.observed import (
    LEVELS,
    MAX_LEVELS,
    TREE,
    acceptance_ratio,
    max_children_by_level,
    num_counted_levels,
)
from sequoia_plan.runtime import Sampling

pytestmark = pytest.mark.slow
WIDE = solve([0.5, 0.2, 0.1, 0.05], budget=24, depth=8).tree
"""24 nodes on seven levels."""


def observe(pair, tree, tokens, sampling=None, prompts=PROMPTS, **options):
    """What is counted on texts that a tree writes."""
    sampling = sampling or Sampling(1.0, verifier="sequoia")
    options |= {"precision": 0, "tokens_per_prompt": tokens, "tree": tree}
    return measure_acceptance(pair, prompts, sampling, **options)


def by_level(observed):
    """The rates of both node classes together, as a profile of the counts has them."""
    return Acceptance.counted(observed.totals()).with_one_class().rates


def test_the_promise_for_the_tree_that_wrote_is_what_it_yielded():
    """Where all nodes of a level have as many children, this is an identity at temperature 0.

    The counts of the small tree (the control), whose steps begin elsewhere, promise something else.
    """
    tree = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 2])
    own, small = (observe(toy_pair(noise=1.5), writer, 120, Sampling()) for writer in (tree, None))
    assert own.trials.shape[1] == num_counted_levels(tree) == max(LEVELS, tree.depth - 1)
    # each text ends on the root of a further step, whose tokens were not decoded
    num_steps = own.trials[:, 0].sum()
    tokens_per_step = own.trials.sum() / num_steps
    slack = len(PROMPTS) * tokens_per_step / num_steps
    assert expected_tokens(tree, by_level(own)) == pytest.approx(tokens_per_step, abs=slack)
    assert abs(expected_tokens(tree, by_level(small)) - tokens_per_step) > slack


def test_ratios_of_deep_levels_are_taken_together():
    reached = np.array([[8.0, 4, 2, 1, 0.5, 0.25], [8, 4, 3, 2, 1.5, 1]])
    deep = ((2 + 1.5 + 1) / (3 + 2 + 1.5)) / (1.75 / 3.5)
    assert acceptance_ratio(reached, 3) == pytest.approx([1, (3 / 4) / (2 / 4), deep])
    assert acceptance_ratio(reached, 7).tolist()[5:] == [1, 1]  # nothing is below the last level
    assert max_children_by_level(TokenTree.chain(MAX_LEVELS + 5)).tolist() == [1] * MAX_LEVELS
    assert max_children_by_level(TokenTree.star(6)).tolist() == [6, 0, 0, 0]


def test_deep_levels_are_moved_towards_what_they_have_in_common():
    """By as much as their trials are few; the first four levels stay as counted."""
    trials = np.array([900.0, 400, 200, 100, 10_000, 20, 0])
    accepted = trials[:, None] * np.array([[0.5], [0.4], [0.6], [0.5], [0.9], [0.0], [0.0]])
    rates = estimate(trials[:, None], accepted[:, None])[:, 0, 0]
    together = accepted[FIRST_DEEP_LEVEL:].sum() / trials[FIRST_DEEP_LEVEL:].sum()
    assert rates[:4].tolist() == [0.5, 0.4, 0.6, 0.5]
    moved = DEEP_TRIALS * together / (20 + DEEP_TRIALS)
    assert rates[4:] == pytest.approx([0.9, moved, together], abs=0.001)
    # no count off the spine stays none: both node classes have one vector
    split = [np.stack([counts, 0 * counts], 1) for counts in (trials, accepted)]
    assert estimate(*split)[:, 0, 0].tolist() == rates.tolist()


def test_a_text_that_another_tree_wrote_is_other_work(tmp_path):
    """An interrupted measurement goes on with the same tree only."""
    trials = [
        observe(toy_pair(), tree, 12, prompts=PROMPTS[:2], journal=tmp_path / "journal").trials
        for tree in (WIDE, WIDE, TREE, None)
    ]
    assert np.array_equal(trials[0], trials[1]) and np.array_equal(trials[2], trials[3])
    assert trials[0].shape != trials[2].shape
