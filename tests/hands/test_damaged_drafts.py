"""Damaged draft files: one error of one line that names the file, and what is wrong in it."""

import itertools
import json
import random
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

from drafts import PARTS, layer_settings, small_target, write
from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.models.backends import RESIDENT, loaded_as
from sequoia_plan.models.base.loading import Loading
from sequoia_plan.runtime import Pair, SequoiaDecoder
from sequoia_plan.runtime.draft.draft_file import build_draft, save_draft
from sequoia_plan.runtime.pair import add_draft

TARGET = small_target()
PROMPT = torch.tensor([[5, 6, 7, 8]])
TEXT = SequoiaDecoder(TARGET, None, TokenTree.chain(1)).generate(PROMPT, 4).sequences
ODD_VALUES = (0, -1, 1.5, 10**30, "x", [1], [], {"a": 1}, True, float("nan"), None)
ODD_VALUES += ({"rope_type": "nope", "rope_theta": 1e4},)
READ_BY_TRANSFORMERS = {"hidden_act", "head_dim", "rope_scaling", "rope_parameters", "layer_types"}


def write_file(folder, config, weights):
    """A draft file with these settings and tensors; `config` may be any text of its header."""
    folder.mkdir(exist_ok=True)
    header = config if isinstance(config, str) else json.dumps(config)
    path = folder / "draft.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, path, {"sequoia_plan": header})
    return str(path)


def file_parts(tmp_path):
    """(header, tensors) of a draft file."""
    config = LlamaConfig(**layer_settings(TARGET))
    draft = build_draft(config, TARGET.get_input_embeddings(), torch.arange(0, 48, 3))
    torch.manual_seed(0)
    for module in (draft.model.layers, draft.model.norm, draft.lm_head):
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    save_draft(draft, tmp_path / "whole.safetensors", {})
    with safe_open(tmp_path / "whole.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["sequoia_plan"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(params=["file", *PARTS])
def parts(request, tmp_path):
    """(a function that writes a draft, its settings, its weights), of each kind."""
    if request.param in PARTS:
        return write, *PARTS[request.param](TARGET)
    return write_file, *file_parts(tmp_path)


def error_of(source):
    """The error of a draft, or "" if it decodes what the target says."""
    try:
        pair = Pair(loaded_as(TARGET, RESIDENT), None, None)
        draft = add_draft(pair, source, Loading(RESIDENT, dtype="float32")).draft
        generation = SequoiaDecoder(TARGET, draft, TokenTree.chain(2)).generate(PROMPT, 4)
        assert generation.sequences.equal(TEXT)
    except SequoiaPlanError as error:
        return str(error)
    return ""


FITS = {
    ("fc.bias", "missing"),  # EAGLE-1 has it or not
    ("fc.weight", "missing"),  # an EAGLE-1 draft without it is a language model
    *(("t2d", damage) for damage in ("missing", "another dimension", "whole numbers", "fractions")),
    *(("d2t", damage) for damage in ("another dimension", "whole numbers")),
    ("covered_tokens", "whole numbers"),
}
"""What need not be an error that names the tensor."""


def test_damaged_tensors_are_named(parts, tmp_path):
    """Each tensor in turn: missing, of another shape, or of another kind of numbers."""
    write_draft, config, weights = parts
    assert error_of(write_draft(tmp_path / "a-draft", config, weights)) == ""
    for name, tensor in weights.items():
        damages = {
            "missing": None,
            "a row less": tensor[1:],
            "a row more": torch.cat([tensor, tensor[:1]]),
            "another dimension": tensor[None],
            "whole numbers": tensor.to(torch.int32),
            "nothing": tensor[:0],
        }
        if tensor.ndim > 1:
            damages["a column less"] = tensor[:, 1:]
        if not tensor.is_floating_point():
            damages["fractions"] = tensor.float()
        for damage, damaged in damages.items():
            changed = {key: value for key, value in weights.items() if key != name}
            if damaged is not None:
                changed[name] = damaged
            message = error_of(write_draft(tmp_path / "a-draft", config, changed))
            ours = name.replace("midlayer.", "layers.0.").removesuffix(".scale")
            # a map of other tokens is noticed by itself, or by the head that it does not fit
            names = (
                ("d2t", "lm_head.weight") if ours in ("d2t", "t2d", "covered_tokens") else (ours,)
            )
            if (name, damage) not in FITS:
                assert "a-draft" in message, (name, damage)
                assert any(each in message for each in names), (name, damage, message)
            assert "\n" not in message
    extra = weights | {"layers.0.extra.weight": torch.zeros(3)}
    assert "layers.0.extra.weight" in error_of(write_draft(tmp_path / "a-draft", config, extra))


def test_odd_settings_are_one_line(parts, tmp_path):
    """Each in turn: an error, or a draft that decodes what its target says."""
    write_draft, config, weights = parts
    settings, num_refused = config.get("config", config), 0
    for name, value in itertools.product({*settings, *READ_BY_TRANSFORMERS}, ODD_VALUES):
        changed = settings | {name: value}
        if settings is not config:
            changed = config | {"config": changed}
        message = error_of(write_draft(tmp_path / "a-draft", changed, weights))
        assert "\n" not in message, (name, value)
        num_refused += "a-draft" in message
    assert num_refused > 50


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes(parts, seed, tmp_path):
    """Files cut short or with other bytes, and settings nested without end."""
    write_draft, config, weights = parts
    folder, chance = tmp_path / "a-draft", random.Random(seed)
    for _ in range(20):
        write_draft(folder, config, weights)
        path = chance.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        if chance.random() < 0.5:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(min(len(data), 3000))] = chance.randrange(256)
        path.write_bytes(data)
        message = error_of(str(path if write_draft is write_file else folder))
        is_of_the_file = "a-draft" in message or re.match("draft: .*logits .*not finite", message)
        assert message == "" or is_of_the_file


def test_settings_nested_without_end(parts, tmp_path):
    write_draft, config, weights = parts
    source = write_draft(tmp_path / "a-draft", config, weights)
    for nested in ("[" * 10**5, '{"a":' * 10**5, '{"config":' + "[" * 10**5):
        if write_draft is write_file:
            write_file(tmp_path / "a-draft", nested, weights)
        else:
            (tmp_path / "a-draft" / "config.json").write_text(nested)
        message = error_of(source)
        assert "a-draft" in message and "\n" not in message


def test_no_weights_and_pickles_of_anything_else(tmp_path):
    folder = write(tmp_path / "a-draft", *PARTS["EAGLE-3"](TARGET))
    (tmp_path / "a-draft" / "model.safetensors").unlink()
    assert "a-draft: no weights found, expected model" in error_of(folder)
    for content in ([1], {1: torch.zeros(2)}, {"fc.weight": 3}):
        torch.save(content, tmp_path / "a-draft" / "pytorch_model.bin")
        assert "pytorch_model.bin: cannot be read" in error_of(folder)
