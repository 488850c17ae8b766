"""The decoder as a whole, on toy models whose law is known exactly."""

import pytest
from scripted import joint_law_p_value
from spies import spy
from toys import PLAIN, TREE, ToyModel, toy_decoder

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.sampling.sampling import DEFAULT_VERIFIER
from sequoia_plan.runtime.verify import Acceptance

PROMPT = [3, 1, 4]
RUNS = 2000
pytestmark = pytest.mark.slow


some_tokens_covered = pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])


@some_tokens_covered
def test_joint_law_of_three_tokens(covered, monkeypatch):
    """Other verifiers' steps are enumerated.

    In the control, rejected probability is not moved to the residual.
    """
    decoder, sampling = (
        toy_decoder(TREE, noise=0.7, covered=covered),
        Sampling(1.0, verifier="sequoia"),
    )
    assert joint_law_p_value(decoder, PROMPT, 3, RUNS, sampling) > 1e-3
    monkeypatch.setattr(Acceptance, "bonus_probs", lambda _, end, tree: tree.target_probs(end))
    assert joint_law_p_value(decoder, PROMPT, 3, RUNS, sampling) < 1e-9


@pytest.mark.parametrize("tree", [PLAIN, TokenTree.chain(4), TokenTree.star(5), TREE], ids=repr)
@some_tokens_covered
@pytest.mark.parametrize("prompt", [PROMPT, [6]])
def test_greedy_is_the_targets_argmax(tree, covered, prompt):
    """Many steps: every mask, position, slot and compaction must be right, for the draft's cache to
    be worth anything too."""
    result = toy_decoder(tree, seed=2, covered=covered).generate(prompt, 100)
    assert result.sequences[0].tolist() == ToyModel(2).greedy_text(prompt, 100)
    assert result.finish_reason == "length"


def test_a_perfect_draft_is_always_accepted():
    """Also: the draft's cache holds what it should, or it would not know what comes next."""
    target = ToyModel(2, context=256)
    for tree in (TokenTree.chain(4), TREE):
        result = SequoiaDecoder(target, target, tree).generate(PROMPT, 99 - 99 % tree.depth)
        assert result.tokens_per_step == tree.depth
    sampled = SequoiaDecoder(target, target, TokenTree.chain(4)).generate(
        PROMPT, 96, temperature=1.0, seed=0
    )
    assert sampled.tokens_per_step == 4


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(budget):
    assert toy_decoder(TokenTree.chain(4), noise=0.0).generate(PROMPT, budget).new_tokens == budget


@pytest.mark.parametrize("recorded", ["sequoia", "topk", None])
def test_a_decoder_takes_the_verifier_of_its_tree(recorded, monkeypatch):
    settings = {"temperature": 0.8} | ({"verifier": recorded} if recorded else {})
    tree = TokenTree([-1, 0, 0, 1], {"settings": settings})
    decoder = SequoiaDecoder(ToyModel(0), ToyModel(1), tree)
    used = []
    spy(monkeypatch, CapturedStep, "run", lambda step, _, sampling: used.append(sampling.verifier))
    decoder.generate([1, 2, 3], 4, temperature=0.8, seed=0)
    decoder.generate([1, 2, 3], 4, sampling=Sampling(0.8, verifier="specinfer"), seed=0)
    assert [*dict.fromkeys(used)] == [recorded or DEFAULT_VERIFIER, "specinfer"]
