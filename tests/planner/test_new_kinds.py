"""The interval for prompts of a kind that was not profiled, in simulations."""

from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import t as student

from sequoia_plan.artifacts import Acceptance, Profile
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.uncertainty import Z95, student95
from sequoia_plan.planner import solve
from sequoia_plan.profiler.observed import LEVELS, ObservedAcceptance


def profile_of_kinds(rng, kinds, prompts):
    """A profile of some kinds with some prompts each, and the acceptance of one further kind.

    The acceptance of every kind, and of every prompt within it, differs by a normally distributed
    shift of its logits. The further kind's rates are those in a sample of as many prompts, and
    their expectation.
    """
    trials = np.array([15, 10, 0, 0])
    kind_logits = rng.normal(0.2, 0.4, kinds + 1)

    def acceptance(logits):
        first_child = 0.7 / (1 + np.exp(-logits))
        return np.stack([first_child, 0.3 / 0.7 * first_child], -1)

    logits = kind_logits[:, None] + rng.normal(0, 0.6, (kinds + 1, prompts))
    probs = np.repeat(acceptance(logits)[:, :, None], LEVELS, 2)
    probs = np.concatenate([probs, 1 - probs.sum(-1, keepdims=True)], -1)
    counts = rng.multinomial(trials, probs)[..., :2].astype(float)
    observed = ObservedAcceptance(
        np.tile(trials, (kinds * prompts, 1))[..., None],
        counts[:-1].reshape(-1, LEVELS, 1, 2),
    )
    names = [f"kind {number}" for number in range(kinds) for _ in range(prompts)]
    profile = Profile(
        Acceptance.counted(observed.totals()),
        observed.effective_trials(),
        kinds=observed.by_kind(names),
    )
    sample = counts[-1, :, :2].sum(0) / (prompts * trials[:2, None])
    prompt_shifts = [0.6 * NormalDist().inv_cdf((i + 0.5) / 400) for i in range(400)]
    expectation = acceptance(kind_logits[-1] + np.array(prompt_shifts)).mean(0)
    return profile, sample[:, None], expectation[None, None]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [4, 8])
def test_the_interval_for_a_new_kind_covers_one(kinds):
    """It holds the sample of a further kind in 95 % of the cases, its expectation no less often.

    The interval for prompts like the profiled ones (a control) holds neither, and with normal
    quantiles in place of Student's (another control) four kinds are too few.
    """
    rng, is_held = np.random.default_rng(kinds), []
    for _ in range(300):
        profile, *further_kind = profile_of_kinds(rng, kinds, 6)
        tree = solve(profile, budget=6, depth=4).tree
        plan, factor = tree.plan, Z95 / student95(kinds - 1)
        wide = np.array(plan.interval_new_kind.expected_tokens)
        normal = plan.expected_tokens + (wide - plan.expected_tokens) * factor
        tokens = [expected_tokens(tree, rates) for rates in further_kind]
        intervals = (wide, plan.interval.expected_tokens, normal)
        is_held.append([low <= value <= high for low, high in intervals for value in tokens])
    wide, wide_expected, narrow, narrow_expected, normal, _ = np.mean(is_held, 0)
    assert wide == pytest.approx(0.95, abs=0.035) and wide <= wide_expected
    assert max(narrow, narrow_expected) < 0.7
    assert normal < (0.9 if kinds == 4 else 0.94)


def test_student95_is_the_quantile():
    exact = student.ppf(0.975, np.arange(3, 64))
    assert [student95(n) for n in range(3, 64)] == pytest.approx(exact, rel=2e-3)
