"""Decoding with drafts that read the target's hidden states or its KV cache.

It is exact, and each step reads what it should read.
"""

from __future__ import annotations

import copy

import architectures
import pytest
import torch
from scripted import Scripted, error_of_a_step
from simulated import simulate_capture
from toys import SMALL_TREES

from drafts import PARTS, load, small_target, write
from sequoia_plan.artifacts import SELF_DRAFT, SequoiaPlanError, TokenTree
from sequoia_plan.profiler.draft_passes import logits_over_text
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.draft import self_draft as self_draft_module
from sequoia_plan.runtime.huggingface import sequoia
from sequoia_plan.runtime.models.aux_hidden_states import AFTER_FINAL_NORM
from sequoia_plan.runtime.models.forward import TreeModel
from sequoia_plan.runtime.step import TreeStep

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
ALGORITHMS = list(PARTS)
DRAFTS = [*ALGORITHMS, "int8"]
WINDOWED = "int8, windowed"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def with_copy(target, spread):
    """A target and its copy in 8 bits, which shares its cache; `spread` sets the copy apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_draft_module, "draft_dtype", lambda target: target.dtype)
        draft = self_draft_module.self_draft(target)
    for parameter in draft.model.layers.parameters():
        if parameter.is_floating_point():
            parameter.data.mul_(spread)
    assert SequoiaDecoder(target, draft, TREE).step.drafter.drafting == SELF_DRAFT
    return target, draft


def make_pairs(folder, settings, spread, **target_settings):
    """{kind of draft: (target, draft)}."""
    pairs = {"int8": with_copy(small_target(**target_settings), spread)}
    for algorithm, parts in PARTS.items():
        target = small_target(**target_settings)
        path = write(folder / algorithm, *parts(target, **settings.get(algorithm, {})))
        pairs[algorithm] = target, load(path, target)
    return pairs


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """{kind of draft: (target, draft)}."""
    windowed = {WINDOWED: with_copy(architectures.tiny("Mistral"), 1.2)}
    return windowed | make_pairs(tmp_path_factory.mktemp("small"), {}, spread=1.2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The same with three tokens; the EAGLE-3 draft has two of them."""
    settings = {"EAGLE-3": {"d2t": [0, 2]}, "DFlash": {"mask": 2}}
    return make_pairs(tmp_path_factory.mktemp("tiny"), settings, spread=1.4, vocabulary=3)


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_the_distribution_of_a_step_is_the_targets(algorithm, verifier, tiny):
    """By enumeration of every draw that the decoder's own code could make."""
    decoder = SequoiaDecoder(*tiny[algorithm], SMALL_TREES["both"])
    assert error_of_a_step(decoder, [2, 1, 2, 0], Scripted(1.0, verifier=verifier)) < 1e-6
    told_another = Scripted(
        1.0, verifier=verifier, told=lambda laws: torch.softmax(laws.log() / 2, -1)
    )
    assert error_of_a_step(decoder, [2, 1, 2, 0], told_another) > 1e-3, (
        "the control: verified by laws that were not drawn from"
    )


def test_a_draw_shared_by_a_level_is_wrong_for_traversal(tiny):
    """Why a DFlash draft's children are drawn for each node by itself.

    All nodes of a level have one distribution, but `traversal` verifies from the leaves up: what it
    accepts on one branch then says what was drawn on the other. Verified from the root down, a
    shared draw makes no difference.
    """
    decoder = SequoiaDecoder(*tiny["DFlash"], SMALL_TREES["both"])
    from_the_leaves = Scripted(1.0, verifier="traversal", shared=True)
    assert error_of_a_step(decoder, [2, 1, 2, 0], from_the_leaves) > 5e-4
    from_the_root = Scripted(1.0, verifier="sequoia", shared=True)
    assert error_of_a_step(decoder, [2, 1, 2, 0], from_the_root) < 1e-6


@pytest.mark.parametrize("tree", [TokenTree.chain(4), TREE], ids=repr)
@pytest.mark.parametrize("prompt", [[3, 1, 4], [7], list(range(45))], ids=len)
@pytest.mark.parametrize("algorithm", DRAFTS)
def test_greedy_is_the_targets_own_text(algorithm, prompt, tree, small):
    target, draft = small[algorithm]
    expected = target.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)
    assert torch.equal(SequoiaDecoder(target, draft, tree).generate(prompt, 50).sequences, expected)


@torch.inference_mode()
def new_draft_cache(step, text):
    """The draft's cache after `text`, from hidden states that transformers returns for it."""
    target, drafter = step.target.model, step.drafter
    ids = torch.tensor(text)
    output = target.model(input_ids=ids[None, :-1], output_hidden_states=True)
    states = [
        output.last_hidden_state if layer == AFTER_FINAL_NORM else output.hidden_states[layer]
        for layer in drafter.aux_hidden_state_layers
    ]
    cache = drafter.new_cache(256)
    drafter.prefill(cache, ids[:-1])
    slots = torch.arange(len(text) - 1)
    mask = additive_mask(slots <= slots[:, None], torch.float32)
    drafter.prefill_hidden_states(cache, ids[:-1], slots, mask, torch.cat(states, -1)[0])
    return cache


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@torch.inference_mode()
def test_every_step_drafts_as_if_the_text_were_new(algorithm, small, monkeypatch):
    """After any number of steps, the draft's probabilities are those for the whole text at once.

    So its hidden states, positions, masks and what it keeps are right, whether or not the steps
    accepted something.
    """
    target, draft = small[algorithm]
    decoder = SequoiaDecoder(target, draft, TREE)
    drafter, sequence, sampling = decoder.step.drafter, decoder.step.sequence, Sampling(1.0)
    compared, lengths = 0, set()
    draft_of_step = TreeStep.draft

    def checked(self, extent, sampling):
        nonlocal compared
        drafted = draft_of_step(self, extent, sampling)
        text = sequence.tokens[: int(sequence.length) + 1].tolist()
        cache, sequence.draft = sequence.draft, new_draft_cache(self, text)
        columns, output, probs = self.tensors.columns(sequence.length, extent), None, []
        for draft_pass in self.passes:
            output = drafter.forward(draft_pass, sequence, columns, output)
            probs.append(torch.softmax(output.logits, -1))
        sequence.draft = cache
        torch.testing.assert_close(drafted.draft_probs, torch.cat(probs), atol=2e-5, rtol=1e-4)
        compared += 1
        return drafted

    monkeypatch.setattr(TreeStep, "draft", checked)
    for step in decoder.steps(torch.tensor([5, 3, 9, 1, 4, 4, 2]), 60, sampling, seed=2):
        lengths.add(len(step.tokens))
    assert compared > 20 and len(lengths) > 1


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_steps_replayed_in_parts_give_the_same_tokens(algorithm, small):
    """Draft, target and verification as three graphs.

    Hidden states reach the next one through memory that stays.
    """
    plain = SequoiaDecoder(*small[algorithm], TREE)
    expected = plain.generate([3, 1, 4], 60, 1.0, seed=1).sequences
    for fails in ((), ("step",)):
        decoder = SequoiaDecoder(*small[algorithm], TREE)
        step = decoder.step
        simulate_capture(step, fails)
        for _ in range(2):
            assert torch.equal(decoder.generate([3, 1, 4], 60, 1.0, seed=1).sequences, expected)


@torch.inference_mode()
def test_aux_hidden_states_are_transformers_hidden_states():
    """Number k is what transformers calls hidden_states[k].

    The last one is that before the final norm, which transformers does not return.
    """
    target = small_target(layers=4)
    ids = torch.arange(9)
    model = TreeModel(target, aux_hidden_state_layers=(0, 1, 3, 4, AFTER_FINAL_NORM))
    mask = additive_mask(ids <= ids[:, None], torch.float32)
    output = model(model.new_cache(16), ids, ids, ids, mask)
    expected = target.model(input_ids=ids[None], output_hidden_states=True)
    states = output.hidden_states.chunk(5, -1)
    for layer, state in zip((0, 1, 3), states, strict=False):
        torch.testing.assert_close(state, expected.hidden_states[layer][0])
    torch.testing.assert_close(target.model.norm(states[3]), expected.last_hidden_state[0])
    torch.testing.assert_close(states[4], expected.last_hidden_state[0])
    with pytest.raises(
        SequoiaPlanError, match="reads the hidden state 5 of a target that has 0 to 4"
    ):
        TreeModel(target, aux_hidden_state_layers=(5,))


def test_drafts_of_one_target_do_not_meet(small, tmp_path):
    """Two decoders with other hidden states of one target, and transformers itself, in turn."""
    target, draft = small["EAGLE-3"]
    dflash = load(write(tmp_path / "dflash", *PARTS["DFlash"](target, ids=(1, 3))), target)
    first, second = (SequoiaDecoder(target, model, TREE) for model in (draft, dflash))
    expected = [
        decoder.generate([3, 1, 4], 30, 1.0, seed=4).sequences for decoder in (first, second)
    ]
    steps = first.steps(torch.tensor([3, 1, 4]), 30, Sampling(1.0), seed=4)
    tokens = [3, 1, 4]
    for step in steps:
        tokens += step.tokens
        target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
    assert tokens[: expected[0].shape[1]] == expected[0][0].tolist()
    assert torch.equal(second.generate([3, 1, 4], 30, 1.0, seed=4).sequences, expected[1])


def test_a_tree_deeper_than_the_block_is_refused(small):
    with pytest.raises(
        SequoiaPlanError,
        match="tree: 9 levels, the draft reaches 5; solve with its own profile, or with --depth 5",
    ):
        SequoiaDecoder(*small["DFlash"], TokenTree.chain(9))


@pytest.mark.parametrize("algorithm", [*DRAFTS, WINDOWED])
@torch.inference_mode()
def test_passes_read_known_text_as_steps_do(algorithm, small):
    """What the profiler asks: logits at known positions, each at its level of the text's steps."""
    decoder = SequoiaDecoder(*small[algorithm], TokenTree.chain(4))
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
    mask = additive_mask(torch.arange(int(slots[-1]) + 1) <= slots[:, None], torch.float32)
    target = decoder.step.target(sequence.target, ids[slots], slots, slots, mask)
    before = [block.clone() for block in sequence.target.blocks]

    def error(levels):
        logits = logits_over_text(drafter, sequence, slots, levels, target.hidden_states)
        probs = torch.softmax(logits[positions], -1)
        return float((probs - torch.stack(on_path)).abs().max())

    assert max(levels) > 0 and error(levels) < 2e-5
    assert all(map(torch.equal, before, sequence.target.blocks)), "the target's cache is unchanged"
    if "int8" in algorithm:  # the control: each token as a root
        assert error([0] * len(levels)) > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision(algorithm, small):
    """bfloat16 weights meet a float32 head where that is the target's."""
    target, draft = small[algorithm]
    half = SequoiaDecoder(copy.deepcopy(target).bfloat16(), copy.deepcopy(draft).bfloat16(), TREE)
    assert half.generate([3, 1, 4], 20, 1.0, seed=1).new_tokens == 20
    mixed = SequoiaDecoder(target, copy.deepcopy(draft).bfloat16(), TREE)
    greedy = target.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=20, do_sample=False)
    assert torch.equal(mixed.generate([3, 1, 4], 20).sequences, greedy)


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_inside_transformers_generate(algorithm, small):
    target, draft = small[algorithm]
    ids = torch.tensor([[3, 1, 4]])
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    text = target.generate(
        ids, max_new_tokens=20, do_sample=False, custom_generate=sequoia, draft=draft, tree=TREE
    )
    assert torch.equal(text, expected)
