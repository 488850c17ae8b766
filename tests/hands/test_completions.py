"""What a user stumbles over: swapped models, a text's first space, prompts without a template."""

import json

import pytest
from architectures import tiny
from commands import call, succeed
from gguf_files import SIZES, write_gguf, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from toys import PLAIN, toy_decoder
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.text import NewText, TextBefore


@pytest.mark.parametrize("swapped", [True, False])
def test_a_draft_that_is_larger_than_its_target_is_remarked_on(swapped, tmp_path, own_cache):
    paths = [
        write_gguf(
            tmp_path / f"{layers}.gguf", tiny("Llama", **SIZES | dict(num_hidden_layers=layers))
        )
        for layers in (4, 2)
    ]
    pair = load_pair(*(paths[::-1] if swapped else paths))
    assert any("swap them?" in remark for remark in pair.remarks) == swapped


def test_a_text_keeps_the_space_before_its_first_word():
    backend = Tokenizer(models.WordLevel({f"▁{letter}": n for n, letter in enumerate("abcdefgh")}))
    backend.decoder = decoders.Metaspace()
    decoder = toy_decoder(TokenTree.chain(3))
    decoder.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    result = decoder.generate([1, 2], 5, eos_token_id=())
    words = ["abcdefgh"[token] for token in result.sequences[0, 2:]]
    assert result.text == "".join(f" {word}" for word in words)


TEXTS = ["  ", " a", "\n", "é", " ", "b", "   ", ""]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer of SentencePiece's kind; the toy models have its first eight tokens."""
    keys = {"tokens": "▁▁ ▁a <0x0A> é ▁ b ▁▁▁ <s> <0xC3> <0xA9>", "scores": "0 0 0 0 0 0 0 0 0 0"}
    keys |= {"token_type": "1 1 6 1 1 1 1 3 6 6", "bos_token_id": 7, "eos_token_id": 7}
    path = write_tokenizer(tmp_path_factory.mktemp("pieces") / "m.gguf", model="llama", **keys)
    return find_model(path).tokenizer()


class ItsOwn(TextIteratorStreamer):
    def put(self, value):
        """Decode as transformers does."""
        super().put(value)


@pytest.mark.parametrize("depth", [1, 4])
def test_streamed_text_is_the_text(pieces, depth):
    """With all spaces: after BOS, at the begin of a line, and several."""
    decoder, differing = toy_decoder(TokenTree.chain(depth)), 0
    decoder.tokenizer = pieces
    for seed, prompt in enumerate([[7], [1, 7], [2], [6, 3], [1, 4]] * 3):
        for kind in (TextIteratorStreamer, ItsOwn):
            streamer = kind(pieces, skip_prompt=True, skip_special_tokens=True)
            result = decoder.generate(
                prompt, 24, 1.5, seed=seed, eos_token_id=(), streamer=streamer
            )
            new = result.sequences[0, len(prompt) :].tolist()
            assert result.text == "".join(TEXTS[token] for token in new)
            is_same = "".join(streamer) == result.text
            assert is_same or kind is ItsOwn
            differing += not is_same
    assert differing
    streamer = TextIteratorStreamer(pieces)
    text = decoder.generate([1, 2], 9, streamer=streamer).text
    assert "".join(streamer) == f"a\n{text}"


def test_characters_that_tokens_split(pieces):
    for prompt, tokens, parts in (
        ([7], [8, 9, 5], ["", "é", "b"]),
        ([8], [9], ["é"]),
        ([5], [8], [""]),
    ):
        text = NewText(pieces, prompt, {})
        assert [text.add([token]) for token in tokens] == parts
        assert text.rest() == ("" if parts[-1] else "\ufffd")


LETTERS = st.text("ab", min_size=1, max_size=4)


@given(st.lists(LETTERS, max_size=3), st.lists(LETTERS, max_size=6))
def test_the_first_complete_string_ends_a_text_however_it_comes(strings, parts):
    before, text, expected = TextBefore(strings), "".join(parts), "".join(parts)
    known = "".join(map(before.add, parts)) + before.waiting
    for end in range(len(text), 0, -1):
        if found := [string for string in strings if text[:end].endswith(string)]:
            expected = text[: end - len(max(found, key=len))]
    assert known == expected


def test_text_that_goes_on_gets_no_space(pieces):
    decoder = toy_decoder(PLAIN)
    decoder.tokenizer = pieces
    session = decoder.start([5])
    session.say(" b")
    assert session.ids == [5, 4, 5]


def test_raw_prompts_have_no_template(pair, monkeypatch):
    monkeypatch.setattr("sequoia_plan.planner.cli.decoding.load_pair", lambda **_: pair)
    options = (
        "generate",
        "--json",
        "--max-new-tokens",
        "8",
        "--prompt",
        "The capital of France is",
    )
    raw, chat = (json.loads(succeed(*options, *more).stdout) for more in (["--raw"], []))
    plain = SequoiaDecoder(pair.target, None, PLAIN, tokenizer=pair.tokenizer)
    expected = plain.generate(options[-1], 8)
    assert raw["tokens"] == expected.sequences[0, -8:].tolist() != chat["tokens"]
    assert raw["text"] == expected.text and raw["text"].startswith(" ")
    assert succeed("generate", "--raw", *options[2:]).stdout == raw["text"] + "\n"
    assert call("generate", "--raw", "--interactive").exit_code == 2
