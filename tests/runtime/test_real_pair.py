"""The embedded pair, in float32: what we generate is what transformers generates."""

import re

import pytest
import torch
from architectures import plain_text
from refusals import refusal
from toys import PLAIN

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.models.layers.fuse import num_fused_layers
from sequoia_plan.models.offload.memory import cache_bytes, own_bytes
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.pair import INT8, LANGUAGE_MODEL, add_draft

pytestmark = pytest.mark.slow

BUSHY = TokenTree([-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 9])
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


def tokens_per_step(pair, tree, model, cases):
    """Tokens a step over prompts. Our texts are those of transformers, but for one tie."""
    decoder, results, ties = SequoiaDecoder(pair.target, pair.draft, tree), [], 0
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
        ("default", PLAIN, 1, 0.99),
        ("default", TokenTree.chain(4), 2, 0.99),
        ("default", BUSHY, 4, 1.7),  # it saves nearly half of the target's passes
        ("language model", BUSHY, 2, 1.4),
        ("int8", TokenTree.chain(4), 1, 3),
    ],
)
def test_greedy_equals_transformers(name, tree, num_prompts, least, pair, plain_target, greedy):
    """And the shipped drafts are no stubs."""
    if name == "language model":
        pair = add_draft(pair, LANGUAGE_MODEL, Loading("resident", dtype="float32"))
    elif name == "int8":
        pair = load_pair(draft=INT8, dtype="float32")
    assert tokens_per_step(pair, tree, plain_target, greedy[:num_prompts]) > least


def test_placements_that_cannot_be_are_refused():
    with refusal("'attic', expected auto, resident, fused, compiled", ArgumentError):
        load_pair(placement="attic")


@pytest.mark.parametrize("draft", [None, LANGUAGE_MODEL])
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


def streamed_pair(message="at least", **options):
    """A pair with some layers of its target in memory, whatever the draft's dtype is here."""
    options["offload"] = "disk"
    with refusal(message) as refused:
        load_pair(**options, memory=1)
    least = float(re.search(r"at least (\S+) MB", str(refused.value))[1])
    pair = load_pair(**options, memory=f"{least + 40}MB")
    metadata = pair.metadata["target"]
    assert 0 < metadata["resident_layers"] < metadata["layers"]
    return pair


@pytest.mark.parametrize("draft", [None, LANGUAGE_MODEL])
def test_streamed_from_the_packed_file(draft):
    pairs = [load_pair(draft=draft), streamed_pair(draft=draft)]
    assert not pairs[1].target.module
    prompt = held_out(pairs[0].tokenizer, 1)[0]
    texts = [SequoiaDecoder(p.target, p.draft, BUSHY).generate(prompt, 32) for p in pairs]
    assert texts[0].sequences.equal(texts[1].sequences) and texts[1].tokens_per_step > 1.4


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_copy_in_8_bits_drafts_the_targets_own_text(dtype):
    """It is a language model like others, with all that takes, also beside a streamed target."""
    in_memory = load_pair(draft=INT8, dtype=dtype)
    assert in_memory.metadata["draft"]["name"] == "SmolLM2-135M-Instruct int8"
    assert in_memory.metadata["draft"]["weights"] == "Q8_0"
    streamed = streamed_pair("173 MB for the draft", draft=INT8, dtype=dtype)
    placement = streamed.metadata["target"]
    assert placement["draft_bytes"] == own_bytes(streamed.draft, streamed.target)
    assert placement["cache_bytes"] == 2 * cache_bytes(streamed.target)
    prompts = held_out(in_memory.tokenizer, 2)
    plain = SequoiaDecoder(in_memory.target, None, PLAIN)
    texts = [plain.generate(prompt, 32).sequences for prompt in prompts]
    for pair in (in_memory, streamed):
        decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(4))
        for prompt, text in zip(prompts, texts, strict=True):
            result = decoder.generate(prompt, 32)
            assert result.sequences.equal(text) and result.tokens_per_step > 3.5
        assert decoder.step.models.compiled_step


@pytest.mark.parametrize("options", [{"placement": "fused"}, {"offload": "disk"}, {}])
def test_a_target_that_pytorch_runs_has_no_copy_in_8_bits(options, folder):
    """Heads of the folder's target are too small to be compiled."""
    target = None if "placement" in options else str(folder / "target")
    with refusal(r"draft int8: \S+ is run by PyTorch.*or none to look", ArgumentError):
        load_pair(target, INT8, dtype="float32", **options)
    pair = load_pair(target, "none", dtype="float32")
    with refusal(r"draft int8: .* is run by PyTorch", ArgumentError):
        add_draft(pair, INT8, Loading("resident", dtype="float32"))
