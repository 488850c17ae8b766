"""What a user stumbles over: swapped models, a text's first space, prompts without a template."""

import json

import pytest
from architectures import tiny
from commands import call, succeed
from gguf_files import SIZES, write_gguf
from tokenizers import Tokenizer, decoders, models
from toys import toy_decoder
from transformers import PreTrainedTokenizerFast

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import SequoiaDecoder, load_pair


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
    plain = SequoiaDecoder(pair.target, None, TokenTree.chain(1), tokenizer=pair.tokenizer)
    expected = plain.generate(options[-1], 8)
    assert raw["tokens"] == expected.sequences[0, -8:].tolist() != chat["tokens"]
    assert raw["text"] == expected.text and raw["text"].startswith(" ")
    assert call("generate", "--raw", "--interactive").exit_code == 2
