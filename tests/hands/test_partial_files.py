"""Files with something missing, of another shape, or that would be left unread or rounded."""

import json
import random
import re
import shutil
import struct
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from architectures import tiny
from gguf_files import IDS, SIZES, SPLIT, config_of, is_right, logits_of, write_gguf
from refusals import refusal
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.files.gguf import transformers_name
from sequoia_plan.models.files.gguf_file import read_gguf
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.runtime import load_pair

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A folder with the model and a tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    write_gguf(folder / "m.gguf", model)
    AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


load = partial(load_pair, dtype="float32")
PATHS = {
    "resident": lambda folder, whole: load(folder, "none", placement="resident"),
    "fused": lambda folder, whole: load(folder, "none", placement="fused"),
    "compiled": lambda folder, whole: load(folder, "none"),
    "streamed": lambda folder, whole: load(folder, "none", offload="disk", memory="1GB"),
    "draft": lambda folder, whole: load(whole, folder),
}
"""Every way in which a model is loaded."""


def damaged(tensors, damage, name):
    """Take a tensor away, give it another shape with the same numbers, or add one beside it."""
    tensor = tensors.pop(name)
    other = {
        "shape": {name: tensor.reshape(-1, 2).T.contiguous()},
        "more": {name: tensor, name.replace(".weight", ".bias"): torch.ones(len(tensor))},
        "layer": {name: tensor, name.replace("layers.1.", "layers.2."): tensor.clone()},
    }
    return tensors | other.get(damage, {}), name if damage in ("lack", "shape") else None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("damage", ["lack", "shape", "more", "layer"])
def test_a_tensor_of_a_checkpoint(whole, tmp_path, monkeypatch, path, damage):
    """Each path refuses it by name, and remembers nothing of it."""
    tensors = load_file(whole / "model.safetensors")
    name = random.Random(f"{path} {damage}").choice([n for n in tensors if "layers.1." in n])
    folder = shutil.copytree(whole, tmp_path / "damaged")
    changed, named = damaged(dict(tensors), damage, name)
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    named = named or min(changed.keys() - tensors.keys())
    with refusal(f"damaged: .*tensor {named}"):
        PATHS[path](str(folder), str(whole))
    assert not list(tmp_path.glob("cache/damaged*"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert PATHS[path](str(folder), str(whole)).target is not None


@pytest.mark.parametrize("path", ["resident", "compiled", "streamed"])
def test_a_head_of_its_own_where_the_config_ties_it(whole, model, tmp_path, path):
    """It is used, as by transformers."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    pair = PATHS[path](str(tmp_path), None)
    assert is_right(pair, model)


def test_a_head_that_scores_texts_changes_nothing(whole, model, tmp_path):
    tensors = load_file(whole / "model.safetensors") | {"v_head.weight": torch.ones(1, 64)}
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert find_model(str(tmp_path)).module(torch.float32)(IDS).logits.equal(model(IDS).logits)


def with_number(after, offset, value=1 << 60, form="<Q"):
    """A function that changes a number in a file's bytes, so many bytes after a text."""

    def change(data):
        changed = bytearray(data)
        struct.pack_into(form, changed, data.index(after) + len(after) + offset, value)
        return bytes(changed)

    return change


BROKEN = {
    "of another kind": (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
    "cut off in the metadata": (lambda data: data[:200], "it ends at"),
    "cut off in a tensor": (lambda data: data[:-9], "inside tensor output.weight"),
    "an array without end": (with_number(b"ggml.tokens", 8), "array of 1152921504606846976 values"),
    "a text without end": (with_number(b"ggml.model", 4), "it ends at"),
    "metadata without end": (with_number(b"GGUF", 12), "it ends at"),
    "a value of no type": (with_number(b"ggml.model", 0, 99, "<I"), "unknown type 99"),
    "a row of half a block": (
        with_number(b"token_embd.weight", 20, 12, "<I"),
        "token_embd.weight has rows of 64 numbers in Q4_K, expected a multiple of 256",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_gguf_file(model, tmp_path, name):
    change, message = BROKEN[name]
    write_gguf(tmp_path / "m.gguf", model)
    (tmp_path / "m.gguf").write_bytes(change((tmp_path / "m.gguf").read_bytes()))
    with refusal(rf"m\.gguf: no whole .*{message}.*get it again"):
        load_pair(str(tmp_path / "m.gguf"), "none")


@pytest.mark.parametrize(
    ("kind", "text"),
    [(4, "Q4_2 that llama.cpp had before"), (156, "IQ3_KS of ik_llama.cpp"), (99, "of a fork, or"),
     (40, "NVFP4 with the tensor blk.0.ffn_up.scale")],
)  # fmt: skip
def test_types_of_tensors_that_are_not_read_say_where_they_come_from(model, tmp_path, kind, text):
    """Without its scale, an NVFP4 matrix is taken for one."""
    for scales in ({"blk.0.ffn_up.scale": np.ones(1, np.float32)}, {}):
        path = write_gguf(tmp_path / "m.gguf", model, tensors=scales)
        change = with_number(b"blk.0.ffn_up.weight", 20, kind, "<I")
        (tmp_path / "m.gguf").write_bytes(change((tmp_path / "m.gguf").read_bytes()))
        if kind == 40 and not scales:
            assert read_gguf(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"].format == "NVFP4"
            continue
        message = rf"tensor blk.0.ffn_up.weight has ggml's type {kind} \({text}.*not read; take a"
        with refusal(message):
            load_pair(path, "none")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_of_a_gguf_file(model, tmp_path, seed):
    """One line that names the file, or a model."""
    path, chance = tmp_path / "m.gguf", random.Random(seed)
    write_gguf(path, model)
    whole, errors = path.read_bytes(), []
    for _ in range(12):
        data = bytearray(whole)
        for _ in range(3):
            end = len(data) if chance.random() < 0.2 else 2000
            data[chance.randrange(end)] = chance.randrange(256)
        path.write_bytes(data)
        try:
            load_pair(str(path), "none")
        except SequoiaPlanError as error:
            errors.append(str(error))
    assert errors and all("m.gguf" in error and "\n" not in error for error in errors)


def test_a_part_of_a_split_gguf_file_and_a_name_in_capitals(model, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model, metadata={SPLIT: 2})
    with refusal("one of 2 parts of a model; merge them"):
        load_pair(path, "none")
    path = write_gguf(tmp_path / "M.GGUF", model)
    pair = load(path, path)
    assert is_right(pair, model)


@pytest.mark.parametrize("part", range(0, 21, 3))
def test_a_tensor_that_a_gguf_file_lacks(model, tmp_path, part):
    path = tmp_path / "m.gguf"
    write_gguf(path, model)
    name = gguf.GGUFReader(path).tensors[part].name
    if name == "output.weight":  # the head is then the embedding
        name = "output_norm.weight"
    write_gguf(path, model, without=[name])
    with refusal(r"m\.gguf: has no tensor model"):
        load_pair(str(path), "none")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
def test_no_weight_of_a_gguf_file_is_rounded(tmp_path, architecture, kind):
    """In float32 all numbers are those that llama.cpp computes with, and in bfloat16 the nearest;
    one does not take the place of the other."""
    model = tiny(architecture, **SIZES)
    path = write_gguf(tmp_path / "m.gguf", model, kind)
    quantised = gguf.GGMLQuantizationType[kind]
    for dtype in (torch.bfloat16, torch.float32):
        loaded = find_model(path).module(dtype).state_dict()
        for name, weight in model.state_dict().items():
            if weight.ndim == 2:
                raw = gguf.quants.quantize(weight.numpy(), quantised)
                weight = torch.from_numpy(gguf.quants.dequantize(raw, quantised))
            assert loaded[name].equal(weight.to(dtype)), name


LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
ROPES = {
    "linear": ({"type": "linear", "factor": 4.0}, dict(factor=4.0)),
    "linear, as llama.cpp takes a factor alone": ({"factor": 4.0}, dict(factor=4.0)),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 40},
        dict(factor=4.0, original_max_position_embeddings=40),
    ),
    "llama3": ({}, dict(factor=8.0, **LLAMA3)),
}
"""What a GGUF file says of its rotary embeddings, and how transformers is told the same."""


def llama3_factors(theta, count, factor):
    """The tensor that llama.cpp's converter writes."""
    factors = []
    for frequency in theta ** -(np.arange(count) / count):
        wave = 2 * np.pi / frequency
        smooth = (8192 / wave - 1) / 3
        middle = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wave < 2048 else factor if wave > 8192 else middle)
    return np.array(factors, np.float32)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("placement", ["resident", "compiled", "streamed"])
def test_rotary_embeddings_are_scaled_as_the_gguf_file_says(tmp_path, kind, placement):
    scaling, parameters = ROPES[kind]
    rope = dict(rope_type=kind.split(",")[0], rope_theta=500000.0, **parameters)
    model = tiny("Llama", **SIZES, rope_parameters=rope)
    tensors = {"rope_freqs.weight": llama3_factors(500000.0, 16, 8.0)} if kind == "llama3" else {}
    metadata = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    path = write_gguf(tmp_path / "m.gguf", model, "F32", metadata, tensors)
    settings = dict(placement=placement)
    if placement == "streamed":
        settings = dict(offload="disk", memory="1GB")
    pair = load_pair(path, "none", dtype="float32", **settings)
    positions = IDS * 6  # as far as the context
    expected = model(IDS, position_ids=positions).logits
    assert not torch.allclose(expected, tiny("Llama", **SIZES)(IDS, position_ids=positions).logits)
    assert torch.allclose(logits_of(pair, positions[0]), expected[0], atol=1e-3)


NO_PLACE = {
    "rope.scaling.type": "longrope", "block_count": 10**8, "rope.scaling.attn_factor": 1.5,
    "rope.dimension_count": 8, "attention.sliding_window": 8, "attention.value_length": 8,
    "attn_logit_softcapping": 5.0, "logit_scale": 5.0, "rope_freqs.weight": 16,
    "blk.1.attn_q.bias": 128, "blk.1.rope_factors.weight": 8,
}  # fmt: skip
"""Settings that a Llama has no place for; of a tensor, the length."""


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", NO_PLACE)
def test_what_a_model_has_no_place_for(whole, model, tmp_path, name, role):
    value, metadata, tensors, named = NO_PLACE[name], {}, {}, transformers_name(name)
    if name.endswith(("weight", "bias")):
        tensors = {name: np.full(value, 4, np.float32)}
    else:
        metadata, named = {name: value}, f"llama.{name} is {value!r}"
    path = write_gguf(tmp_path / "m.gguf", model, "F32", metadata, tensors)
    with refusal(re.escape(named)):
        load_pair(path, "none") if role == "target" else load_pair(str(whole), path)
    assert not list(tmp_path.glob("cache/m-*"))


@pytest.mark.parametrize(
    "setting",
    [
        "phi3 attention.sliding_window 9 sliding_window",
        "gemma2 attention.sliding_window 9 sliding_window",
        "gemma2 attn_logit_softcapping 9.0 attn_logit_softcapping",
        "gemma2 final_logit_softcapping 9.0 final_logit_softcapping",
        "gemma3 final_logit_softcapping 9.0 final_logit_softcapping",
        "qwen3 attention.key_length 10 head_dim",
        "qwen2moe expert_feed_forward_length 9 moe_intermediate_size",
        "stablelm rope.freq_base 9.0 rope_theta",
        "falcon feed_forward_length 9 ffn_hidden_size",
        "nemotron attention.layer_norm_epsilon 9.0 norm_eps",
    ],
)
def test_settings_that_transformers_does_not_read(tmp_path, setting):
    """They are honoured: a file of metadata alone shows it."""
    architecture, key, text, name = setting.split()
    value = json.loads(text)
    config = config_of(tmp_path / "m.gguf", architecture, {key: value})
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert (rope | config.to_dict())[name] == value


def test_a_format_that_no_pass_is_compiled_for(tmp_path):
    """PyTorch computes with it then."""
    model = tiny("Llama", **SIZES | dict(hidden_size=256, intermediate_size=256, head_dim=64))
    pair = load_pair(write_gguf(tmp_path / "m.gguf", model, "TQ2_0"), "none")
    assert pair.placement == "fused" and "found weights in TQ2_0" in pair.remarks[-1]


def test_an_adapter_in_place_of_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with refusal("it is an adapter: merge it into its model first"):
        find_model(str(tmp_path)).module(torch.float32)
