"""Sampling: draws and filtered probabilities are exactly what they are said to be."""

import math
import re

import numpy as np
import pytest
import torch
from architectures import tiny
from enumeration import chi_square, independent
from enumeration import without_replacement as drawn_orders
from refusals import refusal
from toys import normal
from transformers import GenerationConfig, TopPLogitsWarper

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.sampling import sampling
from sequoia_plan.runtime.sampling.drawing import (
    IN_TURN,
    INDEPENDENT,
    Drawing,
    in_turn_by_tensors,
    without_replacement,
)
from sequoia_plan.runtime.sampling.sampling import Sampling, top_p_filter

Q = [0.5, 0.3, 0.15, 0.05]


def draw(drawing, q, count):
    return drawing(torch.tensor([q]).repeat(60_000, 1), count, torch.Generator().manual_seed(0))


RACE = Drawing(without_replacement, bits_per_token=1)
TENSORS_IN_TURN = Drawing(lambda p, n, bits: in_turn_by_tensors(p, bits / 2**31), bits_per_child=1)


@pytest.mark.parametrize("drawing", [RACE, IN_TURN, TENSORS_IN_TURN])
@pytest.mark.parametrize("q", [Q, [0.7, 0.3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
def test_draws_have_the_distribution_without_replacement(drawing, q):
    probs = dict(drawn_orders(np.array(q), 3))
    assert chi_square(draw(drawing, q, 3), probs) > 1e-3
    if q == Q:  # the control: top-k in order of probability is not a draw
        assert chi_square(torch.tensor([[0, 1, 2]] * 60_000), probs) < 1e-9


def test_independent_draws_have_their_distribution():
    """With replacement, the joint probability of two draws is the product."""
    q = [0.5, 0.3, 0.2, 0.0]
    drawn = draw(INDEPENDENT, q, 2)
    assert chi_square(drawn, dict(independent(np.array(q), 2))) > 1e-3
    assert chi_square(drawn, dict(drawn_orders(np.array(q), 2))) == 0


@pytest.mark.parametrize("summands", [sampling.summands, sampling.whole_numbers])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_top_p_filter_is_transformers(scale, summands, monkeypatch):
    """Also in whole numbers, as on CUDA."""
    monkeypatch.setattr(sampling, "summands", summands)
    logits = scale * normal(20, 3000)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        expected = torch.softmax(TopPLogitsWarper(top_p)(None, logits), -1)
        torch.testing.assert_close(top_p_filter(torch.softmax(logits, -1), top_p), expected)


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_are_those_of_transformers_generate(settings):
    """The probabilities are those that `generate` reports for the same config."""
    config = GenerationConfig(**({"top_k": 0} | settings), do_sample=True)
    returned = dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)
    ids = torch.arange(24).view(6, 4)
    output = tiny("Llama").generate(ids, config, max_new_tokens=1, **returned)
    ours = Sampling.from_generation_config(config)
    expected = torch.softmax(output.scores[0], -1)
    torch.testing.assert_close(ours.target_probs(output.logits[0]), expected)
    assert ours == Sampling(**({"temperature": 1.0} | settings))


def test_a_generation_config_that_does_not_sample_is_greedy():
    unused = GenerationConfig(temperature=0.7, top_p=0.9)
    assert Sampling.from_generation_config(unused) == Sampling()
    neutral = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, num_beams=1, typical_p=1.0)
    config = GenerationConfig(**neutral, do_sample=True)
    assert Sampling.from_generation_config(config) == Sampling(1.0)


REFUSED = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "min_new_tokens": 4,
    "guidance_scale": 2.0,
    "typical_p": 0.9,
    "suppress_tokens": [3],
    "num_beams": 4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_generation_config_that_cannot_be_honoured_is_refused_by_name(name):
    config = GenerationConfig(do_sample=True)
    setattr(config, name, REFUSED[name])
    with refusal(f"^{name}: found", ArgumentError):
        Sampling.from_generation_config(config)


def test_the_drafts_temperature_is_its_own():
    logits = normal(2, 5)
    shared = Sampling(0.5)
    separate = Sampling(0.5, top_p=0.5, draft_temperature=2.0)
    torch.testing.assert_close(shared.draft_probs(logits), torch.softmax(logits / 0.5, -1))
    torch.testing.assert_close(separate.draft_probs(logits), torch.softmax(logits / 2.0, -1))
    lowest = Sampling(1.0, draft_temperature=1e-30).draft_probs(logits)
    assert lowest.equal(torch.nn.functional.one_hot(logits.argmax(-1), 5).float())


# with a temperature of 1e-31 logits are infinite, and such a mass is 0 in float32
IMPOSSIBLE = {
    "temperature": (-1.0, math.nan, math.inf, 1e31, "warm", 1e-31),
    "draft_temperature": (0.0, 1e-31, 1e31, math.nan),
    "top_p": (0.0, 1.1, 1e-31),
    "top_k": (-1, 2.5),
    "min_p": (1.5, None),
    "verifier": ("eagle",),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]]
)
def test_impossible_settings(name, value):
    with refusal(re.escape(f"{name}: found {value!r}"), ArgumentError):
        Sampling(**({"temperature": 1.0} | {name: value}))
