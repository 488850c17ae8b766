"""The ids of a text and its ends in GGUF files, as llama.cpp has them.

Its library gave what is expected; tests/engines/test_llamacpp_vocabularies.py asks it again.
"""

import pytest
from gguf_files import write_tokenizer
from transformers import AutoTokenizer
from vocabularies import ENDS, GPT2, IDS, LLAMA

from sequoia_plan.models.files import gguf_tokenizer
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime.text import text_ids


def ids_of(path, base, keys, text):
    """A text's ids, which are the same by the tokenizer that was saved as a folder."""
    tokenizer = find_model(write_tokenizer(path / "m.gguf", **base | keys)).tokenizer()
    tokenizer.save_pretrained(path)
    ids = tokenizer(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(path)(text)["input_ids"] == ids
    return " ".join(map(str, ids))


def ends_of(path, tokens, keys):
    """The ends of a text, which are the same whatever the tokens' types."""
    found = set()
    for kind in "134":
        kinds = " ".join(kind for _ in tokens.split())
        files = find_model(
            write_tokenizer(path / "m.gguf", tokens=tokens, token_type=kinds, **keys)
        )
        found.add(" ".join(map(str, files.generation_config().eos_token_id or ())))
    (ends,) = found
    return ends


def differing(path):
    """The cases whose ids, or ends, are others than llama.cpp's."""
    ids = [case for case in IDS if ids_of(path, *case[:-1]) != case[-1]]
    return ids + [case for case in ENDS if ends_of(path, *case[:-1]) != case[-1]]


def test_ids_and_ends_are_those_of_llama_cpp(tmp_path):
    assert differing(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ENDS", "<|im_end|> <|end|>"),
        ("ONE_OF", {"eos": ""}),
        ("DEFAULTS", {"llama": {}, "gpt2": {"pre": "default"}}),
        ("WHOLE", ""),
        ("UNSTRIPPED", "<|x|>"),
    ],
)
def test_other_tables_are_found_out(tmp_path, monkeypatch, name, wrong):
    monkeypatch.setattr(gguf_tokenizer, name, wrong)
    assert differing(tmp_path)


@pytest.mark.parametrize("base", [LLAMA, GPT2 | {"pre": "llama3"}, GPT2])
@pytest.mark.parametrize("begin", ["", "{{ bos_token }}"])
def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path, base, begin):
    template = {"tokenizer.chat_template": begin + "{{ messages[0].content }}\n"}
    tokenizer = find_model(write_tokenizer(tmp_path / "m.gguf", **base, **template)).tokenizer()
    added, bos = tokenizer("")["input_ids"], tokenizer.bos_token_id
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    assert added == ([] if base is GPT2 else [bos])
    assert text_ids(tokenizer, "a") == [*added, a]
    assert text_ids(tokenizer, "<s>a") == [bos, a] == tokenizer("<s>a")["input_ids"][len(added) :]
    assert text_ids(tokenizer, "<s><s>a") == [bos, bos, a]
    assert encode(tokenizer, "a") == [*([bos] if begin else added), a]
    assert not tokenizer.apply_chat_template([{"content": "a"}], tokenize=False).endswith("\n")
