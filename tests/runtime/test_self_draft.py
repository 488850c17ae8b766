"""A draft made from the target: its weights, an unchanged target, and exact decoding with it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from architectures import READS_TREES, VOCABULARY, tiny
from scipy.stats import chisquare
from torch import nn
from toys import first_tokens

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft import self_draft as module
from sequoia_plan.runtime.draft.self_draft import self_draft
from sequoia_plan.runtime.models import int8
from sequoia_plan.runtime.models.architecture import decoder_layers
from sequoia_plan.runtime.models.fuse import fuse
from sequoia_plan.runtime.models.fused_layer import FusedLayer
from sequoia_plan.runtime.models.int8 import Int8Linear, rows_in_8_bits
from sequoia_plan.runtime.models.prepacked import PrepackedLinear, can_prepack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 6])
EXPERTS = {"Qwen3-MoE", "Mixtral"}
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
    exact_scales = weight.double().abs().amax(1).clamp(min=1e-12) / 127
    assert torch.allclose(scales.double(), exact_scales, rtol=2**-8)


def test_scales_rounded_after_the_integers_were_made_break_the_bound():
    """Negative control."""
    weight = matrix()
    integers, scales = rows_in_8_bits(weight, torch.float32)
    assert (errors(weight, integers, scales.bfloat16()) > 0.6).any()


@pytest.mark.parametrize("shape", [(64, 32), (97, 48), (5, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_multiplies_by_what_it_keeps(shape, bias):
    """The kernel multiplies a few rows, a converted matrix many."""
    torch.manual_seed(0)
    weight, bias_values = matrix(1, *shape), torch.randn(shape[0]) if bias else None
    layer = Int8Linear(weight, bias_values, torch.bfloat16)
    dense = layer.weight.double() * layer.scales.double()[:, None]
    for rows in (1, 3, int8.MAX_KERNEL_ROWS, int8.MAX_KERNEL_ROWS + 1):
        x = torch.randn(2 if rows < 3 else 1, rows, shape[1]).bfloat16()
        expected = x.double() @ dense.T
        # rounding is relative to the terms of a sum, which may cancel out
        terms = x.double().abs() @ dense.abs().T
        if bias_values is not None:
            expected = expected + bias_values.double()
            terms = terms + bias_values.double().abs()
        error = (layer(x).double() - expected).norm() / terms.norm()
        assert error < 2**-7, (rows, float(error))


def test_layers_of_other_devices_and_dtypes_do_without_the_kernel(monkeypatch):
    monkeypatch.setattr(torch, "_weight_int8pack_mm", None)
    weight = matrix(2, 40, 16)
    layer, x = Int8Linear(weight, None, torch.float32), torch.randn(3, 16)
    dense = layer.weight.float() * layer.scales.float()[:, None]
    assert torch.allclose(layer(x), x @ dense.T, rtol=1e-5, atol=1e-6)


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits.float()


def relative_error(logits, expected):
    return float((logits - expected).norm() / expected.norm())


def unfused_copy(target):
    """The copy that `self_draft` makes of a target whose layers it cannot fuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "can_fuse", lambda *_: False)
        return self_draft(target)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_layers_are_the_layers_of_transformers(name, monkeypatch):
    target = tiny(name)
    fused, unfused = self_draft(target), unfused_copy(target)
    assert {type(layer) for layer in layers_of(fused)} == {FusedLayer}
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    padding_mask = torch.ones(2, 20, dtype=torch.long)
    padding_mask[:, :2] = 0
    for attention_mask in (None, padding_mask):
        with torch.inference_mode():
            fused_logits, expected = (
                model(tokens, attention_mask=attention_mask).logits[:, 2:].float()
                for model in (fused, unfused)
            )
        assert relative_error(fused_logits, expected) < 0.05
    layers_of(fused)[1].self_attn.scaling *= 2  # the control
    assert relative_error(logits(fused, tokens), logits(unfused, tokens)) > 0.1


@pytest.mark.parametrize("name", sorted(READS_TREES.keys() - EXPERTS))
def test_decoding_is_exact_with_every_architecture(name):
    target = tiny(name)
    draft = self_draft(target)
    assert all(type(layer) is FusedLayer for layer in layers_of(draft)) == (name in FUSED)
    prompt = torch.randint(VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
    decoder = SequoiaDecoder(target, draft, TREE)
    result = decoder.generate(prompt, 40)
    with torch.inference_mode():
        expected = target.generate(
            prompt[None],
            attention_mask=torch.ones(1, 9, dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
        )
    assert torch.equal(result.sequences, expected)
    assert result.tokens_per_step > 2, "a copy in 8 bits must often agree with its original"


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_are_refused(name):
    message = (
        r"draft int8: .* has weights that are not those of linear layers \(mlp\.[a-z._]*\); "
        "name another draft"
    )
    with pytest.raises(SequoiaPlanError, match=message):
        self_draft(tiny(name))


@pytest.mark.skipif(
    not can_prepack(torch.float32, "cpu"), reason="no kernels for prepacked weights"
)
def test_a_prepacked_target_is_refused():
    target = tiny("Llama")
    fuse(target, PrepackedLinear)
    message = "linear layers are repacked for this processor; make the draft before"
    with pytest.raises(SequoiaPlanError, match=message):
        self_draft(target)


def test_a_model_whose_layers_cannot_be_found_is_refused():
    target = tiny("Llama")
    target.model.layers = nn.Sequential(*target.model.layers)
    with pytest.raises(SequoiaPlanError, match="llama: no list of 3 layers found in the model"):
        self_draft(target)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_is_unchanged_and_only_its_embeddings_are_shared(name, dtype):
    target = tiny(name).to(dtype)
    classes = [type(module) for module in target.modules()]
    state = {key: value.clone() for key, value in target.state_dict().items()}
    draft = self_draft(target)
    assert [type(module) for module in target.modules()] == classes
    assert all(torch.equal(value, state[key]) for key, value in target.state_dict().items())
    name_at = {parameter.data_ptr(): key for key, parameter in target.named_parameters()}
    draft_parameters = {parameter.data_ptr(): parameter for parameter in draft.parameters()}
    shared_names = {name_at[address] for address in draft_parameters if address in name_at}
    embeddings = {
        "Llama": {"model.embed_tokens.weight"},
        "GPT-2": {"transformer.wte.weight", "transformer.wpe.weight"},
    }[name]
    # in another dtype they are looked up in the target and then converted
    assert shared_names == (embeddings if dtype == torch.bfloat16 else set())
    matrices = [
        parameter
        for address, parameter in draft_parameters.items()
        if parameter.ndim > 1 and address not in name_at
    ]
    assert matrices and all(parameter.dtype == torch.int8 for parameter in matrices)
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
    reader = read_layers()
    draft = self_draft(target, lambda number: next(reader))
    reader.close()
    assert alive_counts == [0, 0, 0] and not alive
    assert torch.equal(logits(draft, tokens), expected)
    assert all(parameter.device.type == "meta" for parameter in layers_of(target).parameters())


COARSE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


def coarse_target():
    """A small Llama whose copy in 8 bits is a poor one.

    One large column, which meets only zeros, makes the other weights of its rows coarse.
    """
    target = tiny("Llama", vocab_size=8, num_hidden_layers=1)
    for name, parameter in target.named_parameters():
        if name.endswith(tuple(f"{matrix}.weight" for matrix in COARSE)):
            parameter.data[:, 0] = 100.0
        elif name.endswith("norm.weight"):
            parameter.data[0] = 0.0
    target.lm_head.weight.data[:, 1:] *= 0.4
    return target


def p_value(target, prompt, samples):
    """Chi-square test of two tokens' joint distribution against the target's own."""
    contexts = [[*prompt, token] for token in range(8)]
    next_probs = torch.softmax(logits(target, torch.tensor(contexts))[:, -2:].double(), -1)
    joint_probs = (next_probs[0, 0][:, None] * next_probs[:, 1]).flatten().numpy()
    expected = joint_probs * len(samples)
    observed = np.bincount(samples[:, 0] * 8 + samples[:, 1], minlength=64)
    rare = expected < 5
    pooled = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    return chisquare(*pooled).pvalue


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
def test_sampled_tokens_have_the_targets_distribution(verifier):
    target, prompt = coarse_target(), [3, 1, 4]
    draft = self_draft(target)
    p, q = (
        torch.softmax(logits(model, torch.tensor([prompt]))[0, -1], -1) for model in (target, draft)
    )
    assert (p - q).abs().sum() / 2 > 0.1, "the draft is too good for the control to show anything"
    tree, sampling = TokenTree.from_parents([-1, 0, 0, 1]), Sampling(1.0, verifier=verifier)
    samples, broken_samples = (
        first_tokens(
            SequoiaDecoder(target, draft, tree), prompt, range(1000), 2, sampling, is_broken
        )
        for is_broken in (False, True)
    )
    assert p_value(target, prompt, samples) > 1e-3
    # the control: rejected probability is not moved to the residual
    assert p_value(target, prompt, broken_samples) < 1e-6


def test_greedy_with_drafts_that_cover_part_of_the_vocabulary():
    """The layers are the same; the output head has some of the tokens, as in other drafts."""
    target = tiny("Llama")
    draft = self_draft(target)
    draft.d2t = torch.arange(0, VOCABULARY, 2)
    draft.lm_head = Int8Linear(target.lm_head.weight[draft.d2t], None, draft.dtype)
    prompt = torch.tensor([5, 6, 7])
    alone = SequoiaDecoder(target, None, TokenTree.chain(1)).generate(prompt, 40)
    result = SequoiaDecoder(target, draft, TREE).generate(prompt, 40)
    assert torch.equal(result.sequences, alone.sequences)
