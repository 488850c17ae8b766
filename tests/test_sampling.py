"""Sampling: laws that are exactly what they say."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import TopPLogitsWarper

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.sampling import Sampling, draw_without_replacement, nucleus


def ordered_draws(q, count):
    """The exact law of draws without replacement, uniform once q is exhausted."""
    law = {}
    for order in itertools.permutations(range(len(q)), count):
        p, left, free = 1.0, list(q), [1.0] * len(q)
        for token in order:
            weights = left if sum(left) > 0 else free
            p *= weights[token] / sum(weights)
            left[token] = free[token] = 0.0
        if p > 0:
            law[order] = p
    return law


def chi_square(drawn, law):
    """p-value of the drawn orders under `law`; 0 if something impossible was drawn."""
    counts = dict.fromkeys(law, 0)
    for order in map(tuple, drawn.tolist()):
        if order not in counts:
            return 0.0
        counts[order] += 1
    return chisquare([*counts.values()], [p * len(drawn) for p in law.values()]).pvalue


@pytest.mark.parametrize("q", [[0.5, 0.3, 0.15, 0.05], [0.7, 0.3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
def test_draws_follow_the_law_without_replacement(q):
    generator = torch.Generator().manual_seed(0)
    drawn = draw_without_replacement(torch.tensor([q]).repeat(60_000, 1), 3, generator)
    assert chi_square(drawn, ordered_draws(q, 3)) > 1e-3


def test_top_k_in_order_of_probability_fails_the_same_test():
    """Negative control: deterministic top-k is not a draw."""
    q = [0.5, 0.3, 0.15, 0.05]
    assert chi_square(torch.tensor([q]).repeat(60_000, 1).topk(3).indices, ordered_draws(q, 3)) < 1e-9


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_nucleus_is_transformers(top_p):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 3
    theirs = torch.softmax(TopPLogitsWarper(top_p)(None, logits), -1)
    torch.testing.assert_close(nucleus(torch.softmax(logits, -1), top_p), theirs)


@pytest.mark.parametrize(
    ("settings", "message"), [((-1.0,), "temperature: found -1.0"), ((float("nan"),), "temperature"), ((1.0, 0.0), "top_p: found 0.0"), ((1.0, 1.1), "top_p")]
)
def test_impossible_settings(settings, message):
    with pytest.raises(ArgumentError, match=message):
        Sampling(*settings)
