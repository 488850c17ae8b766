"""The decoder among transformers' own tools: generate's habits, custom_generate, quantised, sharded
and compiled models."""

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import VOCABULARY, plain_text, resembling, tiny, words
from refusals import refusal
from toys import PLAIN, TREE, text_inside_generate
from transformers import AutoModelForCausalLM, TextIteratorStreamer
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.vocabulary import check_tokenizers
from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair

IDS = torch.tensor([[5, 6, 7, 8]])
NEW = 40
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def decoder(target, draft):
    return SequoiaDecoder(target, draft, TREE, tokenizer=words())


@pytest.fixture(scope="module")
def greedy(target):
    return plain_text(target, IDS, NEW)


def test_prompts_as_people_have_them(decoder, greedy):
    text = decoder.tokenizer.decode(IDS[0])
    for prompt in (
        IDS,
        IDS[0],
        IDS.tolist(),
        IDS[0].tolist(),
        text,
        decoder.tokenizer(text, return_tensors="pt"),
    ):
        result = decoder.generate(prompt, NEW)
        assert result.sequences.equal(greedy)
        assert result.text == decoder.tokenizer.decode(greedy[0, 4:])
    inputs = decoder.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    assert decoder.generate(**inputs, max_new_tokens=NEW).sequences.equal(greedy)


def test_several_prompts_one_after_the_other(decoder):
    prompts = [IDS, [9, 9], decoder.tokenizer.decode([3, 1])]
    several = decoder.generate_each(prompts, max_new_tokens=8, temperature=1.0, seed=4)
    assert [r.sequences.tolist() for r in several] == [
        decoder.generate(p, 8, 1.0, seed=4 + i).sequences.tolist() for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("at", range(6, 30, 3))
def test_stop_strings_end_where_transformers_ends(decoder, target, greedy, at):
    """A stop string made of the end of one token and the start of the next: sometimes inside a
    step, sometimes across two."""
    stop = decoder.tokenizer.decode(greedy[0, at : at + 2])[1:3]
    stops = [stop, "zzz"]
    expected = plain_text(target, IDS, NEW, stop_strings=stops, tokenizer=decoder.tokenizer)
    result = decoder.generate(IDS, NEW, stop_strings=stops)
    assert result.sequences.equal(expected)
    assert result.finish_reason == "stop"
    assert result.text == decoder.tokenizer.decode(expected[0, 4:]).partition(stop)[0]


# custom_generate


inside = partial(text_inside_generate, ids=IDS, max_new_tokens=NEW)


def test_custom_generate_is_generate(target, draft, greedy):
    assert inside(target, draft).equal(greedy)
    assert inside(target, draft, max_new_tokens=None, max_length=4 + NEW).equal(greedy)
    assert inside(target, draft, return_dict_in_generate=True).sequences.equal(greedy)


def test_custom_generate_samples_with_the_configs_settings(target, draft, decoder):
    ours = decoder.generate(IDS, NEW, sampling=Sampling(0.7, 0.9), seed=3)
    theirs = inside(target, draft, do_sample=True, temperature=0.7, top_p=0.9, top_k=0, seed=3)
    assert ours.sequences.equal(theirs)


def test_custom_generate_streams_and_stops(target, draft, greedy):
    class Three(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 7])

    streamer = TextIteratorStreamer(words(), timeout=10)
    result = inside(
        target, draft, text_streamer=streamer, stopping_criteria=StoppingCriteriaList([Three()])
    )
    assert result.equal(greedy[:, :7])
    assert "".join(streamer).replace(" ", "") == words().decode(greedy[0, :7])


def test_custom_generate_keeps_one_decoder_and_leaks_none():
    target = tiny("GPT-2")
    draft = resembling(target)
    inside(target, draft, max_new_tokens=2)
    first = target._sequoia_decoder[2]
    inside(target, draft, max_new_tokens=2, tree=TokenTree(TREE.parents))
    assert target._sequoia_decoder[2] is first
    inside(target, draft, max_new_tokens=2, tree=TokenTree.chain(2))
    gone = [weakref.ref(x) for x in (first, target._sequoia_decoder[2], target, draft)]
    assert not any("sequoia" in name for name in target.state_dict())
    del first, target, draft
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "compiled"])
def test_a_decoder_is_copied_after_use(name, copied, pair):
    """The copy's layers must write to the blocks that its cache moves entries in."""
    target = tiny("Llama" if name == "compiled" else name)
    draft = resembling(target, 0.05)
    if name == "compiled":
        target, draft = pair.target, pair.draft  # the draft reads hidden states
    decoder = SequoiaDecoder(target, draft, TREE)
    for prompt in (IDS, IDS.repeat(1, 9)):  # the second needs larger caches
        decoder.generate(IDS, 12)
        copied_decoder = copied(decoder)
        expected = decoder.generate(prompt, 12).sequences
        assert copied_decoder.generate(prompt, 12).sequences.equal(expected)


class Adapted(torch.nn.Module):
    """What peft's `PeftModelForCausalLM` is to its users: a wrapper whose signature has no
    position_ids, around a model whose linear layers hold the adapters."""

    def __init__(self, model, is_prompt_learning=False):
        super().__init__()
        self.base_model, self.config, self.device = model, model.config, model.device
        self.active_peft_config = SimpleNamespace(
            is_prompt_learning=is_prompt_learning, peft_type="LORA"
        )

    def get_base_model(self):
        return self.base_model

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def test_a_model_with_adapters_is_unwrapped(target, draft, greedy):
    decoder = SequoiaDecoder(Adapted(target), Adapted(draft), TREE)
    assert decoder.generate(IDS, NEW).sequences.equal(greedy)


class QuantisedInputs(torch.nn.Linear):
    """A linear layer that rounds its inputs to a few steps of their maximum, over all of them."""

    def forward(self, x):
        scale = x.abs().amax() / 7
        return super().forward((x / scale).round() * scale)


def with_quantised_inputs():
    model = tiny("Llama")
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = QuantisedInputs
    return model


def covering(tokens):
    model = tiny("Llama")
    model.d2t = torch.tensor(tokens)
    return model


@pytest.mark.parametrize(
    ("role", "make", "message"),
    [
        ("target", with_quantised_inputs, "quantise its weights only, not its activations"),
        ("target", lambda: Adapted(tiny("Llama"), True), "adds tokens of its own to each prompt"),
        ("draft", lambda: tiny("Llama").to("meta"), "draft: on meta, .* move the draft there"),
        ("draft", lambda: covering([1, 2, 2]), "d2t must name each"),
        ("draft", lambda: covering([1, VOCABULARY]), "covers token 97"),
        ("draft", lambda: covering([1, 2]), "3 children of one node, more than"),
        ("draft", lambda: None, "needs a draft"),
    ],
)
def test_models_that_cannot_decode_are_refused(role, make, message, target, draft):
    models = {"target": target, "draft": draft} | {role: make()}
    with refusal(message):
        SequoiaDecoder(**models, tree=TokenTree.from_parents([-1, 0, 0, 0]))


def test_removed_hooks_come_back(pair):
    """The embedded draft reads hidden states, which hooks record."""
    target = load_pair(dtype="float32", placement="resident").target
    decoder = SequoiaDecoder(target, pair.draft, TREE)
    expected = decoder.generate(IDS, 4).sequences
    for module in target.module.modules():
        module._forward_hooks.clear()
    with refusal(r"its hooks were removed, or .*; make the decoder"):
        decoder.generate(IDS, 4)
    assert SequoiaDecoder(target, pair.draft, TREE).generate(IDS, 4).sequences.equal(expected)


def test_a_context_that_ends_early_says_why(tmp_path):
    """Keys in the cache would be wrong once such rotary embeddings change."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 40
    target = tiny("Llama", rope_parameters=rope)
    decoder = SequoiaDecoder(target, None, PLAIN)
    with refusal(r"at most 39 .*; dynamic rotary embeddings change"):
        decoder.generate(torch.ones(1, 60, dtype=torch.long), 4)
    said = "target: texts end at 40 tokens; dynamic rotary embeddings change"
    for model, number in ((target, 1), (tiny("Llama"), 0)):
        model.save_pretrained(tmp_path)
        words().save_pretrained(tmp_path)
        remarks = load_pair(str(tmp_path), "none", dtype="float32").remarks
        assert sum(remark.startswith(said) for remark in remarks) == number


# Vocabularies


def test_tokenizers_are_compared_token_by_token(target, draft):
    assert check_tokenizers(words(), words()) == VOCABULARY
    other = words({"bb": "!!", "ca": "??"})
    with refusal(r"at token 11 \(target 'bb', draft '!!'\)"):
        SequoiaDecoder(target, draft, TREE, tokenizer=words(), draft_tokenizer=other)


UNUSED = ["[PAD11]", "<unused_0>", "<|dummy_0|>", "<|reserved_special_token_247|>", "<SPECIAL_9>"]


@pytest.mark.parametrize("name", [*UNUSED, "<tool_call>", "<|fim_pad|>", "pad", "extra"])
def test_names_of_unused_tokens_may_differ(name):
    """What a text may have may not, even where one of the two is unused."""
    first, second = words({"bb": "<|extra_7|>"}), words({"bb": name})
    if name in UNUSED:
        assert check_tokenizers(first, second) == check_tokenizers(second, first) == VOCABULARY
    else:
        with refusal("differs from the target's at token 11"):
            check_tokenizers(first, second)


def resized(model, size):
    """The model with padding rows, or with its last rows cut off, as published checkpoints of one
    family differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = copy.deepcopy(model)
        other.resize_token_embeddings(size, mean_resizing=False)
    return other


@pytest.mark.parametrize("size", [VOCABULARY + 31, VOCABULARY - 7])
def test_padded_and_shorter_vocabularies(target, draft, greedy, size):
    other = resized(draft, size)
    with refusal(rf"a vocabulary of {size} tokens, .*give both"):
        SequoiaDecoder(target, other, TREE)
    decoder = SequoiaDecoder(
        target, other, TREE, tokenizer=words(), draft_tokenizer=words(count=min(size, VOCABULARY))
    )
    result = decoder.generate(IDS, NEW)
    assert result.sequences.equal(greedy)
    assert result.tokens_per_step > 1.3
    prompt = torch.tensor([[96, 95, 5, 96]])  # tokens the shorter draft cannot even read
    expected = plain_text(target, prompt, 8)
    assert decoder.generate(prompt, 8).sequences.equal(expected)


def test_a_padded_target_keeps_its_own_logits(target, draft):
    padded = resized(target, VOCABULARY + 31)
    expected = plain_text(padded, IDS, NEW)
    decoder = SequoiaDecoder(padded, draft, TREE, tokenizer=words(), draft_tokenizer=words())
    assert decoder.step.drafter.vocabulary == VOCABULARY
    assert decoder.generate(IDS, NEW).sequences.equal(expected)


def compiled(target, folder):
    return torch.compile(target, backend="eager")


def compiled_in_place(target, folder):
    target.compile(backend="eager")
    return target


def quantised(target, folder):
    return torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.float16)


def spread(target, folder):
    """By a device map, partly on the disk."""
    target.save_pretrained(folder / "model")
    on_cpu = ("embed_tokens", "layers.0", "layers.2", "norm", "rotary_emb")
    places = {f"model.{part}": "cpu" for part in on_cpu}
    spread = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        device_map={**places, "model.layers.1": "disk", "lm_head": "disk"},
        offload_folder=folder / "offload",
    )
    assert spread.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    return spread


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("load", [compiled, compiled_in_place, quantised, spread])
def test_models_as_people_load_them(load, target, draft, tmp_path):
    torch.compiler.reset()
    model = load(copy.deepcopy(target), tmp_path)
    expected = plain_text(model, IDS, 12)
    assert SequoiaDecoder(model, draft, TREE).generate(IDS, 12).sequences.equal(expected)


def test_tensor_parallel_processes_say_what_one_says(target, tmp_path):
    import tensor_parallel

    target.save_pretrained(tmp_path / "model")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(tensor_parallel.__file__).parent),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [sys.executable, *launcher, tensor_parallel.__file__, tmp_path / "model", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first.pop("overruled") == 0 < second.pop("overruled"), (
        "the second process alone would have decided otherwise"
    )
    assert first == second
    assert {*first["rows"]} == {16}, "each process holds half of the 32 query rows"
    assert first["tokens"][:2] == tensor_parallel.decode(target)[:2]
    assert first["tokens"][2] != first["tokens"][1]
