"""Decoding with each kind of draft is exact, and each step reads what it should read."""

from dataclasses import replace

import pytest
import torch
from architectures import plain_text
from refusals import refusal
from scripted import Scripted, error_of_a_step
from spies import spy
from toys import PLAIN, SMALL_TREES, TREE, text_inside_generate

from drafts import KINDS, PARTS, built, small_pair, small_target
from sequoia_plan.artifacts import LANGUAGE_MODEL, TokenTree
from sequoia_plan.models.backends import loaded_as
from sequoia_plan.models.base.architecture import AFTER_FINAL_NORM
from sequoia_plan.models.base.masks import causal_mask
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter

DRAFTS = [*PARTS, "MTP", "MTP, three heads"]
TREES = [
    TokenTree.chain(2),
    TokenTree.chain(5),
    TokenTree.star(4),
    TREE,
    TokenTree.from_parents([-1, *((node - 1) // 3 for node in range(1, 30))]),
]
PROMPT = [2, 1, 2, 0]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_the_distribution_of_a_step_is_the_targets(algorithm, verifier):
    """By enumeration of every draw that the decoder's own code could make."""
    decoder = SequoiaDecoder(*small_pair(algorithm, 3), SMALL_TREES["both"])
    assert error_of_a_step(decoder, PROMPT, Scripted(1.0, verifier=verifier)) < 1e-6
    told_another = Scripted(1.0, verifier=verifier, told=lambda laws: (laws.log() / 2).softmax(-1))
    assert error_of_a_step(decoder, PROMPT, told_another) > 1e-3, (
        "the control: verified by laws that were not drawn from"
    )


@pytest.mark.parametrize("algorithm", ["DFlash 2", "DSpark"])
def test_children_are_verified_by_what_their_parents_token_gave(algorithm, monkeypatch):
    """The control of the test above: a step that is told of the level's logits alone."""
    decoder = SequoiaDecoder(*small_pair(algorithm, 3), SMALL_TREES["both"])
    drafter, levels = decoder.step.drafter, []

    def forward(draft_pass, *args, run=drafter.forward):
        output = run(draft_pass, *args)
        levels[:] = output.later[0][0].index_select(0, draft_pass.logit_rows)
        return output

    monkeypatch.setattr(drafter, "forward", forward)
    unary = Scripted(1.0, told=lambda laws: torch.softmax(torch.stack(levels), -1))
    assert error_of_a_step(decoder, PROMPT, unary) > 1e-3


def test_a_draw_shared_by_a_level_is_wrong_for_traversal():
    """Why a DFlash draft's children are drawn for each node by itself.

    All nodes of a level have one distribution, but `traversal` verifies from the leaves up: what it
    accepts on one branch then says what was drawn on the other. Verified from the root down, a
    shared draw makes no difference.
    """
    decoder = SequoiaDecoder(*small_pair("DFlash", 3), SMALL_TREES["both"])
    from_the_leaves = Scripted(1.0, verifier="traversal", shared=True)
    assert error_of_a_step(decoder, PROMPT, from_the_leaves) > 5e-4
    from_the_root = Scripted(1.0, verifier="sequoia", shared=True)
    assert error_of_a_step(decoder, PROMPT, from_the_root) < 1e-6


@pytest.mark.parametrize("tree", [TokenTree.chain(4), TREE], ids=repr)
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_greedy_is_the_targets_own_text(algorithm, tree):
    """Also inside transformers' generate."""
    target, draft = small_pair(algorithm)
    for prompt in ([3, 1, 4], [7], list(range(1, 46))):
        ids = torch.tensor([prompt])
        expected = plain_text(target, ids, 50)
        assert SequoiaDecoder(target, draft, tree).generate(prompt, 50).sequences.equal(expected)
    text = text_inside_generate(target, draft, ids, tree=tree, max_new_tokens=50)
    assert text.equal(expected)


@torch.inference_mode()
def test_aux_hidden_states_are_transformers_hidden_states():
    """Number k is what transformers calls hidden_states[k].

    The last one is that before the final norm, which transformers does not return.
    """
    target = small_target(layers=4)
    ids = torch.arange(9)
    model, numbers = loaded_as(target, "resident"), (0, 1, 3, 4, AFTER_FINAL_NORM)
    model.backend.prepare(numbers)
    mask = causal_mask(ids, 9, torch.float32)
    output = model(model.new_cache(16), ids, ids, ids, mask, 0, numbers)
    expected = target.model(input_ids=ids[None], output_hidden_states=True)
    states = output.hidden_states.chunk(5, -1)
    for layer, state in zip((0, 1, 3), states, strict=False):
        torch.testing.assert_close(state, expected.hidden_states[layer][0])
    torch.testing.assert_close(target.model.norm(states[3]), expected.last_hidden_state[0])
    torch.testing.assert_close(states[4], expected.last_hidden_state[0])
    with refusal("reads the hidden state 5 "):
        model.backend.prepare((5,))


def test_drafts_of_one_target_do_not_meet():
    """Two decoders with other hidden states of one target, and transformers itself, in turn."""
    target, draft = small_pair("EAGLE-3")
    dflash = built(target, *PARTS["DFlash"](target, ids=(1, 3)))
    first, second = (SequoiaDecoder(target, model, TREE) for model in (draft, dflash))
    prompt = torch.tensor([3, 1, 4])
    expected = [each.generate(prompt, 30, 1.0, seed=4).sequences for each in (first, second)]
    tokens = [3, 1, 4]
    for step in first.steps(prompt, 30, Sampling(1.0), seed=4):
        tokens += step.tokens
        plain_text(target, prompt[None], 2)
    assert tokens[: expected[0].shape[1]] == expected[0][0].tolist()
    assert second.generate(prompt, 30, 1.0, seed=4).sequences.equal(expected[1])


@pytest.mark.parametrize(("kind", "levels"), [("DFlash", 5), ("MTP, three heads", 4)])
def test_a_tree_deeper_than_the_draft_is_refused(kind, levels):
    with refusal(f"9 levels, the draft reaches {levels}"):
        SequoiaDecoder(*small_pair(kind), TokenTree.chain(9))


@pytest.mark.parametrize("algorithm", [*DRAFTS, "language model"])
@torch.inference_mode()
def test_passes_read_known_text_as_steps_do(algorithm):
    """What the profiler asks: logits at known positions, each at its level of the text's steps."""
    decoder = SequoiaDecoder(*small_pair(algorithm), TokenTree.chain(4))
    drafter, sequence = decoder.step.drafter, decoder.step.sequence
    text, levels, on_path, drafted = [5, 3, 9, 1], [], [], []
    draft = decoder.step.draft
    decoder.step.draft = lambda *args: drafted.append(draft(*args)) or drafted[-1]
    for step in decoder.steps(torch.tensor(text), 30, Sampling(1.0), seed=0):
        levels += range(len(step.tokens))
        text += step.tokens
        on_path += drafted[-1].draft_probs[: len(step.tokens)]  # the chain has three inner nodes
    positions = [position for position, level in enumerate(levels) if level < 3]
    ids, slots = torch.tensor(text), torch.arange(3, 3 + len(levels))
    mask = causal_mask(slots, int(slots[-1]) + 1, torch.float32)
    numbers = decoder.step.models.hidden_states
    target = decoder.step.target(sequence.target, ids[slots], slots, slots, mask, 0, numbers)
    before = [block.clone() for block in sequence.target.blocks]

    def error(levels):
        logits = drafter.logits_over_text(sequence, slots, levels, target.hidden_states)
        return float((torch.softmax(logits[positions], -1) - torch.stack(on_path)).abs().max())

    assert max(levels) > 0 and error(levels) < 2e-5
    assert all(map(torch.equal, before, sequence.target.blocks)), "the target's cache is unchanged"
    if algorithm != "language model":  # the control: each token as a root
        assert error([0] * len(levels)) > 1e-3


@pytest.mark.parametrize("algorithm", PARTS)
def test_half_precision(algorithm):
    """bfloat16 weights meet a float32 head where that is the target's."""
    target, draft = small_pair(algorithm)
    greedy = plain_text(target, torch.tensor([[3, 1, 4]]), 20)
    mixed = SequoiaDecoder(target, draft.bfloat16(), TREE)
    assert mixed.generate([3, 1, 4], 20).sequences.equal(greedy)
    half = SequoiaDecoder(target.bfloat16(), draft, TREE)
    assert half.generate([3, 1, 4], 20, 1.0, seed=1).new_tokens == 20


def widths_of_a_step(decoder, monkeypatch):
    """Tokens in each pass of the draft during one step."""
    step, widths = decoder.step, []
    model = step.drafter.model
    is_language_model = isinstance(model, LoadedModel)
    counted = model.backend if is_language_model else model
    step.prefill(torch.arange(5) % 8, 40, seed=0)
    spy(monkeypatch, counted, "forward", lambda *a: widths.append(a[is_language_model].numel()))
    with torch.inference_mode():
        step.refill_random_numbers(Sampling(1.0))
        step(64, Sampling(1.0))
    return widths


@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_declared_widths_are_those_of_the_passes(kind, tree, monkeypatch):
    decoder = SequoiaDecoder(*small_pair(kind), tree)
    declared = decoder.step.drafter.drafting.pass_widths(tree.num_parents_by_level)
    assert widths_of_a_step(decoder, monkeypatch) == declared


def test_another_width_of_a_pass_shows(monkeypatch):
    """Negative control: a drafter that reads its first level without the token before the root."""
    passes = LanguageModelDrafter.passes

    def narrow(self, tree, tensors):
        first, *deeper = passes(self, tree, tensors)
        names = ("input_slots", "offsets", "mask")
        return (replace(first, **{name: getattr(first, name)[1:] for name in names}), *deeper)

    monkeypatch.setattr(LanguageModelDrafter, "passes", narrow)
    decoder = SequoiaDecoder(*small_pair("language model"), TREE)
    declared = LANGUAGE_MODEL.pass_widths(TREE.num_parents_by_level)
    assert widths_of_a_step(decoder, monkeypatch) != declared


@pytest.mark.parametrize("tree", [TokenTree.chain(4), PLAIN, TREE], ids=repr)
def test_decoders_of_several_trees_share_a_sequence(tree):
    """Whichever decodes, it says what a decoder of its own says; the memory is the same."""
    models = small_pair("language model")
    first = SequoiaDecoder(*models, TREE)
    for temperature in (0.0, 1.0):
        shared, alone = (
            each.generate([3, 1, 4], 30, temperature, seed=2).sequences
            for each in (first.with_tree(tree), SequoiaDecoder(*models, tree))
        )
        assert shared.equal(alone)
    assert first.with_tree(tree).step.sequence is first.step.sequence
