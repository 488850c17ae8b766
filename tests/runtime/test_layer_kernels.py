"""A layer's kernels for CUDA against float64.

They run on a CUDA device, or without one on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from architectures import tiny
from triton_kernels import DEVICE

from sequoia_plan.runtime.models import fused_layer, layer_operations
from sequoia_plan.runtime.models.fuse import fuse
from sequoia_plan.runtime.models.fused_layer import plain_linear

pytestmark = pytest.mark.usefixtures("one_thread")
EPSILON = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative to the largest number of the result; two roundings of the dtype."""


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def error(result, expected):
    """The largest difference, relative to the largest number."""
    assert result.shape == expected.shape and result.is_contiguous()
    return float((result.double() - expected).abs().max() / expected.abs().max())


def normed(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def rotated(heads, cos, sin):
    """Pairs of numbers as complex ones, turned by an angle."""
    first, second = heads.double().chunk(2, -1)
    half = first.shape[-1]
    turn = torch.complex(cos.double()[..., :half], sin.double()[..., :half])[:, :, None]
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), -1)


def gated(gate_up):
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up


def assert_is(result, expected, *wrong):
    """`result` is as near to float64 as its dtype allows; the controls are not."""
    assert error(result, expected) < TOLERANCE[result.dtype]
    assert all(error(result, each) > 2 * TOLERANCE[result.dtype] for each in wrong)


@pytest.mark.parametrize(("dtype", "width"), [*zip(TOLERANCE, (1030, 8, 48), strict=True)], ids=str)
def test_norms_of_hidden_states_and_of_heads(width, dtype):
    """Rows of hidden states; heads are a part of a wider tensor."""
    weight = 1 + random(width, dtype=dtype, seed=1) / 4
    for x in (random(1, 5, width, dtype=dtype), random(1, 3, 7, width, dtype=dtype)[:, :, 1:5]):
        result = layer_operations.rms_norm(x, weight, EPSILON)
        assert_is(result, normed(x, weight), normed(x, weight.roll(1)))


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [*zip(TOLERANCE, (24, 128, 8), strict=True)], ids=str
)
def test_rotary_embeddings(head_dim, dtype):
    """Heads are a part of the matrix product that made them; each token has its own angles."""
    heads = random(1, 5, 9, head_dim, dtype=dtype)[:, :, :6]
    turns = torch.rand(1, 5, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    angles = torch.cat((turns, turns), -1).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wrong = rotated(heads, cos, -sin), rotated(heads, cos.roll(1, 1), sin.roll(1, 1))
    assert_is(layer_operations.rotate(heads, cos, sin), rotated(heads, cos, sin), *wrong)


@pytest.mark.parametrize(("dtype", "width"), [*zip(TOLERANCE, (1500, 3, 96), strict=True)], ids=str)
def test_gates(width, dtype):
    """One block and more; the control has gate and up the other way round."""
    gate_up = random(1, 4, 2 * width, dtype=dtype)
    wrong = gated(gate_up.roll(width, -1))
    assert_is(layer_operations.silu_mul(gate_up), gated(gate_up), wrong)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_model_computes_the_same_with_kernels(name, monkeypatch):
    """Qwen3's heads have norms. The control leaves out the rotation."""
    model = tiny(name).to(DEVICE)
    fuse(model, plain_linear)
    tokens = torch.arange(9, device=DEVICE)[None]

    def logits():
        with torch.inference_mode():
            return model(tokens).logits

    expected = logits()
    monkeypatch.setattr(layer_operations, "runs_kernels", lambda x: True)
    assert (logits() - expected).norm() < 1e-5 * expected.norm()
    monkeypatch.setattr(fused_layer, "rotate", lambda heads, cos, sin: heads)
    assert (logits() - expected).norm() > 1e-3 * expected.norm()
