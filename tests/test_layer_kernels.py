"""A layer's kernels for CUDA against float64, and how many kernels a layer takes.

They run on a CUDA device, or without one on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from sequoia_plan.runtime.models import layer_operations

pytest.importorskip(
    "triton",
    reason="Triton is not installed, which compiles or interprets the kernels",
    exc_type=ImportError,
)
pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def angles(tokens, head_dim, dtype):
    turns = torch.rand(1, tokens, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    both = torch.cat((turns, turns), -1).to(DEVICE)
    return both.cos().to(dtype), both.sin().to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 48, 1030])
def test_norms_of_hidden_states_and_of_heads(width, dtype):
    """Rows of hidden states; heads are a part of a wider tensor."""
    weight = 1 + random(width, dtype=dtype, seed=1) / 4
    hidden_states = random(1, 5, width, dtype=dtype)
    heads = random(1, 3, 7, width, dtype=dtype)[:, :, 1:5]
    for x in (hidden_states, heads):
        result = layer_operations.rms_norm(x, weight, EPSILON)
        assert error(result, normed(x, weight)) < TOLERANCE[dtype]
        assert error(result, normed(x, weight.roll(1))) > 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 128])
def test_rotary_embeddings(head_dim, dtype):
    """Heads are a part of the matrix product that made them; each token has its own angles."""
    heads = random(1, 5, 9, head_dim, dtype=dtype)[:, :, :6]
    cos, sin = angles(5, head_dim, dtype)
    result = layer_operations.rotate(heads, cos, sin)
    assert error(result, rotated(heads, cos, sin)) < TOLERANCE[dtype]
    assert error(result, rotated(heads, cos, -sin)) > 2 * TOLERANCE[dtype]
    assert error(result, rotated(heads, cos.roll(1, 1), sin.roll(1, 1))) > 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [3, 96, 1500])
def test_gates(width, dtype):
    """One block and more; the control has gate and up the other way round."""
    gate_up = random(1, 4, 2 * width, dtype=dtype)
    result = layer_operations.silu_mul(gate_up)
    assert error(result, gated(gate_up)) < TOLERANCE[dtype]
    assert error(result, gated(gate_up.roll(width, -1))) > 2 * TOLERANCE[dtype]
