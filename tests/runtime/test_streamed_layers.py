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
from sequoia_plan.runtime.models import fused_layer
from sequoia_plan.runtime.models.fused_layer import FusedLayer
from sequoia_plan.runtime.offload import offloaded_target
from sequoia_plan.runtime.offload.weight_file import ALIGNMENT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "own_cache")]

RESIDENT = 2


def in_memory(folder, placement):
    target, draft = str(folder / "target"), str(folder / "draft")
    return load_pair(target, draft, dtype="float32", placement=placement)


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


def test_weights_in_the_wrong_place_are_noticed(folder, monkeypatch):
    """The control: with another order of the file a layer would not read what is in its slot."""
    in_order = offloaded_target.in_joined_order
    monkeypatch.setattr(offloaded_target, "in_joined_order", lambda names: in_order(names)[::-1])
    with pytest.raises(SequoiaPlanError, match=r"reads \d+ bytes of its slot, expected \d+"):
        streamed(folder, RESIDENT)


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
