"""A draft made from the target: its weights, an unchanged target, and exact decoding with it."""

from __future__ import annotations

import weakref

import pytest
import torch
from architectures import VOCABULARY, tiny
from torch import nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.draft import self_draft as module
from sequoia_plan.runtime.draft.self_draft import self_draft
from sequoia_plan.runtime.models import int8
from sequoia_plan.runtime.models.architecture import decoder_layers
from sequoia_plan.runtime.models.fuse import fuse
from sequoia_plan.runtime.models.fused_layer import FusedLayer
from sequoia_plan.runtime.models.int8 import Int8Linear, rows_in_8_bits
from sequoia_plan.runtime.models.prepacked import PrepackedLinear, can_prepack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
FUSED = {"Llama", "Mistral", "Qwen2", "Qwen2, some layers windowed", "Qwen3", "SmolLM3"}
"""Their drafts have fused layers."""


def layers_of(model):
    return decoder_layers(model)[1]


def matrix(seed=0, rows=int8.ROWS_AT_A_TIME + 50, columns=24):
    """Rows of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 2, rows)[:, None]
    weight[3] = 0
    return weight


def errors(weight, integers, scales):
    """The largest error of a weight in each row, in scales of the row."""
    scales = scales.double()[:, None]
    return ((weight.double() - integers.double() * scales).abs() / scales).amax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_off_by_at_most_half_its_rows_scale(dtype):
    weight = matrix()
    integers, scales = rows_in_8_bits(weight, dtype)
    assert integers.dtype == torch.int8 and scales.dtype == dtype and int(integers.min()) >= -127
    assert (errors(weight, integers, scales) <= 0.5 + 1e-4).all()
    if dtype == torch.float32:  # the control: scales rounded after the integers were made
        assert (errors(weight, integers, scales.bfloat16()) > 0.6).any()


@pytest.mark.parametrize("rows", [1, 3, int8.MAX_KERNEL_ROWS, int8.MAX_KERNEL_ROWS + 1])
def test_a_linear_layer_multiplies_by_what_it_keeps(rows):
    """The kernel multiplies a few rows, a converted matrix many."""
    torch.manual_seed(0)
    layer = Int8Linear(matrix(1, 97, 48), bias := torch.randn(97), torch.bfloat16)
    dense = layer.weight.double() * layer.scales.double()[:, None]
    x = torch.randn(2, rows, 48).bfloat16()
    expected = x.double() @ dense.T + bias.double()
    # rounding is relative to the terms of a sum, which may cancel out
    terms = x.double().abs() @ dense.abs().T + bias.double().abs()
    assert (layer(x).double() - expected).norm() / terms.norm() < 2**-7


def test_layers_of_other_devices_and_dtypes_do_without_the_kernel(monkeypatch):
    monkeypatch.setattr(torch, "_weight_int8pack_mm", None)
    weight = matrix(2, 40, 16)
    layer, x = Int8Linear(weight, None, torch.float32), torch.randn(3, 16)
    dense = layer.weight.float() * layer.scales.float()[:, None]
    assert torch.allclose(layer(x), x @ dense.T, rtol=1e-5, atol=1e-6)


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits.float()


@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_layers_are_the_layers_of_transformers(name, monkeypatch):
    target = tiny(name)
    fused = self_draft(target)
    monkeypatch.setattr(module, "can_fuse", lambda *_: False)
    unfused = self_draft(target)
    assert {type(layer) for layer in layers_of(fused)} == {FusedLayer}
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    padding_mask = torch.ones(2, 20, dtype=torch.long)
    padding_mask[:, :2] = 0

    def error(**options):
        with torch.inference_mode():
            ours, theirs = (model(tokens, **options).logits[:, 2:] for model in (fused, unfused))
        return float((ours - theirs).norm() / theirs.norm())

    assert error() < 0.05 and error(attention_mask=padding_mask) < 0.05
    layers_of(fused)[1].self_attn.scaling *= 2  # the control
    assert error() > 0.1


def prepacked():
    target = tiny("Llama")
    fuse(target, PrepackedLinear)
    return target


def with_hidden_layers():
    target = tiny("Llama")
    target.model.layers = nn.Sequential(*target.model.layers)
    return target


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("Qwen3-MoE"), "not those of linear layers .*; name another draft"),
        (lambda: tiny("Mixtral"), "not those of linear layers .*; name another draft"),
        (prepacked, "repacked for this processor; make the draft before"),
        (with_hidden_layers, "llama: no list of 3 layers found in the model"),
    ],
)
def test_targets_without_a_copy_are_refused(make, message):
    if make is prepacked and not can_prepack(torch.float32, "cpu"):
        pytest.skip("no kernels for prepacked weights")
    with pytest.raises(SequoiaPlanError, match=message):
        self_draft(make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_is_unchanged_and_only_its_embeddings_are_shared(dtype):
    target = tiny("GPT-2").to(dtype)
    classes = [type(module) for module in target.modules()]
    state = {key: value.clone() for key, value in target.state_dict().items()}
    draft = self_draft(target)
    assert [type(module) for module in target.modules()] == classes
    assert all(torch.equal(value, state[key]) for key, value in target.state_dict().items())
    addresses = {parameter.data_ptr(): key for key, parameter in target.named_parameters()}
    shared = {addresses.get(parameter.data_ptr()) for parameter in draft.parameters()} - {None}
    # in another dtype they are looked up in the target and then converted
    embeddings = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert shared == (embeddings if dtype == torch.bfloat16 else set())
    own = [parameter for parameter in draft.parameters() if parameter.data_ptr() not in addresses]
    assert {parameter.dtype for parameter in own if parameter.ndim > 1} == {torch.int8}
    assert draft.dtype == torch.bfloat16 and draft.config is target.config


@pytest.mark.parametrize("name", ["Llama", "GPT-NeoX"])
def test_layers_are_read_one_at_a_time(name):
    """When a layer is read, none of the weights that were read before it is alive.

    The target's layers are on the meta device.
    """
    target, tokens = tiny(name), torch.arange(12)[None]
    expected = logits(self_draft(target), tokens)
    weights = [
        {key: value.detach().clone() for key, value in layer.named_parameters()}
        for layer in layers_of(target)
    ]
    alive, alive_counts = weakref.WeakSet(), []

    def read_layers():
        for layer in weights:
            alive_counts.append(len(alive))
            tensors = {key: value.clone() for key, value in layer.items()}
            for value in tensors.values():
                alive.add(value)
            yield tensors
            del tensors, value

    for layer in layers_of(target):
        layer.to("meta")
    draft = self_draft(target, read_layers())
    assert alive_counts == [0, 0, 0] and not alive
    assert torch.equal(logits(draft, tokens), expected)
    assert all(parameter.device.type == "meta" for parameter in layers_of(target).parameters())
