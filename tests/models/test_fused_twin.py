"""On one CUDA device, models of users run as fused layers, and stay what they were for their users.

A CPU stands for the device.
"""

import warnings

import pytest
import torch
from architectures import plain_text, tiny
from refusals import refusal
from toys import PLAIN, TREE

from sequoia_plan.models.layers.fuse import num_fused_layers
from sequoia_plan.models.modules.backend import ModuleBackend
from sequoia_plan.runtime import SequoiaDecoder

pytestmark = pytest.mark.slow
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch):
    monkeypatch.setattr(ModuleBackend, "is_on_one_cuda_device", lambda backend: True)
    monkeypatch.setattr("sequoia_plan.runtime.decoding_models.step_graphs", lambda *args: None)


def shape(model):
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral"])
def test_a_users_model_is_fused_and_keeps_its_shape(name):
    model = tiny(name)
    expected, modules = plain_text(model, IDS, 20), shape(model)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    decoders = [SequoiaDecoder(model, tiny(name, seed=1), TREE) for _ in range(2)]
    twins = [decoder.step.target.backend.runs for decoder in decoders]
    assert twins[0] is twins[1] and num_fused_layers(twins[0]) == model.config.num_hidden_layers
    assert decoders[0].generate(IDS, 20).sequences.equal(expected)
    assert shape(model) == modules and plain_text(model, IDS, 20).equal(expected)
    assert model.state_dict().keys() == state.keys()
    assert all(tensor.equal(state[key]) for key, tensor in model.state_dict().items())


@torch.no_grad()
def in_place(model):
    for parameter in model.parameters():
        parameter.mul_(1.1)


def moved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def replaced(model):
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight = torch.nn.Parameter(-attention.k_proj.weight)


@pytest.mark.parametrize("change", [in_place, moved, replaced])
def test_weights_that_change_are_followed(change):
    model = tiny("Qwen3")
    decoder = SequoiaDecoder(model, None, PLAIN)
    before = decoder.generate(IDS, 20).sequences
    change(model)
    expected = plain_text(model, IDS, 20)
    assert decoder.generate(IDS, 20).sequences.equal(expected) and not expected.equal(before)


def test_a_change_that_fused_layers_cannot_follow_is_refused():
    model = tiny("Llama")
    decoder = SequoiaDecoder(model, None, PLAIN)
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, result: 2 * result)
    with refusal(r"make the decoder anew"):
        decoder.generate(IDS, 4)
    expected = plain_text(model, IDS, 20)
    decoder = SequoiaDecoder(model, None, PLAIN)
    assert decoder.generate(IDS, 20).sequences.equal(expected)


def test_layers_that_cannot_be_fused_are_told():
    model = tiny("GPT-NeoX")
    with pytest.warns(UserWarning, match="gpt_neox: transformers' own layers run"):
        SequoiaDecoder(model, None, PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for each model
        SequoiaDecoder(model, None, PLAIN)
