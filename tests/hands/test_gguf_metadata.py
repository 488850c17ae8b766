"""What a GGUF file says of its tokenizer and of its model's constants counts, or is refused."""

import pytest
from gguf_files import config_of, is_right, write_gguf, write_tokenizer
from refusals import refusal

from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.runtime import load_pair

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "bert"),
        ("pre", "nobody-knows"),
        ("remove_extra_whitespaces", True),
        ("nobody_knows", "x"),
    ],
)
def test_a_key_of_the_tokenizer_that_nobody_follows_is_named(tmp_path, key, value):
    path = write_tokenizer(tmp_path / "m.gguf", **{key: value})
    with refusal(f"m.gguf: tokenizer.ggml.{key} is {value!r}"):
        find_model(path).tokenizer()


def test_known_keys_of_the_tokenizer(tmp_path):
    """Of some, digits stand apart, and so do the spaces before them."""
    for number, pre in enumerate(["gpt-2", "smollm", "llama-bpe", "qwen2"]):
        keys = dict(pre=pre, fim_pre_token_id=3, remove_extra_whitespaces=False)
        path = write_tokenizer(tmp_path / f"{number}.gguf", add_bos_token=False, **keys)
        splitter = find_model(path).tokenizer().backend_tokenizer.pre_tokenizer
        parts = [part for part, _ in splitter.pre_tokenize_str("  12")]
        assert parts == {"smollm": ["ĠĠ", "1", "2"], "gpt-2": ["Ġ", "Ġ12"],
                         "llama-bpe": ["Ġ", "Ġ", "12"]}.get(pre, ["Ġ", "Ġ", "1", "2"])  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.sliding_window", 0), ("expert_count", 0), ("logit_scale", 1.0),
     ("attention.max_alibi_bias", 0.0), ("attn_logit_softcapping", 0.0)],
)  # fmt: skip
def test_neutral_values_change_nothing(model, tmp_path, key, value):
    for other in (value, 0.5):
        path = write_gguf(tmp_path / "m.gguf", model, metadata={key: other})
        if other == value:
            assert is_right(load_pair(path, "none", dtype="float32"), model)
        else:
            with refusal(f"llama.{key} is 0.5"):
                load_pair(path, "none", dtype="float32")


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"),
    [("gemma2", 26, 10), ("gemma2", 46, 16), ("gemma3", 34, 10), ("gemma3", 62, 16)],
)
def test_gemmas_attention_is_scaled_by_the_size_of_the_model(tmp_path, architecture, layers, scale):
    """As in llama.cpp: of the largest by hidden size over heads, else by a head's size."""
    settings = {"attention.key_length": 10, "attention.value_length": 10}
    config = config_of(tmp_path / "m.gguf", architecture, settings, layers)
    assert config.query_pre_attn_scalar == scale


SIZES = {
    "context_length": 64, "feed_forward_length": 96, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.value_length": 16,
    "attention.key_length": 16,
}  # fmt: skip
QWEN35 = SIZES | {
    "attention.head_count_kv": 2, "ssm.conv_kernel": 4,
    "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32,
    "attention.recurrent_layers": [True, True, True, False], "full_attention_interval": 4,
    "rope.dimension_count": 4, "rope.dimension_sections": [11, 11, 10, 0],
}  # fmt: skip
LFM2 = SIZES | {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}


@pytest.mark.parametrize(
    ("architecture", "settings", "key", "wrong"),
    [
        ("qwen35", QWEN35, "attention.recurrent_layers", [True, False, True, True]),
        ("qwen35", QWEN35, "full_attention_interval", 3),
        ("qwen35", QWEN35, "ssm.inner_size", 34),
        ("lfm2", LFM2, "attention.head_count_kv", [1, 2, 0]),
    ],
)
def test_recurrent_layers_are_those_that_a_file_names(tmp_path, architecture, settings, key, wrong):
    """As llama.cpp's converter writes them; another value is of a model that would be wrong."""
    layers = {"qwen35": 4, "lfm2": 3}[architecture]
    config = config_of(tmp_path / "m.gguf", architecture, settings, layers)
    kinds = [kind == "full_attention" for kind in config.layer_types]
    assert kinds == {"qwen35": [False] * 3 + [True], "lfm2": [False, True, False]}[architecture]
    with refusal(rf"m.gguf: {architecture}\..* has no setting"):
        config_of(tmp_path / "m.gguf", architecture, settings | {key: wrong}, layers)


def test_a_window_of_0_is_none(tmp_path):
    config = config_of(tmp_path / "m.gguf", "phi3", {"attention.sliding_window": 0})
    assert config.sliding_window is None
