"""Decoding with drafts that read the target's hidden states: exact, and in each step with the hidden states it should have."""

from __future__ import annotations

import copy

import pytest
import torch
from drafts import PARTS, load, small_target, write
from scripted import Scripted, error_of_a_step
from simulated import Simulated
from toys import SMALL_TREES

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.huggingface import sequoia
from sequoia_plan.runtime.models.forward import TreeModel, additive
from sequoia_plan.runtime.models.taps import NORMED

TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
KINDS = list(PARTS)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """{kind: (target, draft)}, loaded from folders."""
    found = {}
    for kind, parts in PARTS.items():
        target = small_target()
        found[kind] = target, load(write(tmp_path_factory.mktemp("draft") / "d", *parts(target)), target)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The same with three tokens; the EAGLE-3 draft has two of them."""
    found = {}
    for kind, parts in PARTS.items():
        target = small_target(vocabulary=3)
        settings = {"covered": [0, 2]} if kind == "EAGLE-3" else {"mask": 2} if kind == "DFlash" else {}
        found[kind] = target, load(write(tmp_path_factory.mktemp("draft") / "d", *parts(target, **settings)), target)
    return found


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_a_step_is_the_targets(kind, verifier, tiny):
    """By enumeration of every draw that the decoder's own code could make."""
    decoder = SequoiaDecoder(*tiny[kind], SMALL_TREES["both"])
    assert error_of_a_step(decoder, [2, 1, 2, 0], Scripted(1.0, verifier=verifier)) < 1e-6
    told_another = Scripted(1.0, verifier=verifier, told=lambda laws: torch.softmax(laws.log() / 2, -1))
    assert error_of_a_step(decoder, [2, 1, 2, 0], told_another) > 1e-3, "the control: verified by laws that were not drawn from"


def test_a_draw_shared_by_a_level_is_wrong_for_traversal(tiny):
    """Why a block draft's children are drawn for each node by itself, although a level has one law: `traversal` looks from the leaves up, and
    what it accepts on one branch then says what was drawn on the other. Judged from the root down, a shared draw makes no difference."""
    decoder = SequoiaDecoder(*tiny["DFlash"], SMALL_TREES["both"])
    assert error_of_a_step(decoder, [2, 1, 2, 0], Scripted(1.0, verifier="traversal", shared=True)) > 5e-4
    assert error_of_a_step(decoder, [2, 1, 2, 0], Scripted(1.0, verifier="sequoia", shared=True)) < 1e-6


@pytest.mark.parametrize("tree", [TokenTree.chain(4), TREE], ids=repr)
@pytest.mark.parametrize("prompt", [[3, 1, 4], [7], list(range(45))], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_targets_own_text(kind, prompt, tree, small):
    target, draft = small[kind]
    expected = target.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)
    assert torch.equal(SequoiaDecoder(target, draft, tree).generate(prompt, 50).sequences, expected)


@torch.inference_mode()
def laws_anew(decoder, text):
    """Logits of a chain's passes after `text`, from hidden states that transformers returns for the whole of it, in a sequence of its own."""
    target, drafter = decoder.target.model, decoder.drafter
    ids = torch.tensor(text)
    read = target.model(input_ids=ids[None, :-1], output_hidden_states=True)
    states = [read.last_hidden_state if tap == NORMED else read.hidden_states[tap] for tap in drafter.taps]
    cache = drafter.new_cache(256)
    drafter.prefill(cache, ids[:-1])
    slots = torch.arange(len(text) - 1)
    drafter.watch(cache, ids[:-1], slots, additive(slots <= slots[:, None], torch.float32), torch.cat(states, -1)[0])
    return cache


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_step_drafts_as_if_the_text_were_new(kind, small, monkeypatch):
    """After any number of steps that accepted something or nothing, the draft's laws are those it has for the whole text at once: its
    hidden states, positions, masks and what it keeps are right."""
    target, draft = small[kind]
    decoder = SequoiaDecoder(target, draft, TREE)
    drafter, sequence, sampling = decoder.drafter, decoder.sequence, Sampling(1.0)
    compared, lengths = 0, set()
    grow = SequoiaDecoder.grow

    def checked(self, extent, sampling):
        nonlocal compared
        growth = grow(self, extent, sampling)
        text = sequence.tokens[: int(sequence.length) + 1].tolist()
        kept, sequence.draft = sequence.draft, laws_anew(self, text)
        columns, reading, rows = self.structure.columns(sequence.length, extent), None, []
        for step in self.passes:
            reading = drafter.read(step, sequence, columns, reading)
            rows.append(torch.softmax(reading.logits, -1))
        sequence.draft = kept
        torch.testing.assert_close(growth.laws, torch.cat(rows), atol=2e-5, rtol=1e-4)
        compared += 1
        return growth

    monkeypatch.setattr(SequoiaDecoder, "grow", checked)
    for step in decoder.steps(torch.tensor([5, 3, 9, 1, 4, 4, 2]), 60, sampling, seed=2):
        lengths.add(len(step.tokens))
    assert compared > 20 and len(lengths) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_steps_replayed_in_parts_give_the_same_tokens(kind, small):
    """Draft, target and verification as three graphs: hidden states reach the next one through memory that stays."""
    expected = SequoiaDecoder(*small[kind], TREE).generate([3, 1, 4], 60, 1.0, seed=1).sequences
    for fails in ((), ("step",)):
        each = SequoiaDecoder(*small[kind], TREE)
        each.graphs, each.uncaptured = Simulated(each.device), set(fails)
        for _ in range(2):
            assert torch.equal(each.generate([3, 1, 4], 60, 1.0, seed=1).sequences, expected)


@torch.inference_mode()
def test_taps_are_transformers_hidden_states():
    """Number k is what transformers calls hidden_states[k]; the last one is that before the final norm, which transformers does not return."""
    target = small_target(layers=4)
    ids = torch.arange(9)
    model = TreeModel(target, taps=(0, 1, 3, 4, NORMED))
    reading = model(model.new_cache(16), ids, ids, ids, additive(ids <= ids[:, None], torch.float32))
    expected = target.model(input_ids=ids[None], output_hidden_states=True)
    found = reading.features.chunk(5, -1)
    for tap, features in zip((0, 1, 3), found, strict=False):
        torch.testing.assert_close(features, expected.hidden_states[tap][0])
    torch.testing.assert_close(target.model.norm(found[3]), expected.last_hidden_state[0])
    torch.testing.assert_close(found[4], expected.last_hidden_state[0])
    with pytest.raises(SequoiaPlanError, match="reads the hidden state 5 of a target that has 0 to 4"):
        TreeModel(target, taps=(5,))


def test_drafts_of_one_target_do_not_meet(small, tmp_path):
    """Two decoders with other taps on one target, and transformers itself, in turn."""
    target, draft = small["EAGLE-3"]
    other = load(write(tmp_path / "other", *PARTS["DFlash"](target, ids=(1, 3))), target)
    first, second = (SequoiaDecoder(target, each, TREE) for each in (draft, other))
    expected = [each.generate([3, 1, 4], 30, 1.0, seed=4).sequences for each in (first, second)]
    steps = first.steps(torch.tensor([3, 1, 4]), 30, Sampling(1.0), seed=4)
    tokens = [3, 1, 4]
    for step in steps:
        tokens += step.tokens
        target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
    assert tokens[: expected[0].shape[1]] == expected[0][0].tolist()
    assert torch.equal(second.generate([3, 1, 4], 30, 1.0, seed=4).sequences, expected[1])


def test_a_tree_deeper_than_the_block_is_refused(small):
    with pytest.raises(SequoiaPlanError, match="tree: 9 levels, the draft reaches 5; solve with its own profile, or with --depth 5"):
        SequoiaDecoder(*small["DFlash"], TokenTree.chain(9))


@pytest.mark.parametrize("tree", [TokenTree.chain(2), TokenTree.chain(5), TokenTree.star(4), TREE], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_declared_widths_are_those_of_the_passes(kind, tree, small, monkeypatch):
    decoder, widths = SequoiaDecoder(*small[kind], tree), []
    decoder.prefill(torch.arange(5), 40, seed=0)
    model = decoder.drafter.model
    monkeypatch.setattr(model, "forward", lambda tokens, *rest, run=model.forward: widths.append(tokens.shape[1]) or run(tokens, *rest))
    decoder.refill_random_numbers(Sampling(1.0))
    decoder.step(64, Sampling(1.0))
    assert widths == decoder.drafter.drafting.widths(tree.parents_by_level)


def test_passes_read_known_text_as_steps_do(small):
    """What the profiler asks: laws at known positions, each as far from its root as it stood in the text's steps."""
    for kind in KINDS:
        decoder = SequoiaDecoder(*small[kind], TokenTree.chain(4))
        drafter, sequence = decoder.drafter, decoder.sequence
        prompt, laws, levels, text = torch.tensor([5, 3, 9, 1]), [], [], [5, 3, 9, 1]
        with torch.inference_mode():
            for step in steps_with_laws(decoder, prompt, laws):
                levels += range(len(step.tokens))
                text += step.tokens
            kept = [law for step_laws, count in laws for law in step_laws[:count]]
            positions = [p for p, level in enumerate(levels) if level < 3]
            ids = torch.tensor(text)
            here = torch.arange(3, 3 + len(levels))
            target = decoder.target(sequence.target, ids[here], here, here, additive(torch.arange(int(here[-1]) + 1) <= here[:, None], torch.float32))
            again = torch.softmax(drafter.read_text(sequence, here, levels, target.features), -1)
            torch.testing.assert_close(again[positions], torch.stack(kept), atol=2e-5, rtol=1e-4)


def steps_with_laws(decoder, prompt, laws):
    """The steps of a text; notes each step's laws of a chain, and how many of them stood on the accepted path."""
    grow, noted = decoder.grow, []
    decoder.grow = lambda extent, sampling: noted.append(grow(extent, sampling)) or noted[-1]
    for step in decoder.steps(prompt, 24, Sampling(1.0), seed=0):
        laws.append((noted[-1].laws, min(len(step.tokens), 3)))
        yield step


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_in_half_precision(kind, small):
    """Passes of a draft are compiled like a target's, and bfloat16 weights meet a float32 head where that is the target's."""
    target, draft = small[kind]
    expected = SequoiaDecoder(target, draft, TREE).generate([3, 1, 4], 20, 1.0, seed=1).sequences
    assert torch.equal(SequoiaDecoder(target, draft, TREE, compile="eager").generate([3, 1, 4], 20, 1.0, seed=1).sequences, expected)
    half = SequoiaDecoder(copy.deepcopy(target).bfloat16(), copy.deepcopy(draft).bfloat16(), TREE)
    assert half.generate([3, 1, 4], 20, 1.0, seed=1).new_tokens == 20
    mixed = SequoiaDecoder(target, copy.deepcopy(draft).bfloat16(), TREE)
    greedy = target.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=20, do_sample=False)
    assert torch.equal(mixed.generate([3, 1, 4], 20).sequences, greedy)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_transformers_generate(kind, small):
    target, draft = small[kind]
    ids = torch.tensor([[3, 1, 4]])
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=sequoia, draft=draft, tree=TREE), expected)
