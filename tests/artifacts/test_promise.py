"""Promises for prompts of profiled kinds and of new ones, in simulations."""

import numpy as np
import pytest
from scipy.stats import t as student

from sequoia_plan.artifacts.promise import interval_of_new_kind, promise, student95, weighted_median


def drawn(rng, sizes, centres):
    """Speed-ups of so many prompts of each kind."""
    return {
        f"kind {i}": np.exp(rng.normal(centre, 0.25, size)).tolist()
        for i, (size, centre) in enumerate(zip(sizes, centres, strict=True))
    }


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[2] * 8, [1, 3, 9, 30]], ids=str)
def test_intervals_hold_what_is_measured_on_other_prompts(sizes):
    """For each kind, all together, and a new kind; of a tenth of the width (a control) far less."""
    rng, held = np.random.default_rng(0), []
    for _ in range(120):
        centres = rng.normal(0.5, 0.3, len(sizes) + 1)
        profiled, measured = (drawn(rng, sizes, centres[:-1]) for _ in range(2))
        chosen = [[kind] * len(values) for kind, values in profiled.items()]
        new = np.median(drawn(rng, [8], centres[-1:])["kind 0"])
        pairs = [(interval_of_new_kind(profiled), new)]
        for names in (*chosen, [kind for of_kind in chosen for kind in of_kind]):
            value = np.median(np.concatenate([measured[kind] for kind in dict.fromkeys(names)]))
            pairs.append((promise(profiled, names)[1], value))
        held.append(
            [
                [np.log(low) < middle + (np.log(value) - middle) / factor < np.log(high)]
                for factor in (1, 0.1)
                for (low, high), value in pairs
                for middle in [np.log(low * high) / 2]
            ]
        )
    shares = np.mean(held, 0).reshape(2, -1)
    assert (shares[0] > 0.87).all() and shares[0].mean() == pytest.approx(0.95, abs=0.04)
    assert (shares[1] < 0.5).all()


def test_a_promise_is_a_median_in_which_each_prompt_has_its_kind():
    values = {"copy": (2.0, 3.0), "chat": (1.2, 1.4, 5.0)}
    for names, median in (
        (["chat"], 1.4),
        (["copy"], 6**0.5),
        (["copy", "chat"], 2.0),  # 1.2 and 1.4 are less than half of both kinds' prompts
        (["chat", "chat", "chat", "copy"], (1.4 * 2.0) ** 0.5),  # they are just half of these
    ):
        assert promise(values, names) == (pytest.approx(median), None)  # five prompts are too few
    many = values | {"more": (1.0, 1.1, 1.2)}
    low, high = promise(many, ["chat"])[1]
    assert low < 1.2 < 1.4 < high
    assert interval_of_new_kind(many) is None
    assert weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1, 1, 0.5])) == 2.0


def test_student95_is_the_quantile():
    exact = student.ppf(0.975, np.arange(3, 64))
    assert [student95(n) for n in range(3, 64)] == pytest.approx(exact, rel=2e-3)
