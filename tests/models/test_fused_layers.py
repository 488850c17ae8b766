"""Fused layers compute what transformers' layers compute, with fewer operations."""

import pytest
import torch
from architectures import tiny
from operations import Operations

from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.layers.attention import attend_shared_heads
from sequoia_plan.models.layers.fuse import MAX_ERROR, fuse, fused_layer_error
from sequoia_plan.models.layers.fused_layer import can_fuse

pytestmark = pytest.mark.slow

MAX_OPERATIONS = 24
"""Operations of a layer of Llama's kind in float32 that compute or copy; transformers' has 34."""


@pytest.mark.parametrize("wrong", ["activation", "epsilon", "scaling", "sign"])
def test_the_trial_of_a_layer_shows_what_is_wrong(wrong, monkeypatch):
    """Negative controls: a fused layer with one fault is off by more than the bound."""
    from sequoia_plan.models.layers import fused_layer

    [layer, *_] = tiny("Llama").model.layers
    assert can_fuse(layer) and fused_layer_error(layer) < MAX_ERROR / 5
    made, attend = fused_layer.RMSNorm.__init__, fused_layer.attend_shared_heads
    rotate = fused_layer._rotate

    def activated(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(torch.relu(gate) * up)

    faults = {
        "activation": (fused_layer.FusedMLP, "forward", activated),
        "epsilon": (
            fused_layer.RMSNorm,
            "__init__",
            lambda self, weight, epsilon: made(self, weight, epsilon * 1.2),
        ),
        "scaling": (
            fused_layer,
            "attend_shared_heads",
            lambda *args, scaling: attend(*args, scaling=scaling * 1.001),
        ),
        "sign": (
            fused_layer,
            "_rotate",
            lambda heads, tables: rotate(heads, (tables[0], -tables[1])),
        ),
    }
    monkeypatch.setattr(*faults[wrong])
    assert fused_layer_error(layer) > MAX_ERROR


def test_a_layer_has_few_operations():
    model, counts = tiny("Llama"), []
    states, mask, angles = torch.randn(1, 6, 32), torch.zeros(1, 1, 6, 6), torch.rand(1, 6, 8)
    tables = angles.cos(), angles.sin()
    for make in (lambda model: None, fuse):
        make(model)
        with torch.inference_mode(), Operations() as operations:
            model.model.layers[0](states, mask, position_embeddings=tables)
        counts.append(len(operations.calls))
    assert counts[1] <= MAX_OPERATIONS < counts[0]


def test_weights_are_not_held_twice():
    model = tiny("Llama", hidden_size=64, intermediate_size=128)
    storages = {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters()}
    references = [torch.utils.weak.WeakIdRef(p) for p in model.model.layers.parameters()]
    fuse(model)
    assert sum(p.nbytes for p in model.parameters()) == sum(storages.values())
    # the matrices of the layers that were replaced are gone
    assert all(reference() is None for reference in references)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9])
@pytest.mark.parametrize(("heads", "shared_heads"), [(6, 2), (3, 3), (4, 1)])
def test_attention_with_shared_heads_is_that_of_pytorch(heads, shared_heads, tokens, dtype):
    torch.manual_seed(0)
    query = torch.randn(1, heads, tokens, 16).to(dtype)
    key, value = torch.randn(2, 1, shared_heads, 70, 16).to(dtype)
    mask = additive_mask(torch.rand(1, 1, tokens, 70) < 0.5, dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.double() for tensor in (query, key, value, mask)), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    attended, _ = attend_shared_heads(None, query, key, value, mask, scaling=0.3)
    assert attended.shape == expected.shape
    bound = 16 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((attended - expected).abs().max()) < bound
    if heads > shared_heads:  # the control: heads in another order
        other, _ = attend_shared_heads(None, query.flip(1), key, value, mask, scaling=0.3)
        assert float((other - expected).abs().max()) > bound
