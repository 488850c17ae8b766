"""Tokenizers of GGUF files beside llama.cpp's own, on its vocabularies and texts.

`make llamacpp` builds its library and runs this; see test_llamacpp.py.
"""

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from gguf_files import write_tokenizer
from refusals import refusal
from vocabularies import ENDS, IDS

from sequoia_plan.models.files.gguf_file import read_gguf
from sequoia_plan.models.files.gguf_tokenizer import end_tokens, gguf_tokenizer

FOLDER = Path(os.environ.get("SEQUOIA_PLAN_LLAMACPP", "/none"))
VOCABULARIES = sorted(FOLDER.glob("llama_cpp_python-*/vendor/llama.cpp/models/ggml-vocab-*.gguf"))
REFUSED = ["bert-bge", "deepseek-coder", "deepseek-llm", "falcon", "nomic-bert-moe"]
SPECIAL = ["<s>a</s> b", " <|im_end|>\n", "  <|end|> x", "<eos>", "<|endoftext|>", "  Cửa Việt  "]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not VOCABULARIES, reason="needs llama.cpp: run make llamacpp"),
]


@pytest.fixture(scope="module")
def llama():
    """The library, by llama-cpp-python's declarations; what else that package needs is not here."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(FOLDER / "bin")
    sys.modules["llama_cpp"] = package = ModuleType("llama_cpp")
    package.__path__ = list(map(str, FOLDER.glob("llama_cpp_python-*/llama_cpp")))
    from llama_cpp import llama_cpp

    llama_cpp.llama_backend_init()
    return llama_cpp


def differing(llama, path, texts, tokenizer):
    """The texts whose ids differ, and whether the ends do."""
    options = llama.llama_model_default_params()
    options.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), options)
    vocabulary, found = llama.llama_model_get_vocab(model), []
    for text in texts:
        data, ids = text.encode(), (ctypes.c_int32 * 999)()
        count = llama.llama_tokenize(vocabulary, data, len(data), ids, 999, True, True)
        if tokenizer(text)["input_ids"] != ids[:count]:
            found.append(text)
    tokens = range(llama.llama_vocab_n_tokens(vocabulary))
    ends = [token for token in tokens if llama.llama_vocab_is_eog(vocabulary, token)]
    llama.llama_model_free(model)
    return found, ends != end_tokens(read_gguf(path))


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_its_vocabularies(llama, path):
    """Those that are not followed are refused; split in other ways, some texts have other ids."""
    if path.stem.removeprefix("ggml-vocab-") in REFUSED:
        with refusal("which the tokenizer would not follow"):
            gguf_tokenizer(read_gguf(path))
        return
    tokenizer, texts = gguf_tokenizer(read_gguf(path)), path.with_suffix(".gguf.inp")
    texts = texts if texts.exists() else VOCABULARIES[-1].with_suffix(".gguf.inp")
    texts = SPECIAL + texts.read_text("utf-8").split("\n__ggml_vocab_test__\n")
    assert differing(llama, path, texts, tokenizer) == ([], False)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = backend.normalizer = None
    assert differing(llama, path, texts, tokenizer)[0]


def test_our_tables(llama, tmp_path):
    for number, (base, keys, text, _) in enumerate(IDS):
        path = Path(write_tokenizer(tmp_path / f"{number}.gguf", **base | keys))
        assert differing(llama, path, [text], gguf_tokenizer(read_gguf(path))) == ([], False)
    for tokens, keys, _ in ENDS:
        path = Path(write_tokenizer(tmp_path / "m.gguf", tokens=tokens, **keys))
        assert not differing(llama, path, [], None)[1]
