"""The Python API given what it cannot use: nothing is ignored silently."""

import pytest
import torch
from architectures import TREE, resembling, tiny
from refusals import refusal
from transformers import DynamicCache

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.runtime import Sampling, SequoiaDecoder, sequoia

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def models():
    target = tiny("GPT-2")  # it takes token_type_ids
    return target, resembling(target)


@pytest.fixture(scope="module")
def decoder(models):
    return SequoiaDecoder(*models, TREE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(target="gpt2"), "target: found 'gpt2', expected a loaded model"),
        (dict(draft="gpt2"), "draft: found 'gpt2', expected a loaded model"),
        (dict(tree="tree.safetensors"), "tree: found 'tree.safetensors', expected a TokenTree"),
        (dict(captured=True), "captured: found True, and CUDA graphs need a CUDA device"),
    ],
)
def test_what_a_decoder_is_made_of(models, changes, message):
    arguments = dict(target=models[0], draft=models[1], tree=TREE) | changes
    with refusal(message, ArgumentError):
        SequoiaDecoder(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(
            ({name: value}, ArgumentError, f"{name}: found {value!r}, expected a whole number")
            for name in ("max_new_tokens", "seed", "logprobs")
            for value in (2.5, "3", True, -(2**70))
        ),
        (dict(eos_token_id="</s>"), TypeError, "'str' object cannot be interpreted"),
        (dict(stop_strings=[5]), ArgumentError, "stop_strings: found .5., expected text, or"),
        (dict(input_ids=None), ArgumentError, "input_ids: found None, expected text or token ids"),
        (dict(input_ids=[2**70]), ArgumentError, "input_ids: found .118.*, expected text or token"),
        (dict(input_ids=IDS[None]), ArgumentError, "input_ids: found int64 .1, 1, 4., expected"),
        (dict(attention_mask=torch.ones(1, 6)), SequoiaPlanError, "found 6 entries, .* expected 4"),
        (
            dict(input_ids={"input_ids": IDS}, attention_mask=torch.zeros(1, 4)),
            SequoiaPlanError,
            "attention_mask: found 4 entries, 4 of them hide tokens",
        ),
    ],
)
def test_arguments_of_generate(decoder, arguments, error, message):
    with pytest.raises(error, match=message):
        decoder.generate(**(dict(input_ids=IDS, max_new_tokens=4) | arguments))


def test_without_a_limit_a_text_fills_the_context(decoder):
    result = decoder.generate(IDS, None, eos_token_id=())
    assert result.sequences.shape[1] == decoder.step.target.context
    assert result.finish_reason == "context"


@pytest.mark.parametrize("reuse_prefix", [True, False])
def test_no_new_tokens_reads_the_prompt_alone(decoder, monkeypatch, reuse_prefix):
    """The next text goes on from there; without `reuse_prefix`, it reads everything again."""
    expected = decoder.generate(IDS, 8).sequences
    decoder.step.sequence.forget()
    empty = decoder.generate(IDS, 0, logprobs=1)
    assert (empty.new_tokens, empty.steps, empty.finish_reason) == (0, 0, "length")
    assert empty.sequences.tolist() == IDS.tolist() and empty.logprobs is None
    starts, prefill = [], LoadedModel.prefill

    def spy(self, cache, tokens, on_chunk=None, start=0, hidden_states=()):
        starts.append(start)
        prefill(self, cache, tokens, on_chunk, start, hidden_states)

    monkeypatch.setattr(LoadedModel, "prefill", spy)
    assert decoder.generate(IDS, 8, reuse_prefix=reuse_prefix).sequences.equal(expected)
    assert max(starts) == reuse_prefix * (IDS.numel() - 1)


def test_several_prompts_are_a_list(decoder):
    with refusal("prompts: found 'text', expected a list", ArgumentError):
        decoder.generate_each("text")


OTHER_INPUTS = [
    (dict(position_ids=IDS), "position_ids: found .* would ignore it"),
    (dict(token_type_ids=torch.zeros_like(IDS)), "token_type_ids: .* would ignore it"),
    (dict(inputs_embeds=torch.zeros(1, 4, 32)), "inputs_embeds: .* would ignore it"),
]


@pytest.mark.parametrize(("inputs", "message"), OTHER_INPUTS)
def test_inputs_of_the_model_in_a_dictionary(decoder, inputs, message):
    with refusal(message, ArgumentError):
        decoder.generate({"input_ids": IDS} | inputs, 4)


def test_what_makes_no_difference_is_taken(decoder):
    expected = decoder.generate(IDS, 4).sequences
    for positions in (torch.arange(4), torch.arange(4)[None]):
        inputs = {"position_ids": positions, "labels": IDS, "offset_mapping": [(0, 1)]}
        assert decoder.generate({"input_ids": IDS} | inputs, 4).sequences.equal(expected)
    target = tiny("Llama")  # takes no token types, but tokenizers return zeros for it
    typed = SequoiaDecoder(target, resembling(target), TREE)
    with_zeros = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}
    typed.generate(with_zeros, 4)
    with refusal(r"token_type_ids: .* would ignore it", ArgumentError):
        typed.generate(with_zeros | {"token_type_ids": torch.ones_like(IDS)}, 4)


def with_cache(model):
    cache = DynamicCache()
    model(IDS, past_key_values=cache)
    return dict(ids=IDS.repeat(1, 2), past_key_values=cache)


class Counting:
    """A processor that gives other scores each time."""

    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores + self.calls


class Keeping:
    """A processor that keeps what it was given, and changes nothing."""

    def __init__(self):
        self.seen = []

    def __call__(self, ids, scores):
        self.seen.append(ids)
        return scores


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *OTHER_INPUTS,
        (dict(attention_mask=torch.ones(1, 6)), "masks of another length|found 6 entries"),
        (dict(ids=IDS.float()), "input_ids: found float32"),
        (dict(tree=None), "tree: found None, expected a TokenTree"),
        (dict(draft="x"), "draft: found 'x', expected a loaded model"),
        (with_cache, r"(cache|past_key_values): .* would ignore it"),
        (dict(num_beams=2), "num_beams: found 2, "),
        (
            dict(num_return_sequences=2, do_sample=True, top_k=0, output_logits=True),
            "num_return_sequences: found 2",
        ),
        (dict(logits_processor=[Counting()]), "Counting changes from call to call"),
        (dict(logits_processor=[Keeping()]), "Keeping changes from call to call"),
        (dict(logits_processor=[lambda ids, scores: scores - torch.inf]), "left no token after"),
        (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens: found 3"),
        (dict(guidance_scale=2.0), "UnbatchedClassifierFreeGuidance.* changes from call to call"),
        (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions: found"),
        (dict(output_hidden_states=True), "output_hidden_states: found True"),
        (dict(attention_mask=torch.tensor([[0, 1, 1, 1]])), "attention_mask: .* hide tokens"),
        (dict(ids=IDS.repeat(2, 1)), r"found int64 \[2, 4\], .* generate_each takes"),
    ],
)
def test_arguments_of_custom_generate(models, settings, message):
    target, draft = models
    settings = settings(target) if callable(settings) else settings
    settings = dict(draft=draft, tree=TREE, max_new_tokens=4, do_sample=False) | settings
    with refusal(message):
        target.generate(settings.pop("ids", IDS), custom_generate=sequoia, **settings)


def test_a_step_by_hand_and_then_generate(models):
    """Outside of inference mode, before and after memory was allocated inside of it."""
    expected = SequoiaDecoder(*models, TREE).generate(IDS, 8).sequences
    decoder = SequoiaDecoder(*models, TREE)
    for _ in range(2):  # the first round allocates the memory outside, the second finds it
        decoder.step.prefill(IDS[0], 8, seed=0)
        added = decoder.step(decoder.step.extent(3), Sampling())
        tokens = added[1 + TREE.depth :][: int(added[0])]
        assert tokens.equal(expected[0, 4 : 4 + tokens.numel()])
        assert decoder.generate(IDS.repeat(1, 8), 80).sequences.numel() == 32 + 80  # larger memory
        assert decoder.generate(IDS, 8).sequences.equal(expected)
