"""The Python API given what it cannot use: one clear error, and nothing is ignored silently."""

from __future__ import annotations

import pytest
import torch
from architectures import TREE, resembling, tiny
from transformers import DynamicCache

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.runtime import Sampling, SequoiaDecoder, sequoia

IDS = torch.tensor([[5, 6, 7, 8]])
pytestmark = pytest.mark.usefixtures("one_thread")


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
        (dict(target=None), "target: found None, expected a loaded model"),
        (dict(target=torch.nn.Linear), "target: found <class .*, expected a loaded model"),
        (dict(draft="gpt2"), "draft: found 'gpt2', expected a loaded model"),
        (dict(tree="tree.safetensors"), "tree: found 'tree.safetensors', expected a TokenTree"),
        (dict(tree=None), "tree: found None, expected a TokenTree"),
        (dict(tree=[-1, 0]), r"tree: found \[-1, 0\], expected a TokenTree"),
        (dict(tokenizer="gpt2"), "tokenizer: found 'gpt2', expected a loaded one"),
        (dict(compile="nope"), "compile: found 'nope', expected .*inductor"),
        (dict(compile=5), "compile: found 5, expected True, False or a backend"),
        (dict(captured=True), "captured: found True, and CUDA graphs need a CUDA device"),
    ],
)
def test_what_a_decoder_is_made_of(models, changes, message):
    arguments = dict(target=models[0], draft=models[1], tree=TREE) | changes
    with pytest.raises(ArgumentError, match=message):
        SequoiaDecoder(**arguments)


def test_another_tree(decoder):
    with pytest.raises(ArgumentError, match="tree: found 'chain', expected a TokenTree"):
        decoder.with_tree("chain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_new_tokens=None), "max_new_tokens: found None, expected a whole number, 1 or"),
        (dict(max_new_tokens=4.5), "max_new_tokens: found 4.5, expected a whole number"),
        (dict(max_new_tokens=0), "max_new_tokens: found 0, expected a whole number"),
        (dict(seed=1.5), "seed: found 1.5, expected a whole number, "),
        (dict(seed=2**70), "seed: found 1180591620717411303424, expected a whole number, "),
        (dict(seed="1"), "seed: found '1', expected a whole number, "),
        (dict(eos_token_id="</s>"), "eos_token_id: found '</s>', expected a whole number"),
        (dict(eos_token_id=[1, None]), "eos_token_id: found None, expected a whole number"),
        (dict(eos_token_id=torch.tensor([1.5])), "eos_token_id: found 1.5, expected a whole"),
        (dict(stop_strings=5), "stop_strings: found 5, expected text, or a list of texts"),
        (dict(stop_strings=[5]), r"stop_strings: found \[5\], expected text, or a list of texts"),
        (dict(sampling="greedy"), "sampling: found 'greedy', expected a Sampling"),
        (dict(streamer=5), "streamer: found 5, expected an object with put"),
        (dict(stopping_criteria=5), "stopping_criteria: found 5, expected a list of functions"),
        (dict(stopping_criteria=[5]), r"stopping_criteria: found \[5\], expected a list of"),
        (dict(input_ids=None), "input_ids: found None, expected text or token ids"),
        (dict(input_ids=["ab"]), r"input_ids: found \['ab'\], expected text or token ids"),
        (dict(input_ids=[2**70]), r"input_ids: found \[118.*, expected text or token ids"),
        (dict(input_ids=b"ab"), "input_ids: found b'ab', expected text or token ids"),
        (dict(input_ids=5), r"input_ids: found int64 \[\], expected whole numbers, \[tokens\]"),
        (dict(input_ids=IDS[None]), r"input_ids: found int64 \[1, 1, 4\], expected whole numbers"),
        (dict(input_ids=IDS.float()), r"input_ids: found float32 \[1, 4\], expected whole numbers"),
        (dict(input_ids=[1.5, 2.5]), r"input_ids: found float32 \[2\], expected whole numbers"),
        (dict(input_ids=IDS > 5), r"input_ids: found bool \[1, 4\], expected whole numbers"),
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask: found 6 entries, expected 4"),
        (dict(attention_mask="x"), "attention_mask: found 0 entries, expected 4"),
        (
            dict(input_ids={"input_ids": IDS}, attention_mask=torch.zeros(1, 4)),
            "attention_mask: hides tokens",
        ),
        (
            dict(input_ids={"input_ids": IDS, "attention_mask": [1, 1, 1]}),
            "attention_mask: found 3 entries, expected 4",
        ),
        (dict(input_ids={}), "input_ids: found None, expected text or token ids"),
    ],
)
def test_arguments_of_generate(decoder, arguments, message):
    with pytest.raises(SequoiaPlanError, match=message):
        decoder.generate(**(dict(input_ids=IDS, max_new_tokens=4) | arguments))


def test_arguments_of_several_prompts(decoder):
    with pytest.raises(ArgumentError, match="seed: found 'x', expected a whole number"):
        decoder.generate_each([IDS], seed="x")
    for prompts in (5, "text"):
        with pytest.raises(ArgumentError, match=f"prompts: found {prompts!r}, expected a list"):
            decoder.generate_each(prompts)


def test_a_verifier_that_is_no_text():
    with pytest.raises(ArgumentError, match=r"verifier: found \['sequoia'\], expected sequoia"):
        Sampling(verifier=["sequoia"])


OTHER_INPUTS = [
    (dict(position_ids=IDS), r"position_ids: found \[5, 6, 7, 8\], expected 0 to 3; leave them"),
    (dict(token_type_ids=torch.zeros_like(IDS)), "token_type_ids: decoding .* would ignore it"),
    (dict(inputs_embeds=torch.zeros(1, 4, 32)), "inputs_embeds: decoding .* would ignore it"),
]


@pytest.mark.parametrize(("inputs", "message"), OTHER_INPUTS)
def test_inputs_of_the_model_in_a_dictionary(decoder, inputs, message):
    with pytest.raises(ArgumentError, match=message):
        decoder.generate({"input_ids": IDS} | inputs, 4)


def test_what_makes_no_difference_is_taken(models, decoder):
    expected = decoder.generate(IDS, 4).sequences
    inputs = {"position_ids": torch.arange(4)[None], "labels": IDS, "offset_mapping": [(0, 1)]}
    assert decoder.generate({"input_ids": IDS} | inputs, 4).sequences.equal(expected)
    target = tiny("Llama")  # takes no token types, but tokenizers return zeros for it
    typed = SequoiaDecoder(target, resembling(target), TREE)
    with_zeros = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}
    typed.generate(with_zeros, 4)
    with pytest.raises(ArgumentError, match=r"token_type_ids: decoding .* would ignore it"):
        typed.generate(with_zeros | {"token_type_ids": torch.ones_like(IDS)}, 4)


def inside(models, **settings):
    target, draft = models
    settings = dict(draft=draft, tree=TREE, max_new_tokens=4, do_sample=False) | settings
    return target.generate(settings.pop("ids", IDS), custom_generate=sequoia, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *OTHER_INPUTS,
        # the first message is that of transformers 5.10
        (
            dict(attention_mask=torch.ones(1, 6)),
            "attention_mask: found 6 entries|position_ids: found .* masks of another length",
        ),
        (dict(ids=IDS.float()), "input_ids: found float32"),
        (dict(tree="x"), "tree: found 'x', expected a TokenTree"),
        (dict(draft="x"), "draft: found 'x', expected a loaded model"),
    ],
)
def test_arguments_of_custom_generate(models, settings, message):
    with pytest.raises(ArgumentError, match=message):
        inside(models, **settings)


def test_custom_generate_refuses_a_cache_that_has_tokens(models):
    cache = DynamicCache()
    models[0](IDS, past_key_values=cache)
    with pytest.raises(ArgumentError, match=r"(cache|past_key_values): .* would ignore it"):
        inside(models, ids=IDS.repeat(1, 2), past_key_values=cache)


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


def test_a_tokenizer_and_stop_strings_of_other_types(models, decoder):
    with pytest.raises(ArgumentError, match="tokenizer: found 5, expected a loaded one"):
        SequoiaDecoder(*models, TREE, tokenizer=5)
    with pytest.raises(ArgumentError, match="stop_strings: found tensor"):
        decoder.generate(IDS, 4, stop_strings=IDS)
