"""A layer's kernels against float64: attention with split keys, norms, rotary embeddings, gates.

The kernels run on a CUDA device, or without one on the CPU, by Triton's interpreter.
"""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from architectures import tiny
from gguf_files import logits_of
from simulated import simulate_capture
from spies import spy
from toys import SMALL_TREES
from triton_kernels import DEVICE, interpreted

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base import kernel_launch
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.layers import attention, fused_layer, layer_operations, split_keys
from sequoia_plan.models.layers.fuse import fuse
from sequoia_plan.models.layers.split_keys import split_key_attention
from sequoia_plan.runtime import SequoiaDecoder, captured_step

pytestmark = pytest.mark.slow
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
"""Triton's interpreter multiplies matrices of bfloat16 wrongly."""
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative to the largest number of the result; two roundings of the dtype."""
TREES = {
    "root": TokenTree.chain(1),
    "chain": TokenTree.chain(5),
    "both": SMALL_TREES["both"],
    "wide": TokenTree.star(40),
}


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def inputs(heads, shared_heads, tokens, extent, dtype, head_dim=16):
    """Random queries, keys and values; keys and values are part of a longer cache."""
    query = random(1, tokens, heads, head_dim, dtype=dtype).transpose(1, 2)  # as models make them
    caches = [random(1, shared_heads, extent + 7, head_dim, dtype=dtype, seed=s) for s in (1, 2)]
    return query, *(cache[:, :, :extent] for cache in caches)


def attention_error(query, key, value, mask, attended):
    """The largest difference from PyTorch's attention in float64."""
    mask = torch.zeros_like(mask, dtype=torch.float64).masked_fill(mask < -1, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(states.double() for states in (query, key, value)), mask, enable_gqa=True
    ).transpose(1, 2)
    return float((attended.double() - expected).abs().max())


def last_slots(tokens, last):
    """The slots of a pass, of which one is the last; they are in any order."""
    return torch.arange(last, last - tokens, -1, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tree", "length"), [*itertools.product(TREES, [0, 31, 300]), ("both", 1), ("root", 4096)]
)
def test_trees_of_any_length(tree, length, dtype):
    """Four heads share keys; the slots after the tree, up to the extent, are hidden."""
    tensors = TreeTensors.of(TREES[tree], DEVICE, dtype)
    size = TREES[tree].size
    extent = -(-(length + size) // 64) * 64
    columns = tensors.columns(torch.tensor([length], device=DEVICE), extent)
    mask = tensors.mask[None, None, :, columns]
    query, key, value = inputs(4, 1, size, extent, dtype)
    slots = length + tensors.nodes
    for num_parts in (1, 64) if length < 64 else (3,):
        attended = split_key_attention(query, key, value, mask, slots, 0.25, num_parts)
        assert attended.shape == (1, size, 4, 16)
        assert attention_error(query, key, value, mask, attended) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "shared_heads", "window"), [(1, 1, 300), (2, 2, 20), (6, 2, 1), (8, 1, 20)]
)
def test_windows_and_shared_heads(heads, shared_heads, window, dtype):
    """Each token sees the keys at most `window` before it; whole blocks of keys are hidden."""
    tokens, extent = 9, 203
    distances = last_slots(tokens, extent - 1)[:, None] - torch.arange(extent, device=DEVICE)
    mask = additive_mask((distances >= 0) & (distances < window), dtype)[None, None]
    tensors = inputs(heads, shared_heads, tokens, extent, dtype, head_dim=24)
    slots = last_slots(tokens, extent - 1)
    attended = split_key_attention(*tensors, mask, slots, 24**-0.5, 4)
    assert attention_error(*tensors, mask, attended) < 2 * TOLERANCE[dtype]


def test_a_mask_that_is_not_the_kernels_is_noticed():
    """The control: one more key changes the result by more than the tolerance."""
    tensors = inputs(4, 1, 3, 70, torch.float32)
    visible = torch.ones(3, 70, dtype=torch.bool, device=DEVICE).tril(60)
    mask = additive_mask(visible, torch.float32)[None, None]
    attended = split_key_attention(*tensors, mask, last_slots(3, 69), 0.25, 2)
    assert attention_error(*tensors, mask, attended) < 2e-6
    mask[0, 0, 1, 69] = 0.0
    assert attention_error(*tensors, mask, attended) > 1e-3


@pytest.mark.parametrize("length", [0, 5, 64, 130])
def test_keys_after_the_pass_are_not_read(length):
    """One launch for all lengths: the mask is as wide as the cache, and here hides nothing. A pass
    that ends one slot too early, the control, misses a key."""
    tokens, extent = 5, 256
    tensors = inputs(4, 2, tokens, extent, torch.float32)
    mask = torch.zeros(1, 1, tokens, extent, device=DEVICE)
    query, *caches = tensors
    keys, values = (cache[:, :, : length + tokens] for cache in caches)
    for last, is_right in ((length + tokens - 1, True), (length + tokens - 2, False)):
        attended = split_key_attention(*tensors, mask, last_slots(tokens, last), 0.25, 3)
        wrong = attention_error(query, keys, values, mask[..., : length + tokens], attended)
        assert wrong < 2e-6 if is_right else wrong > 1e-3


def use_kernels(patch):
    """Let passes attend with split keys, as on CUDA."""
    patch.setattr(kernel_launch, "_failed_kernels", set())
    patch.setattr(split_keys, "kernels_available", lambda device: True)
    patch.setattr(split_keys, "DTYPES", (torch.float32,))
    patch.setattr(split_keys, "MIN_EXTENT", 1)
    split = partial(split_key_attention, num_parts=3)
    patch.setattr(attention, "split_key_attention", split)


@interpreted
def test_a_decoder_generates_the_same_with_split_keys(monkeypatch):
    """From the first token on, in the tree's passes, and in plain ones of a model whose heads share
    nothing."""
    launches = []

    def note(query, *_):
        launches.append(query.shape[2])

    for tree, options in ((TREES["both"], {}), (TREES["root"], {"num_key_value_heads": 4})):
        target = tiny("Llama", num_hidden_layers=2, **options)
        decoder = SequoiaDecoder(target, tiny("Llama", 1, num_hidden_layers=1), tree)
        expected = decoder.generate([5, 6, 7], 8).sequences
        with monkeypatch.context() as patch:
            use_kernels(patch)
            spy(patch, attention, "split_key_attention", note)
            assert decoder.generate([5, 6, 7], 8).sequences.equal(expected)
        assert tree.size in launches


@interpreted
@pytest.mark.parametrize("splits_keys", [True, False])
def test_one_graph_serves_all_lengths(splits_keys, monkeypatch):
    """Where attention finds the end of the text on the device; else each extent has a graph."""
    target, draft = (tiny("Llama", seed, num_hidden_layers=1) for seed in (0, 1))
    decoder = SequoiaDecoder(target, draft, TokenTree.chain(3))
    expected = decoder.generate([5, 6, 7], 16).sequences
    simulate_capture(decoder.step)
    monkeypatch.setattr(captured_step, "EXTENT_MULTIPLE", {"cpu": 64, "cuda": 8})
    if splits_keys:
        use_kernels(monkeypatch)
    assert decoder.generate([5, 6, 7], 16).sequences.equal(expected)
    captures = decoder.step.models.graphs.captures
    assert captures == ["step"] if splits_keys else len(captures) > 2
    # a kernel that cannot be compiled, a tree that is too large, another attention
    if splits_keys:
        assert decoder.step.splits_keys()
        with monkeypatch.context() as patch:  # such passes attend by tensor operations
            patch.setattr(decoder.step.target.module, "_compiled_call_impl", len)
            assert not decoder.step.splits_keys()
        assert not decoder.with_tree(TokenTree.chain(257)).step.splits_keys()
        kernel_launch._failed_kernels.add((split_keys.KERNELS_NAME, torch.float32))
        assert not decoder.step.splits_keys() and decoder.step.extent(3) < 64


EPSILON = 1e-5


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
def test_norms_of_hidden_states_of_heads_and_of_sums(width, dtype):
    """Heads are a part of a wider tensor. The norm of a sum is that of the sum as it is kept."""
    weight = 1 + random(width, dtype=dtype, seed=1) / 4
    for x in (random(1, 5, width, dtype=dtype), random(1, 3, 7, width, dtype=dtype)[:, :, 1:5]):
        _, result = layer_operations.rms_norm(x, weight, EPSILON)
        assert_is(result, normed(x, weight), normed(x, weight.roll(1)))
        total, result = layer_operations.rms_norm(x, weight, EPSILON, x.roll(1, -1))
        assert_is(total, x.double() + x.double().roll(1, -1), x.double())
        assert_is(result, normed(total, weight), normed(x, weight))


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [*zip(TOLERANCE, (24, 128, 8), strict=True)], ids=str
)
def test_heads_are_normed_rotated_and_cached(head_dim, dtype, rotates, has_norms):
    """Six heads of queries, two of keys, two of values; each token has its own angles and slot."""
    heads = random(1, 5, 10, head_dim, dtype=dtype)
    turns = torch.rand(1, 5, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    angles = torch.cat((turns, turns), -1).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [1 + random(head_dim, dtype=dtype, seed=s) / 4 for s in (1, 2)]
    norms = [fused_layer.RMSNorm(weight, EPSILON) for weight in weights] if has_norms else ()
    keys, values = torch.zeros(2, 1, 2, 9, head_dim, dtype=dtype, device=DEVICE)
    slots = torch.tensor([8, 2, 3, 0, 5], device=DEVICE)
    queries = layer_operations.rotate_and_cache(
        heads, norms, (cos, sin) if rotates else None, slots, keys, values
    )

    def expected(part, weight, sin):
        part = normed(part, weight) if has_norms else part.double()
        return rotated(part, cos, sin) if rotates else part

    query_heads, key_heads, value_heads = heads.split((6, 2, 2), 2)
    for result, part, weight, other_weight in (
        (queries, query_heads, *weights),
        (keys[:, :, slots], key_heads, *weights[::-1]),
    ):
        right = expected(part, weight, sin)
        wrong = [expected(part, other_weight, -sin)] if rotates or has_norms else []
        assert_is(result.transpose(1, 2).contiguous(), right, *wrong, right.roll(1, 1))
    assert torch.equal(values[:, :, slots].transpose(1, 2), value_heads)
    assert keys.count_nonzero() == values.count_nonzero() == 5 * 2 * head_dim


@pytest.mark.parametrize(("dtype", "width"), [*zip(TOLERANCE, (1500, 3, 96), strict=True)], ids=str)
def test_gates(width, dtype):
    """One block and more; the control has gate and up the other way round."""
    gate_up = random(1, 4, 2 * width, dtype=dtype)
    wrong = gated(gate_up.roll(width, -1))
    assert_is(layer_operations.silu_mul(gate_up), gated(gate_up), wrong)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "SmolLM3"])
def test_a_model_computes_the_same_with_kernels(name, monkeypatch):
    """Qwen3's heads have norms, and some of SmolLM3's layers do not rotate. A layer's norms come
    with the sums before them, and its heads are written to the cache by the kernel. The control
    leaves out the rotation."""
    model = tiny(name).to(DEVICE)
    fuse(model)
    step, names = SequoiaDecoder(model, None, TREES["root"]).step, []

    expected = logits_of(step)
    monkeypatch.setattr(layer_operations, "runs_kernels", lambda x: True)
    spy(monkeypatch, layer_operations, "kernel_or_tensors", lambda name, *_: names.append(name[0]))
    assert (logits_of(step) - expected).norm() < 1e-5 * expected.norm()
    layers = model.config.num_hidden_layers
    assert Counter(names) == {"norm": 1 + 2 * layers, "heads": layers, "gate": layers}
    rotate = layer_operations.rotate_and_cache
    monkeypatch.setattr(
        fused_layer, "rotate_and_cache", lambda *args: rotate(*args[:2], None, *args[3:])
    )
    assert (logits_of(step) - expected).norm() > 1e-3 * expected.norm()
