"""A fault while decoding is reported, and leaves the decoder usable."""

from types import SimpleNamespace

import pytest
import torch
from architectures import CONTEXT, plain_text, resembling, tiny
from refusals import refusal
from toys import PLAIN, TREE, Ids, ToyModel, toy_models

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.decoding_methods import sequoia_method
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4]


each_tree = pytest.mark.parametrize("tree", [PLAIN, TokenTree.chain(6), TREE], ids=repr)
FILTERED = Sampling(1.0, 0.5, 5, 0.01, verifier="topk", draft_temperature=2.0)
SAMPLINGS = [Sampling(), Sampling(1.0), FILTERED]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_logits_that_are_not_finite_are_reported_with_their_place(role, sampling, value):
    target, draft = toy_models(2)
    decoder = SequoiaDecoder(target, draft, TREE)
    options = dict(max_new_tokens=12, sampling=sampling, seed=5)
    expected = decoder.generate(PROMPT, **options).sequences
    broken = {"target": target, "draft": draft}[role]
    healthy = broken.by_position.clone()
    tokens = slice(None) if value < 0 else 4  # -inf for some tokens is no fault
    broken.by_position[0, tokens] = value
    with refusal(rf"{role}: logits .* not finite after token \d+"):
        decoder.generate(PROMPT, **options)
    broken.by_position.copy_(healthy)
    assert decoder.generate(PROMPT, **options).sequences.equal(expected)


def test_forbidden_tokens_are_not_a_fault():
    """Models give the logit -inf to tokens that must never come."""
    target, draft = toy_models(2)
    for model in (target, draft):
        model.by_position[:, 6] = -torch.inf
    for temperature in (0.0, 1.0):
        result = SequoiaDecoder(target, draft, TREE).generate(PROMPT, 30, temperature, seed=0)
        assert 6 not in result.sequences[0, 3:].tolist()


@each_tree
@pytest.mark.parametrize("context", [9, 14, 32])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_context_is_filled_to_its_last_token(tree, context, temperature):
    """Also if the tree is larger than the rest of it: nodes beyond the end are cut off."""
    target, draft = toy_models(2, context=context)
    result = SequoiaDecoder(target, draft, tree).generate(PROMPT, 100, temperature, seed=0)
    assert result.finish_reason == "context"
    assert result.sequences.shape[1] == context
    if temperature == 0:
        assert result.sequences[0].tolist() == target.greedy_text(PROMPT, context - 3)


@each_tree
def test_learned_positions_are_never_exceeded(tree):
    """GPT-2 has no embeddings beyond its context, also for nodes of a tree that reaches there."""
    target = tiny("GPT-2")
    prompt = torch.arange(CONTEXT - 10)[None] % 90
    result = SequoiaDecoder(target, resembling(target), tree).generate(prompt, 100)
    assert result.sequences.equal(plain_text(target, prompt, 10))
    assert result.finish_reason == "context"


def test_a_draft_with_less_context_than_the_target_goes_on():
    target = ToyModel(2)
    draft = ToyModel(3, base=target, noise=0.5, context=16)
    result = SequoiaDecoder(target, draft, TREE).generate(PROMPT, 40)
    assert result.sequences[0].tolist() == target.greedy_text(PROMPT, 40)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt: empty"),
        (list(range(8)) * 8, {}, "prompt: 64 tokens, expected at most 63"),
        ([[1, 2], [3, 4]], {}, r"found int64 \[2, 2\], .* generate_each takes several"),
        (["one", "two"], {}, "generate_each takes several prompts"),
        ("text", {}, "prompt: text, but the decoder has no tokenizer"),
        # tokens that the target does not have were read as its last token
        ([5, 8, 7], {}, "found the token 8, expected 0 to 7"),
        ([5, -1, 7], {}, "found the token -1, expected 0 to 7"),
        (PROMPT, {"stop_strings": "x"}, "stop_strings: the decoder has no tokenizer"),
    ],
)
def test_requests_that_cannot_be(prompt, settings, message):
    decoder = SequoiaDecoder(*toy_models(2), TREE)
    decoder.step.target.num_embeddings = 8  # toy models have no embeddings to read it from
    with refusal(message):
        decoder.generate(prompt, **({"max_new_tokens": 4} | settings))
    assert decoder.generate(PROMPT, 20).new_tokens == 20


def test_memory_that_is_not_there():
    decoder = SequoiaDecoder(*toy_models(2, context=1 << 50), TREE)
    with refusal(r"KV cache: .* GB on cpu.* lower max_new_tokens"):
        decoder.generate(PROMPT, 1 << 45)
    text = decoder.generate(PROMPT, 20)
    assert text.new_tokens == 20
    with refusal("KV cache"):  # with a text that was to be kept
        decoder.generate(text.sequences, 1 << 45, reuse_prefix=True)
    assert decoder.generate(PROMPT, 8, reuse_prefix=True).new_tokens == 8


class Breaks:
    """A streamer that fails in its fourth call."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def put(self, tokens):
        self.calls += 1
        if self.calls == 4:
            raise self.error

    def end(self):
        raise AssertionError("nothing ended")


@pytest.mark.parametrize("error", [BrokenPipeError, KeyboardInterrupt])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_stream_leaves_the_decoder_usable(error, temperature):
    decoder = SequoiaDecoder(*toy_models(2), TREE)
    expected = decoder.generate(PROMPT, 40, temperature, seed=1).sequences
    with pytest.raises(error):
        decoder.generate([6, 6], 40, temperature, seed=2, streamer=Breaks(error()))
    assert decoder.generate(PROMPT, 40, temperature, seed=1).sequences.equal(expected)


@pytest.fixture
def target_and_text():
    """A target, and its greedy text after the prompt."""
    target = ToyModel(2)
    return target, target.greedy_text(PROMPT, 27)


def test_eos_inside_an_accepted_path(target_and_text):
    """The draft is the target, so whole paths are accepted; text and stream must end at the eos."""
    target, full = target_and_text
    eos = full[9]
    for eos_token_id in (eos, [eos], torch.tensor([eos])):
        streamer = Ids()
        result = SequoiaDecoder(target, target, TokenTree.chain(5)).generate(
            PROMPT, 20, eos_token_id=eos_token_id, streamer=streamer
        )
        assert result.sequences[0].tolist() == full[: full.index(eos, 3) + 1] == streamer.tokens
        assert result.finish_reason == "eos"


def test_what_ends_a_text_is_in_the_generation_config(target_and_text):
    """A chat model's end of turn may be only there, in a list.

    Without such a list, the tokenizer's end token counts.
    """
    target, full = target_and_text
    end_of_turn, end_of_text = full[9], full[14]
    tokenizer = SimpleNamespace(eos_token_id=end_of_text, decode=lambda tokens, **_: "")
    tree = TokenTree.chain(3)
    assert full.index(end_of_turn) != full.index(end_of_text)
    for eos_token_id, end in (([end_of_turn, 7**9], end_of_turn), (None, end_of_text)):
        target.generation_config = SimpleNamespace(eos_token_id=eos_token_id)
        expected_count = full.index(end, 3) - 2
        decoder = SequoiaDecoder(target, target, tree, tokenizer=tokenizer)
        assert decoder.generate(PROMPT, 20).new_tokens == expected_count, eos_token_id
        decode = sequoia_method(Pair(target, target, tokenizer, {}), tree, Sampling(), 20)
        assert decode(PROMPT, 0).tokens == expected_count, eos_token_id
