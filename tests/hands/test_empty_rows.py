"""Rows with nothing left after a mask: logits to draw from, filters' edges, and attention."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from enumeration import chi_square, without_replacement
from hypothesis import given
from hypothesis import strategies as st
from scripted import Scripted, error_of_a_step

from drafts import KINDS, small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.base import sampling as sampling_module
from sequoia_plan.runtime.draft.drafter import DraftPass, draw_children
from sequoia_plan.runtime.models.loaded_model import ForwardOutput
from sequoia_plan.runtime.step import TreeStep

INF = float("inf")
SPINE = TokenTree(TokenTree.from_parents([-1, 0, 0, 1, 1]).parents, looks_up=True)
LOOKUP = TokenTree(TokenTree.chain(2).parents, by_match={1: SPINE})
LEFT = [("token", "token"), ("other", "other"), ("both", "token"), ("ties", "ties")]


def leave(decoder, left, monkeypatch):
    """Let the draft's logits, of each row in turn, be finite for the token that is looked up, for
    another one, or for both alone; or let all be equal."""
    drafter, sequence = decoder.step.drafter, decoder.step.sequence
    forward = drafter.forward

    def masked_forward(draft_pass, *args):
        output = forward(draft_pass, *args)
        looked_up = draft_pass.looked_up
        logits, children = output.logits.clone(), {}
        if looked_up is not None:
            children = dict(zip(*looked_up.tolist(), strict=True))
        for row, name in enumerate(left[: len(logits)]):
            child = sequence.length + children.get(row, 0)
            own_tokens = torch.arange(len(logits[0])) if drafter.d2t is None else drafter.d2t
            token = own_tokens == sequence.tokens[child]
            if not token.any():  # the draft lacks it
                token[0] = True
            other = torch.arange(len(token)) == token.int().argmin()
            kept = {"token": token, "other": other, "both": token | other, "ties": token | True}
            filler = logits[row] if name != "ties" else torch.zeros_like(logits[row])
            logits[row] = filler.masked_fill(~kept[name], -INF)
        return ForwardOutput(logits, output.hidden_states)

    monkeypatch.setattr(drafter, "forward", masked_forward)


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
@pytest.mark.parametrize(
    ("kind", "filters"),
    [
        ("language model", {}),
        ("EAGLE-3", {}),
        ("EAGLE-3", {"top_k": 1}),
        ("DFlash", {"top_p": 0.5, "min_p": 0.3}),
    ],
    ids=str,
)
def test_a_step_is_exact_whatever_the_draft_leaves(kind, filters, verifier, monkeypatch):
    """By enumeration: siblings of a looked-up token that has all of the draft's mass, or none."""
    decoder = SequoiaDecoder(*small_pair(kind, 3), LOOKUP)
    right = Scripted(1.0, verifier=verifier, **filters)
    wrong = Scripted(1.0, verifier=verifier, told=lambda probs: 0.6 * probs + 0.4 * (probs == 0))
    errors = {right: [], wrong: []}
    for left, sampling in itertools.product(LEFT, errors):
        with monkeypatch.context() as patch:
            leave(decoder, left, patch)
            errors[sampling].append(error_of_a_step(decoder, [2, 1, 2, 0, 1, 2], sampling))
    assert max(errors[right]) < 1e-6
    assert max(errors[wrong]) > 1e-3, "the control: verified as if all tokens could be drawn"


def drawn_pairs(logits, looked_up, count=6000):
    """Ordered pairs of siblings of a looked-up token, int64 [count, 2]."""
    tokens = torch.zeros(3 * count, dtype=torch.long)
    tokens[0] = looked_up
    rows = torch.arange(2 * count)
    draft_pass = DraftPass(
        rows,
        rows,
        rows,
        count,
        2,
        rows,
        1 + rows,
        looked_up=torch.stack([rows[:count], 0 * rows[:count]]),
    )
    bits = torch.empty(count, len(logits), dtype=torch.int32)
    bits.random_(generator=torch.Generator().manual_seed(0))
    draw_children(
        SimpleNamespace(vocabulary=len(logits), d2t=None),
        draft_pass,
        torch.tensor(logits).repeat(count, 1),
        SimpleNamespace(tokens=tokens, length=torch.zeros(1, dtype=torch.long)),
        1 + rows,
        Sampling(1.0),
        bits,
    )
    return tokens[1 : 1 + 2 * count].view(count, 2)


@pytest.mark.parametrize(
    ("logits", "first_probs"),
    [
        ([-INF, 1.0, -INF, -INF], [1 / 3, 0, 1 / 3, 1 / 3]),
        ([2.0, 1.0, -INF, -INF], [1, 0, 0, 0]),
        ([0.0, 9.0, 0.0, 0.0], [1 / 3, 0, 1 / 3, 1 / 3]),
        ([0.0, -INF, -INF, np.log(3)], [1 / 4, 0, 0, 3 / 4]),
    ],
)
def test_siblings_of_a_looked_up_token_have_their_distribution(logits, first_probs):
    """Token 1 is looked up. Where the draft has no token left, the rest are drawn uniformly."""
    others, drawn = [0, 2, 3], drawn_pairs(logits, 1)
    orders = without_replacement(np.array(first_probs)[others], 2)
    probs = {tuple(others[place] for place in order): chance for order, chance in orders}
    assert chi_square(drawn, probs) > 1e-3
    skewed = np.array([*probs.values()]) * np.linspace(0.8, 1.2, len(probs))
    control = dict(zip(probs, skewed / skewed.sum(), strict=True))
    assert chi_square(drawn, control) < 1e-6, "the control"


@given(
    st.lists(st.sampled_from([-INF, -30.0, -1.0, 0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=9),
    st.sampled_from([1e-30, 0.3, 1.0, 1e30]),
    st.integers(0, 10),
    st.sampled_from([1e-30, 0.23, 0.61, 0.997, 1.0]),
    st.sampled_from([0.0, 0.1, 0.55, 1.0]),
    st.booleans(),
)
def test_filters_keep_what_they_say(logits, temperature, top_k, top_p, min_p, on_device):
    """By definition, ties at the edge kept together; also as a CUDA device adds, in integers."""
    if max(logits) == -INF:
        logits[0] = 0.0
    scores = np.array(logits) / temperature
    kept = scores >= np.sort(scores)[-min(top_k or len(scores), len(scores))]
    probs = np.exp(scores - scores.max()) * kept
    probs /= probs.sum()
    above = np.array([probs[probs > p].sum() for p in probs])
    probs *= above < top_p
    probs *= probs >= min_p * probs.max() * (1 - 1e-6)
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            patch.setattr(sampling_module, "summands", sampling_module.whole_numbers)
        sampling = Sampling(temperature, top_p, top_k, min_p)
        filtered = sampling.target_probs(torch.tensor([logits]))[0].numpy()
    np.testing.assert_allclose(filtered, probs / probs.sum(), atol=1e-6)


def text_and_probs(decoder, prompt, temperature, monkeypatch):
    """What a decoder generates, and the probabilities that it drew from."""
    probs, draft = [], TreeStep.draft

    def recorded_draft(step, extent, sampling):
        drafted = draft(step, extent, sampling)
        probs.append(drafted.draft_probs.clone())
        return drafted

    with monkeypatch.context() as patch:
        patch.setattr(TreeStep, "draft", recorded_draft)
        text = decoder.generate(prompt, 6, temperature, seed=0).sequences[0].tolist()
    return text, torch.cat(probs)


@pytest.mark.parametrize("kind", [*KINDS, "int8, own cache", "compiled"])
def test_short_prompts_see_nothing_of_an_earlier_sequence(kind, monkeypatch, request):
    """Whatever lies in the caches, text and drafts are the same, to the last bit."""
    if kind == "compiled":
        pair = request.getfixturevalue("pair")
        models = pair.target, pair.draft
    else:
        models = small_pair(kind)
    tree = TokenTree.from_parents([-1, 0, 0, 1, 1, 3])
    for length in (1, 2, 3):
        prompt = [7, 5, 9][:length]
        fresh, used = (SequoiaDecoder(*models, tree) for _ in range(2))
        used.generate(list(range(9)), 9, 1.0, seed=1)
        sequence = used.step.sequence
        for cache in (sequence.target, sequence.draft):
            for memory in (*cache.blocks, *(getattr(cache, n, None) for n in ("keys", "values"))):
                if isinstance(memory, np.ndarray):
                    memory = torch.from_numpy(memory.view(np.float32))
                if memory is not None:
                    memory.copy_(torch.randn(memory.shape))
        for temperature in (0.0, 1.0):
            expected, expected_probs = text_and_probs(fresh, prompt, temperature, monkeypatch)
            text, probs = text_and_probs(used, prompt, temperature, monkeypatch)
            assert text == expected
            assert probs.equal(expected_probs)
