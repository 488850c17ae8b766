"""Sampling: draws and filtered probabilities are exactly what they are said to be."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, TopPLogitsWarper

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.base.drawing import INDEPENDENT, WITHOUT_REPLACEMENT
from sequoia_plan.runtime.base.sampling import Sampling, top_p_filter


def ordered_draws(q, count):
    """Exact probabilities of ordered draws without replacement, uniform once q is exhausted."""
    probs = {}
    for order in itertools.permutations(range(len(q)), count):
        p, remaining, undrawn = 1.0, list(q), [1.0] * len(q)
        for token in order:
            weights = remaining if sum(remaining) > 0 else undrawn
            p *= weights[token] / sum(weights)
            remaining[token] = undrawn[token] = 0.0
        if p > 0:
            probs[order] = p
    return probs


def chi_square(drawn, probs):
    """p-value of the drawn orders under `probs`; 0 if an order of probability 0 was drawn."""
    counts = dict.fromkeys(probs, 0)
    for order in map(tuple, drawn.tolist()):
        if order not in counts:
            return 0.0
        counts[order] += 1
    return chisquare([*counts.values()], [p * len(drawn) for p in probs.values()]).pvalue


@pytest.mark.parametrize("q", [[0.5, 0.3, 0.15, 0.05], [0.7, 0.3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
def test_draws_have_the_distribution_without_replacement(q):
    generator = torch.Generator().manual_seed(0)
    drawn = WITHOUT_REPLACEMENT(torch.tensor([q]).repeat(60_000, 1), 3, generator)
    assert chi_square(drawn, ordered_draws(q, 3)) > 1e-3


def test_top_k_in_order_of_probability_fails_the_same_test():
    """Negative control: deterministic top-k is not a draw."""
    q = [0.5, 0.3, 0.15, 0.05]
    drawn = torch.tensor([q]).repeat(60_000, 1).topk(3).indices
    assert chi_square(drawn, ordered_draws(q, 3)) < 1e-9


def test_independent_draws_have_their_distribution():
    """With replacement, the joint probability of two draws is the product."""
    q = [0.5, 0.3, 0.2, 0.0]
    drawn = INDEPENDENT(torch.tensor([q]).repeat(60_000, 1), 2, torch.Generator().manual_seed(0))
    pair_probs = {(a, b): q[a] * q[b] for a in range(3) for b in range(3)}
    assert chi_square(drawn, pair_probs) > 1e-3
    assert chi_square(drawn, ordered_draws(q, 2)) == 0


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_top_p_filter_is_transformers(top_p, scale):
    logits = (
        torch.randn(20, 3000, generator=torch.Generator().manual_seed(2)) * scale
    )  # without ties
    expected = torch.softmax(TopPLogitsWarper(top_p)(None, logits), -1)
    torch.testing.assert_close(top_p_filter(torch.softmax(logits, -1), top_p), expected)


def test_top_p_filter_keeps_ties_together():
    probs = torch.tensor(
        [[0.4, 0.2, 0.2, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2], [1.0, 0.0, 0.0, 0.0, 0.0]]
    )
    expected = torch.tensor(
        [[0.5, 0.25, 0.25, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], [1.0, 0.0, 0.0, 0.0, 0.0]]
    )
    torch.testing.assert_close(top_p_filter(probs, 0.5), expected)


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 500, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_are_those_of_transformers_generate(settings):
    """The probabilities are those that `generate` reports for the same config."""
    torch.manual_seed(0)
    size = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=300,
    )
    model = LlamaForCausalLM(LlamaConfig(**size, initializer_range=1.0)).eval()
    config = GenerationConfig(
        **({"top_k": 0} | settings),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = torch.randint(300, (6, 4))
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, pad_token_id=0
    )
    sampling = Sampling.from_generation_config(
        GenerationConfig(do_sample=True, **({"top_k": 0} | settings))
    )
    expected = torch.softmax(output.scores[0], -1)
    torch.testing.assert_close(sampling.target_probs(output.logits[0]), expected)
    assert sampling == Sampling(**({"temperature": 1.0} | settings))


def test_a_generation_config_that_does_not_sample_is_greedy():
    assert Sampling.from_generation_config(GenerationConfig()).greedy
    unused = GenerationConfig(temperature=0.7, top_p=0.9)
    assert Sampling.from_generation_config(unused) == Sampling()
    neutral = dict(
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
        num_beams=1,
        typical_p=1.0,
        epsilon_cutoff=0.0,
    )
    config = GenerationConfig(**neutral, do_sample=True)
    assert Sampling.from_generation_config(config) == Sampling(1.0)


REFUSED = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "sequence_bias": {(5,): 1.0},
    "min_new_tokens": 4,
    "exponential_decay_length_penalty": (5, 1.1),
    "begin_suppress_tokens": [3],
    "guidance_scale": 2.0,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "suppress_tokens": [3],
    "num_beams": 4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_generation_config_that_cannot_be_honoured_is_refused_by_name(name):
    config = GenerationConfig(do_sample=True)
    setattr(config, name, REFUSED[name])
    with pytest.raises(ArgumentError, match=f"^{name}: found"):
        Sampling.from_generation_config(config)


def test_the_drafts_temperature_is_its_own():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    shared = Sampling(0.5)
    separate = Sampling(0.5, top_p=0.5, draft_temperature=2.0)
    torch.testing.assert_close(shared.draft_probs(logits), torch.softmax(logits / 0.5, -1))
    torch.testing.assert_close(separate.draft_probs(logits), torch.softmax(logits / 2.0, -1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature: found -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "warm"}, "temperature: found 'warm', expected a number"),
        ({"min_p": None}, "min_p: found None"),
        ({"top_p": 0.0}, "top_p: found 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k: found -1"),
        ({"top_k": 2.5}, "top_k: found 2.5"),
        ({"min_p": 1.5}, "min_p: found 1.5"),
        ({"draft_temperature": 0.0}, "draft_temperature: found 0.0"),
        ({"verifier": "eagle"}, "verifier: found 'eagle', expected sequoia, traversal"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ArgumentError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("name", ["temperature", "top_p", "draft_temperature"])
@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-31, 1e-300])
def test_what_float32_cannot_hold_is_refused(name, value):
    """With such a temperature logits are infinite, and such a mass is 0."""
    with pytest.raises(ArgumentError, match=rf"{name}: found {value}, expected .*1e-30"):
        Sampling(**({"temperature": 1.0} | {name: value}))
    lowest = Sampling(**({"temperature": 1.0} | {name: 1e-30}))
    logits = torch.tensor([[1.0, 30.0, -50.0, 29.9]])
    is_draft = name == "draft_temperature"
    probs = lowest.draft_probs(logits) if is_draft else lowest.target_probs(logits)
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", ["temperature", "draft_temperature"])
def test_a_temperature_without_end_is_refused(name):
    for value in (1e31, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match=f"{name}: found {value}".replace("+", r"\+")):
            Sampling(**({"temperature": 1.0} | {name: value}))
