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
from toys import ToyModel
from transformers import DynamicCache

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.models.backends import loaded_as
from sequoia_plan.models.base.architecture import context_length
from sequoia_plan.models.base.cache import TreeCache
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


@pytest.mark.parametrize("name", READS_TREES)
@torch.inference_mode()
def test_tree_logits_are_path_logits_and_greedy_is_transformers(name):
    target = tiny(name)
    decoder = SequoiaDecoder(target, resembling(target), TREE)
    prompt = tokens_of(PROMPT)
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
    with pytest.raises(SequoiaPlanError, match=r"tree|decoder-only"):
        SequoiaDecoder(target, target, TREE)
    assert on_page(target, name) is False


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Llama 4"])
@pytest.mark.parametrize("wrong", ["no window", "window in slots", "one position too wide"])
def test_a_wrong_window_shows(name, wrong):
    """Negative control for the windowed masks."""
    target = tiny(name)
    decoder = SequoiaDecoder(target, resembling(target), TREE)
    model = decoder.step.target
    if wrong == "no window":
        model.window = 1 << 20
    elif wrong == "one position too wide":
        model.window += 1
    else:
        masks = model._masks

        def mask_of_slots(cache, mask, positions, slots):
            return masks(cache, mask, slots, slots)

        model._masks = mask_of_slots
    with torch.inference_mode():
        assert max(logits_errors(decoder, torch.arange(PROMPT))) > 10 * BOUND


class OrderedBySlot(torch.nn.Module):
    """A model that counts positions itself, as ALiBi does, but says it takes position_ids."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, input_ids, position_ids=None, **kwargs):
        if position_ids is not None:
            position_ids = position_ids[:, :1] + torch.arange(input_ids.shape[1])
        return self.model(input_ids=input_ids, position_ids=position_ids, **kwargs)


class Forgetful(OrderedBySlot):
    """A model that does not look into its cache."""

    def forward(
        self, input_ids, position_ids=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        tokens = input_ids.shape[1]
        if attention_mask is not None:
            diagonal = torch.eye(tokens, dtype=torch.bool)
            attention_mask = torch.where(diagonal, 0.0, attention_mask[..., :tokens])
        return self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, **kwargs
        )


@pytest.mark.parametrize("broken", [OrderedBySlot, Forgetful])
def test_the_check_at_load_finds_what_no_name_tells(broken):
    model = broken(tiny("Llama")).eval()
    message = "its logits there differ from those of the plain sequence"
    with pytest.raises(SequoiaPlanError, match=message):
        SequoiaDecoder(model, model, TREE)


def failing(model):
    def fails(input_ids, position_ids=None, **_):
        raise ValueError("odd mask\nand more")

    model.forward = fails


def with_flash_attention(model):
    model.config._attn_implementation_internal = "flash_attention_2"


def not_finite(model):
    model.lm_head.weight.data[0] = torch.nan


def on_meta(model):
    model.to("meta")


def indexed(model):
    model.config.layer_types = ["indexed_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (failing, r"cannot decode with a token tree, reading one fails \(ValueError: odd mask\)$"),
        (with_flash_attention, "load the model with attn_implementation='sdpa'"),
        (not_finite, "its logits are not finite"),
        (on_meta, "its weights are on the meta device and nothing brings them"),
        (indexed, "llama: layers of kind indexed_attention cannot branch"),
    ],
)
def test_what_cannot_be_computed_is_told_in_one_line(change, message):
    model = tiny("Llama")
    change(model)
    with pytest.raises(SequoiaPlanError, match=message):
        SequoiaDecoder(model, None, TokenTree.chain(1))


def test_eager_and_sdpa_agree():
    target = tiny("Mistral")
    target.set_attn_implementation("eager")
    decoder = SequoiaDecoder(target, resembling(target), TREE)
    with torch.inference_mode():
        assert max(logits_errors(decoder, torch.arange(PROMPT))) < BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS"])
def test_the_check_passes_in_low_precision(name, dtype):
    loaded_as(tiny(name).to(dtype), "resident").backend.prepare(())


def test_a_model_is_tried_once(monkeypatch):
    """And again after it was moved."""
    probed, error = [], probe_module._tree_error
    monkeypatch.setattr(
        probe_module,
        "_tree_error",
        lambda model, module: probed.append(model.dtype) or error(model, module),
    )
    target = tiny("Llama")
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
        SequoiaDecoder(target.to(dtype), None, TokenTree.chain(1))
    assert probed == [torch.float32, torch.float64, torch.float32]


def test_layers_of_different_shapes_get_their_own_memory():
    """Keys and values of different widths: a block for each shape, also where it is known."""
    cache = TreeCache(3, 8)
    for _ in range(2):
        cache.at(torch.arange(5), 8)
        for layer in range(3):
            states = torch.arange(5.0)[None, None, :, None].expand(1, 2, 5, 3) + layer
            cache.update(states, states[..., :2] if layer else states, layer)
        cache.commit(torch.tensor([2, 4]), torch.tensor([1]))
        for number, layer in enumerate(cache.layers):
            for part in (layer.keys, layer.values):
                assert part[0, 0, :3, 0].tolist() == [number, number + 2, number + 4]
        cache = TreeCache(cache.layout, 8)
        assert sorted(block.shape[0] for block in cache.blocks) == [2, 4]


@pytest.mark.parametrize(("rope_type", "context"), [("longrope", 4096), ("yarn", 131072)])
def test_context_ends_where_rotary_embeddings_would_change(rope_type, context):
    rope = {"rope_type": rope_type, "original_max_position_embeddings": 4096}
    config = SimpleNamespace(max_position_embeddings=131072, rope_parameters=rope)
    assert context_length(config) == context
    assert context_length(SimpleNamespace(max_position_embeddings=4096)) == 4096


def test_a_small_model_with_a_small_vocabulary_is_tried_too():
    backend = loaded_as(ToyModel(0, vocabulary=3), "resident").backend
    backend.prepare(())
    assert len(backend.layout) == 1


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
