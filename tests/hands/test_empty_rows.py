"""Rows with nothing left after a mask: logits to draw from, filters' edges, and attention."""

import itertools

import numpy as np
import pytest
import torch
from scripted import Scripted, error_of_a_step
from strategies import looking_up

from drafts import KINDS, small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.loaded_model import ForwardOutput
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.step import TreeStep

INF = float("inf")
SPINE = looking_up(0, 0, 1, 1)
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
    # a compiled step is one call, whose drafts only its text shows
    return text, torch.cat(probs) if probs else torch.zeros(0)


@pytest.mark.parametrize("kind", [*KINDS, "compiled"])
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
