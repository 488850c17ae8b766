"""A layer's kernels for CUDA against float64, and how many kernels a layer takes.

They run on a CUDA device, or without one on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from architectures import tiny
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_kernels import DEVICE

from sequoia_plan.runtime.base.cache import TreeCache
from sequoia_plan.runtime.models import attention, fused_layer, layer_operations
from sequoia_plan.runtime.models.attention import attending
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


def use_kernels(patch):
    """Let fused layers run their kernels wherever they are."""
    patch.setattr(layer_operations, "runs_kernels", lambda x: True)


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
    use_kernels(monkeypatch)
    assert (logits() - expected).norm() < 1e-5 * expected.norm()
    monkeypatch.setattr(fused_layer, "rotate", lambda heads, cos, sin: heads)
    assert (logits() - expected).norm() > 1e-3 * expected.norm()


class Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel: not views, and not allocations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("_unsafe_view", "empty"):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("uses_kernels", "low", "high"), [(True, 12, 14), (False, 20, 40)])
def test_a_layer_on_cuda_takes_few_kernels(uses_kernels, low, high, monkeypatch):
    """Counted on the meta device, which runs what CUDA runs; the control is without our kernels."""
    model = tiny("Llama", dtype=torch.bfloat16)
    fuse(model, plain_linear)
    layer, tokens, extent = model.model.layers[0].to("meta"), 6, 64
    attend = layer.self_attn
    heads = (attend.key_heads, attend.head_dim)
    with Kernels() as kernels:

        def counted(name, launches, make_result):
            """Stand in for a function that launches kernels of ours."""

            def launch(x, *args):
                kernels.counts[name] += launches
                with _disable_current_modes():
                    return make_result(x)

            return launch

        if uses_kernels:
            use_kernels(monkeypatch)
            gated = counted("silu_mul", 1, lambda x: x[..., : x.shape[-1] // 2].clone())
            monkeypatch.setattr(fused_layer, "silu_mul", gated)
            for name in ("rms_norm", "rotate"):
                monkeypatch.setattr(fused_layer, name, counted(name, 1, torch.empty_like))
            split = counted("attention", 2, lambda x: x.transpose(1, 2).contiguous())
            monkeypatch.setattr(attention, "split_key_attention", split)
            monkeypatch.setattr(attention, "can_split_keys", lambda *tensors: True)
        meta = partial(torch.zeros, device="meta", dtype=torch.bfloat16)
        memory = (torch.device("meta"), torch.bfloat16, *heads)
        slots = torch.zeros(tokens, dtype=torch.long, device="meta")
        cache = TreeCache(((memory, memory),), extent, "meta").at(slots, extent)
        angles = meta(1, tokens, attend.head_dim)
        inputs = (meta(1, tokens, 32), meta(1, 1, tokens, extent), (angles, angles))
        kernels.counts.clear()
        with attending(torch.device("cpu"), slots=slots), torch.inference_mode():
            layer(*inputs, past_key_values=cache)
    assert low <= kernels.counts.total() <= high, kernels.counts
