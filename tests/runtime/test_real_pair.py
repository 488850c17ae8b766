"""The embedded pair, in float32: what we generate is what transformers generates."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoTokenizer

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.draft.self_draft import self_draft
from sequoia_plan.runtime.pair import (
    DEFAULT_DRAFT,
    EMBEDDED_DRAFTS,
    LANGUAGE_MODEL,
    embedded_draft,
    with_draft,
)

pytestmark = pytest.mark.slow

BUSHY = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 9])
TREES = [TokenTree.chain(1), TokenTree.chain(4), BUSHY]
TIE = 1e-4


@pytest.fixture(scope="module")
def greedy(pair, plain_target):
    """Prompts and transformers' own greedy 32 tokens after each."""
    prompts = [torch.tensor([prompt]) for prompt in held_out(pair.tokenizer, 6)]
    return [
        (
            ids,
            plain_target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False
            ),
        )
        for ids in prompts
    ]


@torch.no_grad()
def first_difference(model, ours, theirs, prompt):
    """None if equal; else the gap between the two tokens' logits where they part."""
    n = min(ours.shape[1], theirs.shape[1])
    differ = (ours[0, :n] != theirs[0, :n]).nonzero()
    if not len(differ):
        return None if ours.shape == theirs.shape else float("inf")
    at = int(differ[0])
    logits = model(theirs[:, :at]).logits[0, -1]
    return float((logits[theirs[0, at]] - logits[ours[0, at]]).abs())


def decoded(decoder, model, cases, tokenizer):
    """Tokens a step over prompts and transformers' texts, and in how many our text parts from
    theirs, at what must be a tie."""
    ties = tokens = steps = 0
    for prompt, theirs in cases:
        result = decoder.generate(prompt, 32, eos_token_id=tokenizer.eos_token_id)
        gap = first_difference(model, result.sequences, theirs, prompt)
        if gap is not None:
            assert gap < TIE, f"{decoder.step.tree}: parts from transformers by {gap} logits"
            ties += 1
        tokens, steps = tokens + result.new_tokens, steps + result.steps
    return tokens / steps, ties


@pytest.fixture(scope="module")
def language_model(pair):
    return with_draft(pair, LANGUAGE_MODEL)


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_greedy_equals_transformers(pair, plain_target, greedy, tree, record_property):
    """And the shipped draft is no stub: with a few children it saves nearly half of the target's
    passes."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    tokens_a_step, ties = decoded(
        decoder, plain_target, greedy if tree is BUSHY else greedy[:3], pair.tokenizer
    )
    record_property("ties", ties)
    assert ties <= 1
    assert tokens_a_step > (1.7 if tree is BUSHY else 0.99)


def test_greedy_with_a_draft_out_of_the_target_equals_transformers(pair, plain_target, greedy):
    """And that draft is most often right."""
    decoder = SequoiaDecoder(pair.target, self_draft(plain_target), TREES[1])
    assert decoded(decoder, plain_target, greedy[:2], pair.tokenizer)[0] > 3


@torch.no_grad()
def test_tree_logits_are_path_logits(pair, plain_target):
    """Every node of a compiled pass over a tree, by our cache and mask, sees exactly its path."""
    tree = BUSHY
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    prompt = torch.arange(500, 530)
    decoder.step.prefill(prompt, 32, seed=0)
    tokens = torch.arange(1000, 1000 + tree.size)
    tokens[0] = prompt[-1]
    decoder.step.sequence.tokens[29 : 29 + tree.size] = tokens
    logits = decoder.step.forward_target(decoder.step.extent(29))
    for node in range(tree.size):
        path = tree.attention_mask[node].nonzero()[0]
        expected = plain_target(torch.cat([prompt[:-1], tokens[path]])[None]).logits[0, -1]
        torch.testing.assert_close(logits[node], expected, atol=2e-3, rtol=1e-4)


def test_greedy_with_the_embedded_language_model_equals_transformers(
    language_model, plain_target, greedy
):
    decoder = SequoiaDecoder(language_model.target, language_model.draft, BUSHY)
    assert decoded(decoder, plain_target, greedy[:3], language_model.tokenizer)[0] > 1.4


def test_hidden_states_that_were_mixed_up_save_fewer_passes(pair, plain_target, greedy):
    """The control of what the default draft saves: the text stays the target's, and drafted tokens
    are accepted less often."""
    draft = with_draft(pair, DEFAULT_DRAFT).draft
    told, misled = (
        decoded(SequoiaDecoder(pair.target, each, BUSHY), plain_target, greedy[:2], pair.tokenizer)[
            0
        ]
        for each in (draft, misread(draft))
    )
    assert told > misled + 0.2, (told, misled)


def misread(draft):
    """The same draft, but for the order in which it takes the hidden states."""
    other = copy.deepcopy(draft)
    other.fc.weight.data = torch.cat(
        list(reversed(other.fc.weight.chunk(len(other.aux_hidden_state_layers), 1))), 1
    )
    return other


def test_embedded_drafts_are_small(pair, language_model):
    files = [
        path / "model.safetensors" if path.is_dir() else path
        for path in map(embedded_draft, EMBEDDED_DRAFTS)
    ]
    assert all(file.stat().st_size <= 20e6 for file in files)
    for each in (pair, language_model):
        assert each.draft.d2t.unique().numel() == each.draft.d2t.numel()


def test_converted_model_is_reused(pair):
    from sequoia_plan.runtime.models.gguf import converted_gguf, embedded_gguf

    folder = converted_gguf(embedded_gguf())
    assert (folder / "model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(folder).chat_template
