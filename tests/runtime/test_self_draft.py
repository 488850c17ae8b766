"""A draft made from the target: its weights, an unchanged target, and the KV cache they share."""

import copy
import re
import weakref

import pytest
import torch
from architectures import FUSED, VOCABULARY, plain_text, tiny
from streamed import PROMPT
from torch import nn
from transformers import AutoModelForCausalLM

from sequoia_plan.artifacts import SELF_DRAFT, SequoiaPlanError, TokenTree
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.backends import place
from sequoia_plan.runtime.backends.modules import self_draft as module
from sequoia_plan.runtime.backends.modules.self_draft import self_draft
from sequoia_plan.runtime.draft.language_model import SelfDrafter
from sequoia_plan.runtime.models import int8
from sequoia_plan.runtime.models.architecture import decoder_layers
from sequoia_plan.runtime.models.fused_layer import FusedLayer
from sequoia_plan.runtime.models.int8 import Int8Linear, rows_in_8_bits
from sequoia_plan.runtime.offload.memory import cache_bytes

pytestmark = pytest.mark.slow
TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 6])
COPIED = ("Llama", "Qwen3", "SmolLM3", "Mistral", "Phi-3", "GPT-NeoX", "GPT-2", "OPT", "Gemma 2")
"""Fused layers, joined matrices, other linear layers, windows, and learned positions."""


def layers_of(model):
    return decoder_layers(model)[1]


def draft_of(target, *options):
    """A copy of a module that PyTorch runs."""
    return self_draft(place(target, "resident"), *options)


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
    assert integers.dtype == torch.int8 and scales.dtype == dtype
    assert (integers.abs().amax(1)[weight.any(1)] == 127).all()
    assert (errors(weight, integers, scales) <= 0.5 + 1e-4).all()
    if dtype == torch.float32:  # the control: scales rounded after the integers were made
        assert (errors(weight, integers, scales.bfloat16()) > 0.6).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, int8.MAX_KERNEL_ROWS, int8.MAX_KERNEL_ROWS + 1])
@pytest.mark.parametrize("columns", [48, 100])
def test_a_linear_layer_multiplies_by_what_it_keeps(columns, rows, dtype, monkeypatch):
    """The kernel multiplies a few rows, a converted matrix many, and float32 does without it.

    Nor does it take numbers of columns past whose end it would read.
    """
    if dtype == torch.float32:
        monkeypatch.setattr(torch, "_weight_int8pack_mm", None)
    bias, x = torch.randn(97), torch.randn(1, rows, columns).to(dtype)
    layer = Int8Linear(matrix(1, 97, columns), bias, dtype)
    dense = layer.weight.double() * layer.scales.double()[:, None]
    expected = x.double() @ dense.T + bias.double()
    # rounding is relative to the terms of a sum, which may cancel out
    terms = x.double().abs() @ dense.abs().T + bias.double().abs()
    assert (layer(x).double() - expected).norm() / terms.norm() < 2**-7


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits.float()


def with_hidden_layers():
    target = tiny("Llama")
    target.model.layers = nn.Sequential(*target.model.layers)
    return target


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("Qwen3-MoE"), "not those of linear layers .*; name another draft"),
        (lambda: tiny("Mixtral"), "not those of linear layers .*; name another draft"),
        (with_hidden_layers, "llama: no list of 3 layers found in the model"),
    ],
)
def test_targets_without_a_copy_are_refused(make, message):
    with pytest.raises(SequoiaPlanError, match=message):
        draft_of(make())


@pytest.mark.parametrize("name", ["Llama", "GPT-NeoX"])
def test_layers_are_read_one_at_a_time(name):
    """When a layer is read, none of the weights that were read before it is alive.

    The target's layers are on the meta device.
    """
    target, tokens = tiny(name), torch.arange(12)[None]
    expected = logits(draft_of(target).module, tokens)
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
    reader = read_layers()
    draft = draft_of(target, lambda number: next(reader)).module
    reader.close()
    assert alive_counts == [0, 0, 0] and not alive
    assert logits(draft, tokens).equal(expected)
    assert all(parameter.device.type == "meta" for parameter in layers_of(target).parameters())


@pytest.fixture
def in_the_targets_dtype(monkeypatch):
    """Copies compute in float32, in which equal texts are asserted."""
    monkeypatch.setattr(module, "draft_dtype", lambda target: target.dtype)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", COPIED)
def test_greedy_text_is_the_targets(name, shares, monkeypatch):
    """A copy in the target's dtype shares its cache; on the CPU that of float32 is bfloat16."""
    if shares:
        monkeypatch.setattr(module, "draft_dtype", lambda target: target.dtype)
    target = tiny(name)
    prompt = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    expected, draft = plain_text(target, prompt, 40), draft_of(target)
    assert all(type(layer) is FusedLayer for layer in layers_of(draft.module)) == (name in FUSED)
    decoder = SequoiaDecoder(target, draft, TREE)
    result = decoder.generate(prompt, 40)
    sequence = decoder.step.sequence
    assert (decoder.step.drafter.drafting == SELF_DRAFT) == shares
    assert (sequence.draft is sequence.target) == shares
    assert result.sequences.equal(expected)
    assert result.tokens_per_step > 2, "a copy in 8 bits must often agree with its original"


@pytest.mark.usefixtures("in_the_targets_dtype")
def test_a_draft_that_writes_what_is_committed_breaks_the_text(monkeypatch):
    """Negative control: keys and values of committed tokens must be the target's own."""
    target = tiny("Llama")
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = plain_text(target, prompt, 40)
    decoder = SequoiaDecoder(target, draft_of(target), TREE)
    layers = decoder.step.drafter.model.module.model.layers
    layers[0].self_attn.qkv_proj.scales.data.mul_(3)
    monkeypatch.setattr(SelfDrafter, "prefill", lambda self, *args: None)
    assert decoder.generate(prompt, 40).sequences.equal(expected), "a poor copy is exact"
    prefill = decoder.step.target.prefill

    def read_by_both(cache, tokens, on_chunk=None, start=0, hidden_states=()):
        prefill(cache, tokens, on_chunk, start)
        decoder.step.drafter.model.prefill(cache, tokens)

    monkeypatch.setattr(decoder.step.target, "prefill", read_by_both)
    assert not decoder.generate(prompt, 40).sequences.equal(expected)


def test_only_copies_of_the_target_share():
    target, other = tiny("Llama").bfloat16(), tiny("Llama").bfloat16()
    draft = draft_of(target)
    shares = {
        model: SequoiaDecoder(model, draft, TREE).step.drafter.drafting == SELF_DRAFT
        for model in (target, other)
    }
    assert shares == {target: True, other: False}
    decoder = SequoiaDecoder(target, draft, TREE)
    copied = copy.deepcopy(decoder)
    sequence = copied.step.sequence
    assert sequence.draft is sequence.target is not decoder.step.sequence.target
    first, second = (each.generate([3, 1, 4], 30, 1.0, seed=0) for each in (decoder, copied))
    assert first.sequences.equal(second.sequences)


@pytest.mark.usefixtures("in_the_targets_dtype")
def test_a_streamed_target_and_its_copy(folder):
    target = str(folder / "target")
    options = {"dtype": "float32", "offload": "disk"}
    with pytest.raises(SequoiaPlanError, match="expected at least") as refused:
        load_pair(target, "int8", memory=1, **options)
    needed = float(re.search(r"least (\S+) kB", str(refused.value))[1])
    pair = load_pair(target, "int8", memory=int(1000 * needed + 1000), **options)
    metadata = pair.metadata["target"]
    assert metadata["resident_layers"] == 0
    assert metadata["cache_bytes"] == cache_bytes(pair.target), "both models have one cache"
    in_memory = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    result = SequoiaDecoder(pair.target, pair.draft, TREE).generate(PROMPT, 40)
    assert result.sequences.equal(plain_text(in_memory, PROMPT[None], 40))
    assert result.tokens_per_step > 2
