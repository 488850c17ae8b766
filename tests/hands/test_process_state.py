"""Another default dtype, and threads that load at once: no model and no default changes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from architectures import tiny
from gguf_files import SIZES, is_right, write_gguf

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import SequoiaDecoder, load_pair

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]
ROPES = {
    "default": {}, "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=40),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=40),
}  # fmt: skip


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def text_and_table(model, loads_under, decodes_under, default_dtype):
    """A text and the rotary embeddings of a new decoder."""
    default_dtype(loads_under)
    decoder = SequoiaDecoder(model(), None, TokenTree.chain(1))
    default_dtype(decodes_under)
    texts = [decoder.generate([1, 2, 3], length).sequences.tolist() for length in (8, 80)]
    return texts, decoder.step.target.backend.runner.rotary


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
def test_rotary_embeddings_have_no_dtype_of_the_process(kind, other, default_dtype):
    rope = dict(rope_type=kind, rope_theta=500000.0, **ROPES[kind])
    state = tiny("Llama", **SIZES, rope_parameters=rope)

    def model():
        default_dtype(torch.float32)
        copy = tiny("Llama", **SIZES, rope_parameters=rope)
        copy.load_state_dict(state.state_dict())
        return copy

    expected, table = text_and_table(model, torch.float32, torch.float32, default_dtype)
    for dtypes in [(torch.float32, other), (other, torch.float32), (other, other)]:
        texts, other_table = text_and_table(model, *dtypes, default_dtype)
        assert texts == expected and np.array_equal(other_table, table), dtypes


def test_a_fused_pair_has_no_dtype_of_the_process(default_dtype):
    texts, digests = [], []
    for dtype in (torch.float32, torch.bfloat16):
        default_dtype(dtype)
        pair = load_pair(dtype="float32", placement="fused")
        decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.from_parents([-1, 0, 0, 1]))
        result = decoder.generate(list(range(20, 30)), 6)
        texts.append((result.sequences.tolist(), result.steps))
        digests.append(pair.metadata["draft"])
    assert texts[0] == texts[1] and digests[0] == digests[1]


@pytest.mark.parametrize("placement", ["auto", "resident", "fused"])
def test_threads_that_load_at_once_leave_the_default_dtype(placement, model, tmp_path):
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "m.gguf", model)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf").save_pretrained(tmp_path)
    sources = [str(tmp_path), str(tmp_path / "m.gguf")] * 3

    def load(number):
        dtype = "bfloat16" if number % 3 else "float32"
        return load_pair(sources[number], sources[-number], dtype=dtype, placement=placement)

    with ThreadPoolExecutor(6) as threads:
        for _ in range(3):
            pairs = list(threads.map(load, range(6)))
            assert torch.get_default_dtype() == torch.float32
            for pair in (pairs[0], pairs[3]):
                assert is_right(pair, model)
