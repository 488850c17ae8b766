"""Decoding with looked-up spines: the match, exactness by enumeration, and what the draft reads."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from scripted import Scripted, error_of_a_step
from strategies import looking_up
from toys import PLAIN, naive_match, planned

from drafts import KINDS, PARTS, small_pair
from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.captured_step import catch_up, note_accepted
from sequoia_plan.runtime.lookup import look_up
from sequoia_plan.runtime.step import TreeStep

pytestmark = pytest.mark.slow


def by_match(base, **trees):
    """The tree `base` with others by match: m2=looking_up(...) is for matches of 2 or more."""
    by_match = {int(name[1:]): tree for name, tree in trees.items()}
    return TokenTree(TokenTree.from_parents([-1, *base]).parents, by_match=by_match)


CHAIN = looking_up(0, 1, 2)
SIBLINGS = looking_up(0, 0, 1, 2)  # a drafted sibling with a child beside the looked-up chain
DEEP = looking_up(0, 0, 1, 1, 2, 3)  # drafted children of two nodes on the spine, and a tail
SPINES = {"chain": CHAIN, "siblings": SIBLINGS, "deep": DEEP}


each_kind = pytest.mark.parametrize("kind", ["language model", *PARTS])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 5), st.integers(1, 9))
def test_the_match_is_the_longest_and_last(tokens, max_match, chain_length):
    padded = torch.tensor([*tokens, *[1] * 8])  # slots after the text hold anything
    matched, chain = look_up(padded, torch.tensor([len(tokens) - 1]), max_match, chain_length)
    expected, expected_chain = naive_match(tokens, max_match, chain_length)
    assert int(matched) == expected
    if expected:
        assert chain.tolist() == expected_chain


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
@pytest.mark.parametrize("spine", SPINES)
@each_kind
def test_the_distribution_of_a_step_is_the_targets(kind, spine, verifier):
    """By enumeration of every draw that the decoder's own code could make."""
    decoder = SequoiaDecoder(*small_pair(kind, 3), by_match([0], m1=SPINES[spine]))
    for prompt in ([2, 1, 2, 0, 1, 2], [0, 0, 0, 0]):  # the chain goes on in the copy
        assert error_of_a_step(decoder, prompt, Scripted(1.0, verifier=verifier)) < 1e-6


def test_a_tree_chosen_by_what_was_drawn_is_wrong(monkeypatch):
    """The control: the looked-up token depends on a draw of the same step."""
    decoder = SequoiaDecoder(*small_pair("EAGLE-1", 3), by_match([0], m1=SIBLINGS))
    draft = TreeStep.draft

    def peeking_draft(step, extent, sampling):
        """Drafts, and looks up another token if that draws what the target likes less."""
        drafted = draft(step, extent, sampling)
        root = int(step.sequence.length)
        if step.tree.looks_up and int(step.sequence.tokens[root + 2]) == 1:
            step.sequence.tokens[root + 1] = step.sequence.lookup_chain[0] = 2
        return drafted

    prompt = [2, 1, 0, 2, 1]
    assert error_of_a_step(decoder, prompt, Scripted(1.0)) < 1e-6
    monkeypatch.setattr(TreeStep, "draft", peeking_draft)
    assert error_of_a_step(decoder, prompt, Scripted(1.0)) > 1e-3


PORTFOLIO = by_match([0, 0, 1, 1], m1=DEEP, m2=SIBLINGS, m3=looking_up(*range(9)))
BY_CONTEXT = replace(by_match([0, 0, 1]), by_context={20: PLAIN, 40: by_match([0], m1=SIBLINGS)})
PROMPT = torch.tensor([5, 3, 9, 5, 3, 9, 5, 3])
LOOKUP_ALONE = by_match([], m1=CHAIN, m3=looking_up(*range(9)))


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_greedy_text_is_the_targets_own(kind):
    target, draft = (small_pair("EAGLE-3")[0], None) if kind == "none" else small_pair(kind)
    expected = SequoiaDecoder(target, None, PLAIN).generate(PROMPT, 70)
    tree = PORTFOLIO if draft else LOOKUP_ALONE
    result = SequoiaDecoder(target, draft, tree).generate(PROMPT, 70)
    assert result.sequences.equal(expected.sequences)
    assert result.steps < expected.steps


def test_a_text_takes_the_trees_of_its_length():
    """The greedy text is the target's; a step has the tree for the text before it."""
    target, draft = small_pair("EAGLE-3")
    expected = SequoiaDecoder(target, None, PLAIN).generate(PROMPT, 70).sequences
    decoder = SequoiaDecoder(target, draft, BY_CONTEXT)
    text, trees = PROMPT.tolist(), {}
    for output in decoder.steps(PROMPT, 70, Sampling()):
        trees.setdefault(output.tree, []).append(len(text) - 1)
        text += output.tokens
    assert text[:78] == expected[0].tolist()
    drafted, plain = (trees.pop(tree) for tree in BY_CONTEXT.all_trees[:2])
    others = [length for lengths in trees.values() for length in lengths]
    assert max(drafted) < 20 <= min(plain) and max(plain) < 40 <= min(others)
    decoder = SequoiaDecoder(*small_pair("EAGLE-3", 3), BY_CONTEXT)
    for length in (19, 20, 39, 40):  # exact on both sides of each change
        prompt = [token % 3 for token in text[: length + 1]]
        assert error_of_a_step(decoder, prompt, Scripted(1.0)) < 1e-6


def error_of_the_drafts_cache(target, draft, base, seed):
    """How far the draft's cache is from that of a prompt, where it should have read all tokens.

    Before each step that drafts, the cache is compared up to what the first pass reads again.
    """
    tree = by_match(base, m1=looking_up(*range(9)))
    decoder = SequoiaDecoder(target, draft, planned(tree, 1.2))  # some steps have no tree
    prefilled = SequoiaDecoder(target, draft, TokenTree.chain(2)).step
    errors = []
    num_read_again = decoder.step.rows_of_passes[0] - 1

    def compared_catch_up(drafter, sequence, tree, length, *others):
        """Catches up, and compares if a draft pass follows."""
        left = catch_up(drafter, sequence, tree, length, *others)
        if tree.num_drafted_levels and length - num_read_again > 1:
            read = slice(1, length - num_read_again)
            prefilled.prefill(sequence.tokens[: length + 1], 40, 0)
            parts = zip(sequence.draft.blocks, prefilled.sequence.draft.blocks, strict=True)
            differences = [a[:, :, :, read] - b[:, :, :, read] for a, b in parts]
            errors.append(max(float(part.abs().max()) for part in differences))
        return left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sequoia_plan.runtime.captured_step.catch_up", compared_catch_up)
        for _ in decoder.steps(torch.tensor([5, 3, 9] * 5), 60, Sampling(1.0), seed=seed):
            pass
    return max(errors), len(errors)


@pytest.mark.parametrize("base", [[0, 1], [0, 0, 1]], ids=str)  # the second has a leaf on level 1
@each_kind
def test_the_drafts_cache_is_that_of_a_prompt(kind, base, monkeypatch):
    """After steps that left tokens unread and a catch-up, the cache is as if all were a prompt."""
    models = small_pair(kind)
    for seed in range(3):
        error, num_steps = error_of_the_drafts_cache(*models, base, seed)
        assert error < 1e-4
        assert num_steps > 3
    monkeypatch.setattr(  # the control: one token too many counts as rejected
        "sequoia_plan.runtime.captured_step.note_accepted",
        lambda sequence, tree, path: note_accepted(sequence, tree, path[:-1] or [0]),
    )
    if kind in ("EAGLE-3", "language model"):
        assert max(error_of_the_drafts_cache(*models, base, seed)[0] for seed in range(3)) > 1e-3


def test_what_lookup_cannot_do_is_refused():
    target, draft = small_pair("EAGLE-1")
    decoder = SequoiaDecoder(target, draft, by_match([0], m1=CHAIN))
    with refusal("'topk' with a tree whose spine"):
        decoder.generate(torch.tensor([1, 2, 1, 2]), 9, sampling=Sampling(1.0, verifier="topk"))
    with refusal("needs a draft model"):
        SequoiaDecoder(target, None, by_match([], m1=SIBLINGS))
