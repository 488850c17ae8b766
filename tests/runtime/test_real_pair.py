"""The embedded pair, in float32: what we generate is what transformers generates."""

import pytest
import torch
from architectures import plain_text

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.backends import copy_in_8_bits, place
from sequoia_plan.runtime.models.fuse import num_fused_layers
from sequoia_plan.runtime.pair import LANGUAGE_MODEL, with_draft

pytestmark = pytest.mark.slow

BUSHY = TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 9])
TIE = 1e-4


@pytest.fixture(scope="module")
def greedy(pair, plain_target):
    """Prompts and transformers' own greedy 32 tokens after each."""
    prompts = [torch.tensor([prompt]) for prompt in held_out(pair.tokenizer, 4)]
    return [(prompt, plain_text(plain_target, prompt, 32)) for prompt in prompts]


@torch.no_grad()
def is_tie(model, ours, theirs):
    """True where two texts part at tokens whose logits are nearly equal."""
    n = min(ours.shape[1], theirs.shape[1])
    at = int((ours[0, :n] != theirs[0, :n]).nonzero()[0])
    logits = model(theirs[:, :at]).logits[0, -1]
    return float((logits[theirs[0, at]] - logits[ours[0, at]]).abs()) < TIE


def tokens_per_step(pair, draft, tree, model, cases):
    """Tokens a step over prompts. Our texts are those of transformers, but for one tie."""
    decoder, results, ties = SequoiaDecoder(pair.target, draft, tree), [], 0
    for prompt, theirs in cases:
        results.append(decoder.generate(prompt, 32, eos_token_id=pair.tokenizer.eos_token_id))
        if not results[-1].sequences.equal(theirs):
            assert is_tie(model, results[-1].sequences, theirs), tree
            ties += 1
    assert ties <= 1
    return sum(each.new_tokens for each in results) / sum(each.steps for each in results)


@pytest.mark.parametrize(
    ("name", "tree", "num_prompts", "least"),
    [
        ("default", TokenTree.chain(1), 1, 0.99),
        ("default", TokenTree.chain(4), 2, 0.99),
        ("default", BUSHY, 4, 1.7),  # it saves nearly half of the target's passes
        ("language model", BUSHY, 2, 1.4),
        ("int8", TokenTree.chain(4), 1, 3),
    ],
)
def test_greedy_equals_transformers(name, tree, num_prompts, least, pair, plain_target, greedy):
    """And the shipped drafts are no stubs."""
    draft = {
        "default": lambda: pair.draft,
        "language model": lambda: with_draft(pair, LANGUAGE_MODEL).draft,
        "int8": lambda: copy_in_8_bits(place(plain_target, "resident")),
    }[name]()
    cases = greedy[:num_prompts]
    assert tokens_per_step(pair, draft, tree, plain_target, cases) > least


def test_placements_that_cannot_be_are_refused():
    with pytest.raises(ArgumentError, match="'attic', expected auto, resident, fused, compiled"):
        load_pair(placement="attic")
    with pytest.raises(ArgumentError, match="placement compiled: found device cpu and draft int8"):
        load_pair(draft="int8", placement="compiled")


@pytest.mark.parametrize("draft", [None, "int8"])
def test_layers_are_fused_where_it_is_recorded(draft, pair):
    """The text and its steps are those of the layers of transformers."""
    fused, plain = pairs = [
        load_pair(draft=draft, dtype="float32", placement=placement)
        for placement in ("fused", "resident")
    ]
    assert fused.metadata["target"]["fused_layers"] == 30
    module = getattr(fused.draft, "module", fused.draft)
    assert fused.metadata["draft"]["fused_layers"] == num_fused_layers(module) > 0
    prompt = fused.tokenizer.encode("A short story about a fox and a hen.")
    first, second = (SequoiaDecoder(p.target, p.draft, BUSHY).generate(prompt, 24) for p in pairs)
    assert first.sequences.equal(second.sequences) and first.steps == second.steps
    placements = ("fused", "resident", "compiled") if draft is None else ()
    for each, placement in zip((*pairs, pair), placements, strict=False):
        models = target, draft = each.metadata["target"], each.metadata["draft"]
        assert each.placement == target["placement"] == draft["placement"] == placement
        assert all(("fused_layers" in model) == (placement == "fused") for model in models)
        is_file = placement == "compiled"  # which has the digest of all of it
        assert target.get("weights") == ("F32" if is_file else None)
        assert (target["digest"] != plain.metadata["target"]["digest"]) == is_file
        assert draft["digest"] == plain.metadata["draft"]["digest"]


@pytest.mark.parametrize("draft", [None, LANGUAGE_MODEL])
def test_streamed_from_the_packed_file(draft):
    pairs = [load_pair(draft=draft, **how) for how in ({}, {"offload": "disk", "memory": "150MB"})]
    metadata = pairs[1].metadata["target"]
    assert 0 < metadata["resident_layers"] < metadata["layers"] and not pairs[1].target.module
    prompt = held_out(pairs[0].tokenizer, 1)[0]
    texts = [SequoiaDecoder(p.target, p.draft, BUSHY).generate(prompt, 32) for p in pairs]
    assert texts[0].sequences.equal(texts[1].sequences) and texts[1].tokens_per_step > 1.4
