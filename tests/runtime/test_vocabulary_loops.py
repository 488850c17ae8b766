"""The loops over rows on a CPU compute what tensor operations do, which other tests enumerate."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import normal

from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.compiled import vocabulary_loops as loops
from sequoia_plan.runtime.sampling import drawing, sampling
from sequoia_plan.runtime.verify import residual

VOCABULARIES = (1, 5, 511, 512, 513, 3000)


def hardly_any(logits):
    """Two tokens alone have a probability."""
    lowest = logits.topk(min(2, logits.shape[1])).values[:, -1:]
    return logits.where(logits >= lowest, -torch.inf)


KINDS = {
    "random": lambda logits: logits,
    "flat": torch.zeros_like,
    "peaked": lambda logits: 30 * logits,
    "few values": torch.round,
    "hardly any": hardly_any,
}


each_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def random_logits(seed, vocabulary, kind):
    """float32 [3, vocabulary]."""
    return KINDS[kind](4 * normal(3, vocabulary, seed=seed))


@pytest.fixture
def by_tensors(monkeypatch):
    """Let a function run without the loops."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            for module in (sampling, drawing, residual):
                patch.setattr(module, "loops_for", lambda _: None)
            return function(*arguments)

    return run


@each_vocabulary
@each_kind
@pytest.mark.parametrize(
    "settings",
    [
        Sampling(0.6),
        Sampling(1.3, top_p=0.9),
        Sampling(0.6, top_k=3),
        Sampling(0.6, top_k=1500),
        Sampling(2.0, top_p=0.5, top_k=20),
        Sampling(1.0, min_p=0.1),
    ],
    ids=repr,
)
def test_target_probs(vocabulary, kind, settings, by_tensors):
    logits = random_logits(1, vocabulary, kind)
    probs = settings.target_probs(logits)
    expected = by_tensors(settings.target_probs, logits)
    torch.testing.assert_close(probs, expected, rtol=2e-4, atol=1e-7)
    is_kept, is_expected = probs > 1e-30, expected > 1e-30
    assert (is_kept == is_expected).float().mean() > 0.999  # rounding moves where a sum ends
    other = Sampling(settings.temperature * 1.01, settings.top_p, settings.top_k, settings.min_p)
    if kind == "random" and vocabulary > 5 and settings.top_k != 3:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(probs, other.target_probs(logits), rtol=2e-4, atol=1e-7)


@each_vocabulary
@each_kind
def test_children_in_turn(vocabulary, kind, by_tensors):
    logits, settings = random_logits(2, vocabulary, kind), Sampling(0.8)
    count = min(5, vocabulary)
    bits = torch.empty(3, 2 * count, dtype=torch.int32).random_()
    probs, drawn = settings.draw_children(logits, count, bits)
    by_operations = by_tensors(drawing.in_turn, probs, count, bits)
    assert all(len(set(row)) == count for row in drawn.tolist())
    # a sum of 3,000 probabilities in another order may round to a neighbour
    assert (drawn == by_operations).float().mean() > 0.9
    if kind == "random" and vocabulary == 3000:
        others = by_tensors(drawing.in_turn, probs, count, bits.flip(1))
        assert (drawn == others).float().mean() < 0.9


@each_vocabulary
@each_kind
def test_top_tokens(vocabulary, kind):
    logits, count = random_logits(3, vocabulary, kind).nan_to_num(neginf=-9e9), min(4, vocabulary)
    expected = np.argsort(-logits.numpy(), kind="stable")[:, :count]
    assert drawing.most_probable(logits, count).tolist() == expected.tolist()


@given(st.integers(0, 999), st.sampled_from(VOCABULARIES))
def test_residual_masses(seed, vocabulary):
    generator = np.random.default_rng(seed)
    p, q = generator.dirichlet(np.full(vocabulary, 0.3), (2, 4)).astype(np.float32)
    c, e, masses = np.float32([0, 0.5, 1, 3]), np.float32([0, 0, 1e-3, 0]), np.empty(4, np.float32)
    loops.residual_masses(p, q, c, e, masses)
    expected = np.maximum(p.astype(float) - c[:, None] * q - e[:, None], 0).sum(-1)
    np.testing.assert_allclose(masses, expected, atol=1e-6)


def test_rows_that_are_not_finite_end():
    """A step reports them; the loops must neither fail nor read elsewhere."""
    for number in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((2, 700), number)
        logits[1, 3] = 1.0
        Sampling(0.6, 0.9, 5, 0.1).target_probs(logits)
        bits = torch.zeros(2, 6, dtype=torch.int32)
        for settings in (Sampling(), Sampling(0.6)):
            children = settings.draw_children(logits, 3, bits)[1]
            assert ((children >= 0) & (children < 700)).all()
