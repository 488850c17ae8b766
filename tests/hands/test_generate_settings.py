"""Settings that people give: each counts as in transformers, or is refused by its name."""

from functools import partial

import pytest
import torch
import transformers as hf
from architectures import VOCABULARY, plain_text, resembling, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from toys import PLAIN, TREE, text_inside_generate
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import SequoiaDecoder, sequoia

pytestmark = pytest.mark.slow

IDS, NEW = torch.tensor([[5, 6, 7, 8]]), 24
TARGET = tiny("Llama")
DRAFT = resembling(TARGET, 0.05)
GREEDY = plain_text(TARGET, IDS, NEW)
inside = partial(text_inside_generate, TARGET, DRAFT, ids=IDS, max_new_tokens=NEW)

CRITERIA = st.builds(MaxLengthCriteria, st.integers(1, 40)) | st.builds(
    EosTokenCriteria, st.lists(st.sampled_from(GREEDY[0, 4:].tolist()), min_size=1, max_size=3)
)


@settings(max_examples=40)
@given(st.lists(CRITERIA, max_size=3), st.sampled_from([None, *GREEDY[0, 4:9].tolist()]))
def test_a_users_own_endings_end_where_transformers_ends(criteria, eos):
    options = dict(stopping_criteria=criteria, eos_token_id=eos)
    expected = TARGET.generate(IDS, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
    assert inside(**options).equal(expected)


@pytest.mark.parametrize("padding", [None, 0, 9])
def test_several_sequences_have_the_padding_of_transformers(padding):
    """Without a padding token it is the first end token."""
    for ends in ([40, *range(10, 30)], [*range(10, 30), 40]):
        options = dict(eos_token_id=ends, pad_token_id=padding, do_sample=True, top_k=0)
        rows = inside(num_return_sequences=6, seed=1, temperature=1.5, **options)
        width = rows.shape[1]
        for number, row in enumerate(rows):
            alone = inside(seed=1 + number, temperature=1.5, **options)[0]
            filled = [ends[0] if padding is None else padding] * (width - len(alone))
            assert row.tolist() == alone.tolist() + filled
        assert any(row[-1] == row[-2] for row in rows), "the control: none is padded"


def test_set_seed_makes_generate_repeat():
    texts = []
    for seed in (0, 0, 1):
        hf.set_seed(seed)
        texts.append(inside(do_sample=True, top_k=0).tolist())
        hf.set_seed(seed)
        texts.append(SequoiaDecoder(TARGET, DRAFT, TREE).generate(IDS, NEW, 1.0).sequences.tolist())
    assert texts[0] == texts[1] == texts[2] == texts[3] != texts[4]


# multimodal models, with text alone

TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, head_dim=8,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
VISION = dict(depth=1, hidden_size=32, out_hidden_size=32, num_heads=2, intermediate_size=32)
IMAGES = dict(image_token_id=90, video_token_id=91)
MULTIMODAL = {
    "Qwen2-VL": (
        hf.Qwen2VLForConditionalGeneration,
        dict(vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2), **IMAGES),
    ),
    "Qwen2.5-VL": (
        hf.Qwen2_5_VLForConditionalGeneration,
        dict(vision_config=VISION, **IMAGES),
    ),
    "Qwen3-VL": (
        hf.Qwen3VLForConditionalGeneration,
        dict(vision_config=VISION | dict(deepstack_visual_indexes=[0]), **IMAGES),
    ),
    "Gemma 3": (
        hf.Gemma3ForConditionalGeneration,
        dict(
            vision_config=dict(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                image_size=28, patch_size=14,
            ),
            image_token_index=90, boi_token_index=91, eoi_token_index=92, mm_tokens_per_image=4,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MULTIMODAL)
def test_multimodal_models_read_text_alone(name):
    torch.manual_seed(0)
    model_class, options = MULTIMODAL[name]
    text = TEXT if name == "Gemma 3" else TEXT | {"rope_parameters": ROPE}
    model = model_class(model_class.config_class(text_config=text, **options)).eval()
    inputs = dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(IDS, **inputs)
    inputs |= dict(custom_generate=sequoia, tree=PLAIN)
    assert model.generate(IDS, **inputs).equal(expected)
    types = torch.zeros_like(IDS)
    if name == "Gemma 3":
        assert model.generate(IDS, token_type_ids=types, **inputs).equal(expected)
        with refusal("token_type_ids: found", ArgumentError):
            model.generate(IDS, token_type_ids=1 - types, **inputs)
    else:
        shifted = torch.arange(1, 5).expand(3, 1, 4)
        with refusal("position_ids: found", ArgumentError):
            model.generate(IDS, position_ids=shifted, **inputs)


# what tokenizers refuse


@pytest.mark.parametrize("roles", [["system", "user"], ["user", "user"]])
def test_a_chat_template_that_raises_is_told_in_one_line(pair, monkeypatch, roles):
    template = (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    monkeypatch.setattr(pair.tokenizer, "chat_template", template)
    messages = [{"role": role, "content": "Hello"} for role in roles]
    assert encode(pair.tokenizer, "Hello")
    with refusal(rf"refuses .*\({', '.join(roles)}\): Roles must"):
        encode(pair.tokenizer, messages)
