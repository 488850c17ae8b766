"""The decoder as a whole, on toy models whose law is known exactly."""

import numpy as np
import pytest
from enumeration import pooled_p_value
from scripted import token_probs_of_texts
from toys import TREE, ToyModel, first_tokens, toy_decoder

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.sampling.sampling import DEFAULT_VERIFIER
from sequoia_plan.runtime.verify import Acceptance

PROMPT = [3, 1, 4]
RUNS = 2000
pytestmark = pytest.mark.slow


def p_value(**setting):
    """Chi-square of the joint law of a decoder's first three tokens against the exact one."""
    target, new = ToyModel(0), first_tokens(PROMPT, TREE, range(RUNS), **setting)
    expected = token_probs_of_texts(target, PROMPT, 3, Sampling(1.0)).prod(-1).flatten() * RUNS
    observed = np.bincount(
        np.ravel_multi_index(new.T, [target.vocabulary] * 3), minlength=expected.size
    )
    return pooled_p_value(observed, expected)


def test_joint_law_of_three_tokens():
    """Other verifiers' steps are enumerated."""
    assert p_value() > 1e-3


def test_joint_law_with_a_draft_that_covers_part_of_the_vocabulary():
    assert p_value(covered=[0, 2, 3, 5, 7]) > 1e-3


def test_a_decoder_without_the_residual_step_fails(monkeypatch):
    """Negative control for the joint law: rejected probability is not moved to the residual."""
    monkeypatch.setattr(Acceptance, "bonus_probs", lambda _, end, tree: tree.target_probs(end))
    assert p_value() < 1e-9


@pytest.mark.parametrize(
    "tree", [TokenTree.chain(1), TokenTree.chain(4), TokenTree.star(5), TREE], ids=repr
)
@pytest.mark.parametrize("covered", [None, [0, 2, 3, 5, 7]])
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
    used, run = [], CapturedStep.run
    monkeypatch.setattr(CapturedStep, "run", lambda *given: used.append(given[2]) or run(*given))
    decoder.generate([1, 2, 3], 4, temperature=0.8, seed=0)
    decoder.generate([1, 2, 3], 4, sampling=Sampling(0.8, verifier="specinfer"), seed=0)
    verifiers = dict.fromkeys(sampling.verifier for sampling in used)
    assert [*verifiers] == [recorded or DEFAULT_VERIFIER, "specinfer"]
