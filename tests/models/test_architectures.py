"""Architectures read a token tree as they read its paths; those that cannot are refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from architectures import (
    FUSED,
    NEW,
    PROMPT,
    READS_TREES,
    REFUSED,
    TREE,
    WINDOW,
    logits_errors,
    plain_text,
    resembling,
    tiny,
    tokens_of,
)
from paths import ROOT
from refusals import refusal
from spies import spy
from toys import PLAIN, ToyModel
from transformers import DynamicCache

from sequoia_plan.models.backends import loaded_as
from sequoia_plan.models.base.architecture import context_length
from sequoia_plan.models.layers.fuse import MAX_ERROR, fuse
from sequoia_plan.models.modules import probe as probe_module
from sequoia_plan.runtime import SequoiaDecoder

PAGE = (ROOT / "docs" / "models.md").read_text()
WINDOWED = [name for name, (_, sizes) in READS_TREES.items() if WINDOW in sizes.values()]
BOUND = 1e-4
pytestmark = pytest.mark.slow


def on_page(target, name, window=""):
    """Does the row of the page that has the family say that its layers are fused?"""
    entry = f"{name} (`{type(target).__name__.removesuffix('ForCausalLM')}`{window})"
    [row] = [line for line in PAGE.splitlines() if re.search(rf"[|,] {re.escape(entry)}", line)]
    return "in fused" in row


def decoder_of(target):
    return SequoiaDecoder(target, resembling(target), TREE)


@pytest.mark.parametrize("name", READS_TREES)
@torch.inference_mode()
def test_tree_logits_are_path_logits_and_greedy_is_transformers(name):
    target = tiny(name)
    decoder, prompt = decoder_of(target), tokens_of(PROMPT)
    assert max(logits_errors(decoder, prompt)) < BOUND
    result, expected = decoder.generate(prompt, NEW), plain_text(target, prompt[None], NEW)
    assert result.sequences.equal(expected)
    assert len(expected[0, PROMPT:].unique()) >= 8, "a text that repeats itself shows little"
    assert result.tokens_per_step > 2, "the draft's cache must be worth something"
    has_window = decoder.step.target.window is not None
    assert has_window == (name in WINDOWED)
    assert on_page(target, name, ", window" * has_window) == (name in FUSED)
    logits = target(expected).logits
    assert fuse(target) == (len(target.model.layers) if name in FUSED else 0)
    assert float((target(expected).logits - logits).norm() / logits.norm()) < MAX_ERROR


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_read_a_tree_is_refused(name):
    target = tiny(name)
    with refusal(r"tree|decoder-only"):
        SequoiaDecoder(target, target, TREE)
    assert on_page(target, name) is False


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Llama 4"])
@pytest.mark.parametrize("wrong", ["no window", "window in slots", "one position too wide"])
def test_a_wrong_window_shows(name, wrong):
    """Negative control for the windowed masks."""
    decoder = decoder_of(tiny(name))
    model = decoder.step.target
    if wrong == "window in slots":
        masks = model._masks
        model._masks = lambda cache, mask, positions, slots: masks(cache, mask, slots, slots)
    else:
        model.window = 1 << 20 if wrong == "no window" else model.window + 1
    with torch.inference_mode():
        assert max(logits_errors(decoder, torch.arange(PROMPT))) > 10 * BOUND


def counting_itself(model):
    """It counts positions, as ALiBi does, but says it takes position_ids."""
    forward = model.forward

    def counting(input_ids, position_ids=None, **options):
        if position_ids is not None:
            position_ids = position_ids[:, :1] + torch.arange(input_ids.shape[1])
        return forward(input_ids=input_ids, position_ids=position_ids, **options)

    model.forward = counting


def forgetful(model):
    """It does not look into its cache."""
    forward = model.forward

    def forgetting(input_ids, position_ids=None, attention_mask=None, cache=None, **options):
        tokens = input_ids.shape[1]
        if attention_mask is not None:
            diagonal = torch.eye(tokens, dtype=torch.bool)
            attention_mask = torch.where(diagonal, 0.0, attention_mask[..., :tokens])
        options |= dict(input_ids=input_ids, position_ids=position_ids)
        return forward(attention_mask=attention_mask, **options)

    model.forward = forgetting


def failing(model):
    def fails(input_ids, position_ids=None, **_):
        raise ValueError("odd mask\nand more")

    model.forward = fails


def with_flash_attention(model):
    model.config._attn_implementation_internal = "flash_attention_2"


def not_finite(model):
    model.lm_head.weight.data[0] = torch.nan


def indexed(model):
    model.config.layer_types = ["indexed_attention", "full_attention", "full_attention"]


DIFFERS = "its logits there differ from those of the plain sequence"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (counting_itself, DIFFERS),
        (forgetful, DIFFERS),
        (failing, r"cannot decode with a token tree, reading one fails \(ValueError: odd mask\)$"),
        (with_flash_attention, "load the model with attn_implementation='sdpa'"),
        (not_finite, "its logits are not finite"),
        (lambda model: model.to("meta"), "weights are on the meta device and nothing brings them"),
        (indexed, "llama: layers of kind indexed_attention cannot branch"),
    ],
)
def test_what_cannot_be_computed_is_told_in_one_line(change, message):
    """The check at load also finds what no name tells."""
    model = tiny("Llama")
    change(model)
    with refusal(message):
        SequoiaDecoder(model, None, PLAIN)


def test_eager_and_sdpa_agree():
    target = tiny("Mistral")
    target.set_attn_implementation("eager")
    decoder = decoder_of(target)
    with torch.inference_mode():
        assert max(logits_errors(decoder, torch.arange(PROMPT))) < BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS"])
def test_the_check_passes_in_low_precision(name, dtype):
    loaded_as(tiny(name).to(dtype), "resident").backend.prepare(())


def test_a_model_is_tried_once(monkeypatch):
    """And again after it was moved."""
    probed = []
    spy(monkeypatch, probe_module, "_tree_error", lambda model, _: probed.append(model.dtype))
    target = tiny("Llama")
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
        SequoiaDecoder(target.to(dtype), None, PLAIN)
    assert probed == [torch.float32, torch.float64, torch.float32]


@pytest.mark.parametrize(("rope_type", "context"), [("longrope", 4096), ("yarn", 131072)])
def test_context_ends_where_rotary_embeddings_would_change(rope_type, context):
    rope = {"rope_type": rope_type, "original_max_position_embeddings": 4096}
    config = SimpleNamespace(max_position_embeddings=131072, rope_parameters=rope)
    assert context_length(config) == context
    assert context_length(SimpleNamespace(max_position_embeddings=4096)) == 4096


# transformers 5.24 renamed the argument `past_key_values` of models and layers to `cache`


class RenamedModel(ToyModel):
    """A toy with the argument's new name, and no other."""

    def forward(self, input_ids, position_ids=None, cache=None, **options):
        return super().forward(input_ids, position_ids, past_key_values=cache, **options)


def test_decoding_with_models_of_both_names_is_the_same():
    old, new = (
        SequoiaDecoder(model_class(0), model_class(1), TREE).generate([1, 2, 3], 20).sequences
        for model_class in (ToyModel, RenamedModel)
    )
    assert old.equal(new) and len(old.unique()) > 3


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_fused_layer_keeps_keys_under_both_names(name):
    model = tiny("Llama")
    assert fuse(model) == len(model.model.layers)
    states = torch.randn(1, 3, model.config.hidden_size)
    angles = model.model.rotary_emb(states, torch.arange(3)[None])
    cache = DynamicCache()
    with torch.inference_mode():
        model.model.layers[0](states, None, angles, **{name: cache})
    assert cache.get_seq_length() == 3
