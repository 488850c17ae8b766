"""Trees that follow the text: falling back to plain decoding, exactness across it, and its cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, error_of_steps
from toys import PLAIN, planned

from drafts import PARTS, small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.state import FIRST_BALANCE, MAX_BALANCE, MAX_LOSS, State, choices_of
from sequoia_plan.runtime import Sampling, SequoiaDecoder


@settings(max_examples=100)
@given(st.lists(st.floats(0, 1), max_size=300), st.floats(1, 6), st.integers(1, 6), st.floats(1, 9))
def test_no_text_loses_more_than_it_may(accepted, cost, depth, tokens):
    """By the times that count, whatever is accepted; and after a good stretch in a few steps."""
    tree, state = planned(TokenTree.chain(depth), cost, tokens), State(9, 0)
    choices, seconds = choices_of(tree, 0), 0.0
    for share in accepted:
        choice = state.choose(choices)
        seconds += choice.cost
        state = state.after_step(choice, 1 + int(share * (choice.tree.depth - 1)), 0)
        num_tokens = state.length - 9
        assert seconds <= num_tokens * (1 + MAX_LOSS) + FIRST_BALANCE + cost
    num_tree_steps, paid = 0, MAX_BALANCE / max(cost - 1 - MAX_LOSS, 1e-9)
    while state.choose(choices).tree != PLAIN and num_tree_steps <= paid + 1 and cost > 1.1:
        state, num_tree_steps = state.after_step(choices[0], 1, 0), num_tree_steps + 1
    assert cost <= 1.1 or depth == 1 or state.choose(choices).tree == PLAIN


def test_a_text_that_is_good_again_has_its_tree_again():
    tree, state, chosen = planned(TokenTree.chain(4), 1.3, 2.0), State(9, 0), []
    choices = choices_of(tree, 0)
    for step in range(240):
        choice = state.choose(choices)
        chosen.append(choice.tree == tree)
        state = state.after_step(choice, 3 if chosen[-1] and step >= 100 else 1, 0)
    assert all(chosen[:4])
    assert sum(chosen[10:100]) <= 8  # a step of its tree for every ten without, or fewer
    assert all(chosen[180:])


@pytest.mark.parametrize("kind", ["language model", *PARTS])
def test_the_distribution_of_steps_that_fall_back_is_the_targets(kind):
    """By enumeration of every draw of several steps, some of them without a tree."""
    decoder = SequoiaDecoder(*small_pair(kind, 3), planned(TokenTree([-1, 0, 0]), 3.0))
    assert decoder.chooses
    setting = decoder, [2, 1, 0], Scripted(1.0), 3
    assert error_of_steps(*setting) < 1e-6

    def cost_of(choice, drafted):
        """A step takes longer if it has drafted, and maybe rejected, a certain token."""
        return 3.5 if 1 in drafted else 1.0

    assert error_of_steps(*setting, cost_of=cost_of) < 1e-6


def test_a_state_that_knows_the_steps_own_draws_is_wrong():
    """The control: a step falls back if it has drawn what it should not know."""
    decoder = SequoiaDecoder(*small_pair("EAGLE-1", 3), planned(TokenTree.chain(2), 3.0))

    def peeking(state, drafted):
        """Behind plain decoding, as soon as a certain token was drafted."""
        return state._replace(balance=-1.0) if drafted[:1] == (1,) else state

    setting = decoder, [2, 1, 0], Scripted(1.0), 2
    assert error_of_steps(*setting) < 1e-6 and error_of_steps(*setting, peeking) > 1e-3


@pytest.mark.parametrize("kind", ["language model", *PARTS])
def test_greedy_text_stays_that_of_the_target(kind):
    """With steps of a tree and without, and fewer draft passes than with a tree alone."""
    target, draft = small_pair(kind)
    prompt = torch.tensor([5, 3, 9, 2])
    expected = SequoiaDecoder(target, None, PLAIN).generate(prompt, 90)
    tree = planned(TokenTree([-1, 0, 0, 1]), 1.9)
    outputs = list(SequoiaDecoder(target, draft, tree).steps(prompt, 90, Sampling()))
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens[:90] == expected.sequences[0, 4:].tolist()
    assert {output.tree.size for output in outputs} == {1, 4}
    assert SequoiaDecoder(target, draft, TokenTree(tree.parents)).chooses is False
