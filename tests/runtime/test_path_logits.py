"""Logits processors and grammars on a tree's paths, log-probabilities, and texts that go on."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from architectures import plain_text
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, error_of_a_step
from spies import spy
from toys import PLAIN, SMALL_TREES, TREE, Ids, ToyModel, text_inside_generate, toy_models
from transformers.generation import logits_process as processors

from drafts import small_pair
from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime import Grammar, Sampling, SequoiaDecoder
from sequoia_plan.runtime.constraints import path_logits
from sequoia_plan.runtime.constraints.logits_processors import path_logits_of

IDS, NEW = torch.tensor([[5, 6, 7, 8]]), 24
CLOSE = dict(atol=1e-4, rtol=1e-4)  # the compiled pass against transformers
pytestmark = pytest.mark.slow


inside = partial(text_inside_generate, ids=IDS, max_new_tokens=NEW)


# the distribution


class NotAgain:
    """Forbids a token that follows itself, and one that depends on the token before it."""

    def __call__(self, ids, scores):
        last = ids[:, -1:]
        return scores.scatter(1, torch.cat([last, (last * 3 + 1) % scores.shape[1]], 1), -torch.inf)


class Forbidding(ToyModel):
    """A model whose logits have the processor's, by definition."""

    def forward(self, input_ids, **_):
        logits = super().forward(input_ids).logits
        for place in range(input_ids.shape[1]):
            logits[:, place] = NotAgain()(input_ids[:, : place + 1], logits[:, place])
        return SimpleNamespace(logits=logits)


def error(verifier, covered=None):
    """How far the distribution of a step's first tokens is from that of such a model."""
    models = toy_models(noise=0.7, covered=covered, vocabulary=4)
    decoder = SequoiaDecoder(*models, SMALL_TREES["both"])
    prompt = [3, 1, 2]
    decoder.step.sequence.path_logits = path_logits_of([NotAgain()], None, 4)
    decoder.step.sequence.path_logits.begin(prompt, ())
    sampling = Scripted(1.0, verifier=verifier)
    return error_of_a_step(decoder, prompt, sampling, Forbidding(0, vocabulary=4))


@pytest.mark.parametrize("covered", [None, [0, 2, 3]])
@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
def test_a_processor_counts_along_each_path(verifier, covered):
    """By enumeration; also with a draft that covers a part of the vocabulary."""
    assert error(verifier, covered) < 1e-6


def test_with_the_roots_state_for_all_nodes_the_law_is_another(monkeypatch):
    monkeypatch.setattr(
        "sequoia_plan.runtime.step.paths_of", lambda tokens, parents, nodes: [() for _ in nodes]
    )
    assert error("traversal") > 1e-3


def test_forbidden_children_are_not_drawn(monkeypatch):
    """Without the processor for the draft the law is the same, with fewer tokens a step."""
    target = ToyModel(0)
    decoder = SequoiaDecoder(target, target, TREE)
    options = dict(max_new_tokens=200, temperature=1.0, logits_processor=[NotAgain()])

    def num_steps():
        return sum(decoder.generate([3], seed=s, **options).steps for s in range(3))

    before = num_steps()
    monkeypatch.setattr(path_logits.PathLogits, "of_draft", lambda self, paths, logits, d2t: logits)
    assert before < num_steps()


# as transformers: each row of the table in docs/huggingface.md

FOLLOWED = {
    "repetition_penalty": 1.7,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[4, 5], [9], [60]],
    "sequence_bias": [[[9], 2.0], [[30, 9], -4.0]],
    "min_length": 12,
    "min_new_tokens": 9,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 11,
    "exponential_decay_length_penalty": (5, 1.5),
    "begin_suppress_tokens": list(range(40)),
    "suppress_tokens": list(range(60)),
    "watermarking_config": {"bias": 3.0},
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "prefix_allowed_tokens_fn": lambda batch, ids: range(batch, 10 + int(ids[-1]) % 50),
}
WARPERS = {
    "typical_p": 0.7,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02,
    "top_h": 0.6,
    "top_p": 0.7,
    "top_k": 7,
    "min_p": 0.05,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_settings_that_transformers_makes_processors_of(name, target, draft):
    options = {name: FOLLOWED[name], "eos_token_id": 11}
    expected = plain_text(target, IDS, NEW, **options)
    assert inside(target, draft, **options).equal(expected)


@pytest.mark.parametrize("name", [*WARPERS, "object", "repetition_penalty"])
def test_scores_are_those_of_transformers(name, target, draft):
    """Of a sampled text."""
    options = dict(do_sample=True, temperature=0.9, top_k=0, output_scores=True)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    if name == "object":
        options["logits_processor"] = [processors.TopKLogitsWarper(5)]
    else:
        options[name] = (WARPERS | FOLLOWED)[name]
    ours = inside(target, draft, seed=3, **options)

    logits = target(ours.sequences[:, :-1]).logits[0, 3:]
    assert len(ours.scores) == len(ours.logits) == NEW == len(logits)
    torch.testing.assert_close(torch.cat(ours.logits), logits, **CLOSE)
    own = hf.LogitsProcessorList(options.pop("logits_processor", []))
    config = hf.GenerationConfig(**options)
    made = target._get_logits_processor(config, input_ids_seq_length=4, logits_processor=own)
    for place, scores in enumerate(ours.scores):
        expected = made(ours.sequences[:, : 4 + place], logits[place : place + 1].clone())
        torch.testing.assert_close(scores, expected, **CLOSE)
        assert scores[0, ours.sequences[0, 4 + place]] > -torch.inf


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.8)], ids=str)
def test_log_probabilities_are_those_of_plain_decoding(sampling, target, draft):
    options = dict(max_new_tokens=NEW, sampling=sampling, seed=1, logprobs=3)
    result = SequoiaDecoder(target, draft, TREE).generate(IDS, **options)
    plain = SequoiaDecoder(target, None, PLAIN).generate(IDS, **options)
    if sampling.greedy:
        torch.testing.assert_close(result.logprobs, plain.logprobs, **CLOSE)
    with torch.no_grad():
        logits = target(result.sequences[:, :-1].clone()).logits[0, 3:]
    expected = sampling.scores(logits).log_softmax(-1)
    torch.testing.assert_close(
        result.logprobs, expected.gather(1, result.sequences[0, 4:, None])[:, 0], **CLOSE
    )
    torch.testing.assert_close(result.top_logprobs, expected.topk(3).values, **CLOSE)
    assert result.top_tokens.shape == (NEW, 3) and result.scores is result.logits is None


# grammars, with the real pair

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def decoders(pair):
    pytest.importorskip("xgrammar")
    return [
        SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
        for tree in (TREE, PLAIN)
    ]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_grammar_shapes_the_text(decoders, temperature):
    tree, plain = decoders
    constraint = Grammar(tree.tokenizer, json_schema=SCHEMA)
    options = dict(max_new_tokens=96, temperature=temperature, constraint=constraint)
    for seed, prompt in enumerate(["A person as JSON:", "Somebody:"]):
        result = tree.generate(prompt, seed=seed, **options)
        if result.finish_reason == "eos":
            person = json.loads(result.text)
            assert set(person) == {"name", "age"} and isinstance(person["age"], int)
        if not temperature:
            assert result.sequences.equal(plain.generate(prompt, **options).sequences)


def test_a_regular_expression_and_a_grammar_in_its_own_notation(decoders):
    tree, _ = decoders
    number = Grammar(tree.tokenizer, regex=r"[0-9]{3}-[0-9]{4}")
    assert [*map(len, tree.generate("Call", constraint=number).text.split("-"))] == [3, 4]
    yes = Grammar(tree.tokenizer, ebnf='root ::= "yes" | "no"')
    assert tree.generate("Is it?", constraint=yes, temperature=2.0).text in ("yes", "no")


def test_texts_that_share_a_grammar_do_not_share_its_state(decoders):
    """Another decoder generates with it while the first is in the middle of a text."""
    tree, plain = decoders
    options = dict(max_new_tokens=48, constraint=Grammar(tree.tokenizer, json_schema=SCHEMA))
    expected = tree.generate("JSON:", **options).sequences

    class Meanwhile(Ids):
        def put(self, value):
            plain.generate("Somebody:", **options | dict(max_new_tokens=3))

    assert tree.generate("JSON:", streamer=Meanwhile(), **options).sequences.equal(expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (dict(regex="(["), r"regex: found \(\[: Regex parsing error"),
        (dict(json_schema="{"), r"json_schema: found \{: \w"),
        (dict(json_schema=SCHEMA, regex="a"), "found json_schema, regex, expected one of"),
        ({}, "grammar: found none, expected one of"),
    ],
)
def test_grammars_that_are_refused(decoders, source, message):
    with pytest.raises(ArgumentError, match=message):
        Grammar(decoders[0].tokenizer, **source)


# a text that goes on

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.lists(st.integers(0, 90), min_size=1, max_size=20)),
        st.tuples(st.just("generate"), st.integers(1, 20)),
        st.tuples(st.just("rewind"), st.integers(0, 60)),
    ),
    min_size=3,
    max_size=8,
)


GOING_ON = ("language model", "MTP", "EAGLE-3", "DFlash 2", "compiled")


@pytest.fixture(scope="module", params=GOING_ON)
def going_on(request):
    """Two decoders of the same models: one for texts that go on, one that reads them anew."""
    if request.param == "compiled":
        pair = request.getfixturevalue("pair")
        models = pair.target, pair.draft
    else:
        models = small_pair(request.param, vocabulary=96)
    return [SequoiaDecoder(*models, TREE) for _ in range(2)]


@settings(max_examples=20)
@given(MOVES, st.sampled_from([0.0, 0.8]))
def test_a_text_that_goes_on_is_what_reading_it_anew_gives(going_on, moves, temperature):
    """Also in its number of steps: the draft is as good as a freshly primed one."""
    decoder, fresh = going_on
    session = decoder.start([1, 2, 3])
    for seed, (move, value) in enumerate(moves):
        if move == "say":
            session.say(value)
        elif move == "rewind":
            session.rewind(min(value, len(session.ids) - 1))
        else:
            before = list(session.ids)
            options = dict(temperature=temperature, seed=seed, eos_token_id=())
            result = session.generate(value, **options)
            expected = fresh.generate(before, value, **options)
            assert result.sequences.equal(expected.sequences)
            assert result.steps == expected.steps
            assert decoder.step.sequence.num_read >= len(before) - 1


def test_only_what_is_new_is_read(going_on, monkeypatch):
    decoder, _ = going_on
    session, widths = decoder.start([1, 2, 3] * 20), []
    target = decoder.step.target

    def count(model, cache, tokens, *_, **options):
        widths.append((model is target) * tokens.numel())

    spy(monkeypatch, type(target), "__call__", count)
    session.generate(8, eos_token_id=())
    session.say([4, 5])
    widths.clear()
    session.generate(8, eos_token_id=())
    assert max(widths) <= TREE.size  # three tokens are new, one of them the root
    if target.module is None:
        return  # a file's weights do not change
    decoder.refresh()
    session.generate(8, eos_token_id=())
    assert max(widths) > 60
