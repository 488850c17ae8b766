"""Streamed layers are fused ones, whose matrices are views of the slots that their weights come to.

That their tokens are those of the target in memory is tested in test_offload.py.
"""

from __future__ import annotations

import pytest
import torch
from streamed import LAYERS, streamed, tokens

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime import load_pair
from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.base.weight_stream import stream_of
from sequoia_plan.runtime.models import fuse, fused_layer
from sequoia_plan.runtime.models.fused_layer import FusedLayer
from sequoia_plan.runtime.offload import offloaded_target
from sequoia_plan.runtime.offload.weight_file import ALIGNMENT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "own_cache")]

RESIDENT = 2


def in_memory(folder, placement):
    target, draft = str(folder / "target"), str(folder / "draft")
    return load_pair(target, draft, dtype="float32", placement=placement)


def streamed_layers(pair):
    """(layer, block, slot) of each streamed layer."""
    stream = stream_of(pair.target)
    addresses = {slot.untyped_storage().data_ptr(): slot for slot in stream.memory}
    layers = [
        (layer, addresses.get(layer.mlp.down_proj.weight.untyped_storage().data_ptr()))
        for layer in pair.target.model.layers
    ]
    layers = [(layer, slot) for layer, slot in layers if slot is not None]
    return [(*pair, block) for pair, block in zip(layers, stream.blocks, strict=True)]


def test_matrices_are_views_of_the_slots(folder):
    pair = streamed(folder, RESIDENT)
    assert pair.metadata["target"]["fused_layers"] == LAYERS
    assert all(type(layer) is FusedLayer for layer in pair.target.model.layers)
    for layer, slot, block in streamed_layers(pair):
        begins = {name: slot.data_ptr() + place.start for name, place in block.tensors.items()}
        attention, mlp = layer.self_attn, layer.mlp
        assert attention.qkv_proj.weight.data_ptr() == begins["self_attn.q_proj.weight"]
        assert mlp.gate_up_proj.weight.data_ptr() == begins["mlp.gate_proj.weight"]
        held = {name: p for name, p in layer.named_parameters() if "norm" not in name}
        assert sum(p.nbytes for p in held.values()) == sum(p.size for p in block.tensors.values())


def test_no_weight_is_held_twice_or_read_in_vain(folder):
    """A slot has no room, and a pass no bytes, but for the weights and the end of a page."""
    pair = streamed(folder, RESIDENT)
    expected = in_memory(folder, "resident").target
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in pair.target.parameters()
    }
    metadata = pair.metadata["target"]
    norms = sum(p.nbytes for name, p in expected.named_parameters() if "norm" in name)
    # fused norms have copies of their weights
    assert sum(storages.values()) <= metadata["resident_bytes"] + metadata["slot_bytes"] + norms
    layer_bytes = sum(p.nbytes for p in expected.model.layers[0].parameters())
    stream = stream_of(pair.target)
    assert stream.bytes <= (LAYERS - RESIDENT) * round_up(layer_bytes, ALIGNMENT)


def test_logits_are_bit_by_bit_those_of_fused_layers_in_memory(folder):
    pairs = streamed(folder, RESIDENT), in_memory(folder, "fused")
    text = torch.arange(3, 40)[None]
    with torch.inference_mode():
        logits = [pair.target(text).logits for pair in pairs]
    assert torch.equal(*logits)


def test_weights_in_another_order_are_refused(folder, monkeypatch):
    """They would be copied from a slot once, and stay what the slot held at loading."""
    monkeypatch.setattr(
        offloaded_target, "in_joined_order", lambda names: sorted(names, reverse=True)
    )
    message = r"a streamed FusedLayer reads \d+ bytes of its slot, expected \d+; .*'resident'"
    with pytest.raises(SequoiaPlanError, match=message):
        streamed(folder, RESIDENT)


def test_weights_in_the_wrong_place_are_noticed(folder, monkeypatch):
    """The control: keys in the place of queries fail the trial; without it, tokens differ."""
    expected = tokens(in_memory(folder, "fused"))
    assert torch.equal(tokens(streamed(folder, RESIDENT)), expected)
    in_order = offloaded_target.in_joined_order
    swapped = {"q_proj": "k_proj", "k_proj": "q_proj"}

    def out_of_order(names):
        other_name = {
            name: name.replace(part, other)
            for name in names
            for part, other in swapped.items()
            if part in name
        }
        return [other_name.get(name, name) for name in in_order(names)]

    monkeypatch.setattr(offloaded_target, "in_joined_order", out_of_order)
    ends_at = fused_layer._ends_at

    def ends_somewhere_before(tensor, other):
        storages = [t.untyped_storage().data_ptr() for t in (tensor, other)]
        return ends_at(tensor, other) or storages[0] == storages[1]

    monkeypatch.setattr(fused_layer, "_ends_at", ends_somewhere_before)
    assert streamed(folder, RESIDENT).metadata["target"]["fused_layers"] == 0
    monkeypatch.setattr(fuse, "MAX_ERROR", float("inf"))
    assert streamed(folder, RESIDENT).metadata["target"]["fused_layers"] == LAYERS
    assert not torch.equal(tokens(streamed(folder, RESIDENT)), expected)


@pytest.mark.parametrize("reason", ["trial", "asked"])
def test_layers_of_transformers_are_streamed(folder, monkeypatch, reason):
    """Where a fused layer computes something else, and where the user asks for them."""
    expected = tokens(in_memory(folder, "resident"))
    if reason == "trial":
        made = fused_layer.RMSNorm.__init__
        monkeypatch.setattr(
            fused_layer.RMSNorm,
            "__init__",
            lambda self, weight, epsilon: made(self, weight, epsilon + 1e-3),
        )
        pair = streamed(folder, RESIDENT)
        monkeypatch.undo()
        assert pair.metadata["target"]["fused_layers"] == 0
    else:
        pair = streamed(folder, RESIDENT, placement="resident")
        assert "fused_layers" not in pair.metadata["target"]
    assert not any(type(layer) is FusedLayer for layer in pair.target.model.layers)
    assert torch.equal(tokens(pair), expected)


def test_each_kind_of_layer_is_tried_with_its_own_weights(folder, monkeypatch):
    """Streamed layers have no weights when they are tried, so one layer's are read."""
    tried = []
    error_of = fuse._relative_error

    def noted(expected, computed):
        tried.append(expected.clone())
        return error_of(expected, computed)

    monkeypatch.setattr(fuse, "_relative_error", noted)
    in_memory(folder, "fused")
    of_the_target, tried[:] = tried[:2], []  # attention and MLP, before the draft's
    streamed(folder, 0)
    for expected, of_the_streamed in zip(of_the_target, tried[:2], strict=True):
        assert expected.norm() > 0 and torch.equal(expected, of_the_streamed)
