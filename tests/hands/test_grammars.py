"""Grammars: control tokens, vocabularies of other sizes than the head, what is not enforced."""

import json
import re

import pytest
import torch
import transformers as hf
from commands import call, succeed
from refusals import refusal

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.runtime import Grammar, SequoiaDecoder
from sequoia_plan.runtime.constraints import grammar

xgrammar = pytest.importorskip("xgrammar")
from xgrammar.testing import _is_grammar_accept_string as accepts  # noqa: E402

CHAIN = TokenTree.chain(4)
INT, TEXT = {"type": "integer"}, {"type": "string"}
REFUSED = [  # what is named, a schema, and a text of xgrammar's that it forbids
    ("minimum without a type", {"minimum": 5}, 4),
    ("minimum beside enum", {"enum": [1, 5], "minimum": 3}, 1),
    ("type beside enum|enum beside type", {**INT, "enum": [1, "a"]}, "a"),
    ("multipleOf beside|maximum beside", {**INT, "multipleOf": 7, "maximum": 50}, 8),
    ("multipleOf", {"type": "number", "multipleOf": 5}, 6),
    ("maxLength beside", {**TEXT, "pattern": "^a+$", "maxLength": 2}, "aaa"),
    ("pattern", {"pattern": "^a$"}, "b"),
    ("lookahead", {**TEXT, "pattern": "^(?!b).*$"}, "bc"),
    ("backslash", {**TEXT, "pattern": r"^a\\b$"}, '"a\\b"'),
    ("quote", {**TEXT, "pattern": '^a"b$'}, '"a"b"'),
    ("format iri", {**TEXT, "format": "iri"}, "x y"),
    ("format", {**INT, "format": "int32"}, 99999999999),
    ("maxLength", {**TEXT, "format": "date", "maxLength": 3}, "2024-01-31"),
    ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}, [1, 1]),
    ("required 'b'", {"type": "object", "properties": {"a": INT}, "required": ["b"]}, {"a": 1}),
    ("propertyNames|properties", {"type": "object", "properties": {"b": INT}, "propertyNames": {
        **TEXT, "pattern": "^a"}}, {"b": 1}),
    ("dependentRequired", {"type": "object", "properties": {"a": INT, "b": INT},
        "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ("minimum beside anyOf", {"anyOf": [INT, TEXT], "minimum": 3}, 1),
    ("oneOf", {"oneOf": [INT, {**INT, "minimum": 3}]}, 4),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}, 4),
    ("allOf", {"allOf": [{**INT, "minimum": 3}, {**INT, "maximum": 5}]}, 9),
    ("not", {**INT, "not": {"const": 1}}, 1),
    ("if", {**INT, "if": {"minimum": 3}, "then": {"minimum": 5}}, 4),
    ("minimum", {"$ref": "#/$defs/p", "minimum": 3, "$defs": {"p": INT}}, 1),
    (r"\$ref", {"$ref": "http://x/y"}, 1),
    ("not", {"type": "object", "properties": {"a": {"anyOf": [{**INT, "not": {"const": 1}}]}}},
        {"a": 1}),
]  # fmt: skip
KINDS = [
    {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in "ab"
]
ENFORCED = [  # a schema, a text of it, and one that it forbids
    ({"enum": ["a", None], "type": ["string", "null"], "default": "a"}, None, 1),
    ({"type": ["integer", "string"], "minimum": 3, "maxLength": 2}, 4, "abc"),
    ({**INT, "multipleOf": 5}, 10, 6),
    ({**TEXT, "pattern": r"^[\w.+-]+@[#-~]+$"}, "a@b", "a"),
    ({**TEXT, "format": "date"}, "2024-01-31", "x"),
    ({"type": "array", "prefixItems": [INT], "items": TEXT, "maxItems": 2}, [1, "a"], [1, 1]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"mapping": {}},
      "$defs": dict(zip("ab", KINDS, strict=True))}, {"k": "a"}, {"k": "c"}),
    ({"allOf": [INT], "title": "x", "x-order": {"not": 1}}, 1, "a"),
    ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
      "required": ["a"]}, {"a": {"a": None}}, {"a": 1}),
]  # fmt: skip


def as_text(value):
    return value if isinstance(value, str) and value[:1] == '"' else json.dumps(value)


@pytest.fixture(scope="module")
def tokenizer(pair):
    return pair.tokenizer


@pytest.mark.parametrize(("name", "schema", "text"), REFUSED)
def test_what_xgrammar_does_not_enforce_is_refused_by_name(name, schema, text, tokenizer):
    control = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert accepts(control, as_text(text)), "the control: xgrammar takes it and does not enforce it"
    with refusal(f"json_schema: found .*({name}).* not enforced", ArgumentError):
        Grammar(tokenizer, json_schema=schema)


@pytest.mark.parametrize(("schema", "text", "forbidden"), ENFORCED)
def test_what_it_enforces_is_taken(schema, text, forbidden, tokenizer):
    compiled = Grammar(tokenizer, json_schema=schema).compiled.grammar
    assert accepts(compiled, as_text(text)) and not accepts(compiled, as_text(forbidden))


@pytest.mark.parametrize(
    "source",
    [dict(json_schema=" \n"), dict(ebnf=""), dict(regex="(?=.*b)a.*"),
     dict(json_schema='{"oneOf": [true, 1]}'), dict(json_schema={"type": "object",
     "properties": []})],
)  # fmt: skip
def test_sources_without_a_meaning_are_refused(source, tokenizer):
    with refusal(r"(json_schema|grammar|regex): found ", ArgumentError):
        Grammar(tokenizer, **source)


@pytest.mark.parametrize(("option", "text"), [("--json-schema", ""), ("--grammar", "\n")])
def test_an_empty_file_is_no_free_text(option, text, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("sequoia_plan.planner.cli.decoding.load_pair", lambda **_: pair)
    (tmp_path / "source").write_text(text)
    result = call("generate", option, tmp_path / "source")
    assert result.exit_code and "found nothing" in result.stderr and not result.stdout


def test_a_byte_order_mark_is_no_part_of_a_schema(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("sequoia_plan.planner.cli.decoding.load_pair", lambda **_: pair)
    (tmp_path / "schema").write_text('{"const": 7}', "utf-8-sig")
    result = succeed("generate", "--json", "--json-schema", tmp_path / "schema")
    assert json.loads(result.stdout)["text"] == "7"


def allowed(grammar, width, ends=(2,)):
    """The tokens that may begin a text."""
    grammar.begin([], ends)
    return set((grammar([()], torch.zeros(1, width))[0] == 0).nonzero().flatten().tolist())


def test_control_tokens_are_not_the_text_that_spells_them(tokenizer):
    grammar = Grammar(tokenizer, regex="[a-z<>|_]{12}")
    control = {t for t, token in tokenizer.added_tokens_decoder.items() if token.special}
    first = allowed(grammar, len(tokenizer))
    assert tokenizer.convert_tokens_to_ids("<") in first and len(control) > 9
    assert not first & control


def small_tokenizer(vocabulary):
    """A tokenizer of words."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("width", [3, 5, 40, 41, 70])
def test_a_vocabulary_may_be_longer_than_the_head_or_have_gaps(width):
    vocabulary = {"</s>": 0, "a": 1, "b": 2, "c": 39, "x": 20}
    grammar = Grammar(small_tokenizer(vocabulary), regex="[abc]+")
    expected = {number for text, number in vocabulary.items() if text in "abc" and number < width}
    assert allowed(grammar, width, [0]) == expected


@pytest.mark.parametrize("most", [8, None])
def test_a_model_that_prefers_blanks_writes_json_all_the_same(most, pair, monkeypatch):
    """A processor puts blanks first; without a limit, xgrammar lets them go on for ever."""
    monkeypatch.setattr(grammar, "MAX_BLANKS", most)
    blanks = [pair.tokenizer.convert_tokens_to_ids(token) for token in ("\u010a", "\u0120")]

    def prefer_blanks(ids, scores):
        return scores.index_add(1, torch.tensor(blanks), torch.full((len(ids), 2), 1e4))

    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    decoder = SequoiaDecoder(pair.target, pair.draft, CHAIN, tokenizer=pair.tokenizer)
    constraint = Grammar(pair.tokenizer, json_schema=schema)
    text = decoder.generate("A:", 60, constraint=constraint, logits_processor=[prefer_blanks]).text
    longest = max(map(len, re.findall(r"\s+", text)))
    if most is None:
        assert longest > 40 and text.endswith("\n")
    else:
        assert json.loads(text) == {"a": 1} and longest == most


@pytest.mark.parametrize("end", ["<think>\n", "<think>\n\n</think>\n\n", "<no>\n"])
def test_a_grammar_begins_after_the_thought_that_a_prompt_opens(end, pair):
    """A processor dictates a thought; steps hold its end and the answer's begin."""
    prompt, thought = f"Which number?{end}", "So: 7.\n</think>" if end == "<think>\n" else ""
    script = pair.tokenizer(prompt + thought)["input_ids"]
    steps, texts = [], []

    def dictate(ids, scores):
        dictated = script[ids.shape[1] : ids.shape[1] + 1]
        return scores.index_fill(1, torch.tensor(dictated, dtype=int), 1e4)

    for tree in (TokenTree.chain(1), CHAIN):
        decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
        constraint = Grammar(pair.tokenizer, regex="[0-9]{4}")
        result = decoder.generate(prompt, constraint=constraint, logits_processor=[dictate])
        steps.append(result.steps), texts.append(result.text)
    assert texts[0] == texts[1] and re.fullmatch(re.escape(thought) + "[0-9]{4}", texts[0])
    assert steps[1] < steps[0]
