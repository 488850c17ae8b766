"""A draft out of the target: its weights, that the target stays as it is, and that decoding with it is exact."""

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
from sequoia_plan.runtime.models.forward import decoder_layers
from sequoia_plan.runtime.models.int8 import Int8Linear, rows_in_8_bits
from sequoia_plan.runtime.models.lean import LeanLayer
from sequoia_plan.runtime.models.repack import can_repack, repack

pytestmark = pytest.mark.usefixtures("one_thread")
TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 6])
EXPERTS = {"Qwen3-MoE", "Mixtral"}
LEAN = {"Llama", "Qwen2", "Qwen3"}


def layers_of(model):
    return decoder_layers(model)[1]


def matrix(seed=0, rows=int8.ROWS_AT_A_TIME + 50, columns=24):
    """Rows of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 2, rows)[:, None]
    weight[3] = 0
    return weight


def errors(weight, integers, scales):
    """Each weight's error in scales of its row."""
    return ((weight.double() - integers.double() * scales.double()[:, None]).abs() / scales.double()[:, None]).amax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_off_by_at_most_half_its_rows_scale(dtype):
    weight = matrix()
    integers, scales = rows_in_8_bits(weight, dtype)
    assert integers.dtype == torch.int8 and scales.dtype == dtype and int(integers.min()) >= -127
    assert (errors(weight, integers, scales) <= 0.5 + 1e-4).all()
    assert torch.allclose(scales.double(), weight.double().abs().amax(1).clamp(min=1e-12) / 127, rtol=2**-8)


def test_scales_rounded_after_the_integers_were_made_break_the_bound():
    """Negative control."""
    weight = matrix()
    integers, scales = rows_in_8_bits(weight, torch.float32)
    assert (errors(weight, integers, scales.bfloat16()) > 0.6).any()


@pytest.mark.parametrize("shape", [(64, 32), (97, 48), (5, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_multiplies_by_what_it_keeps(shape, bias):
    """By the kernel for a few rows, by a matrix made anew for many."""
    torch.manual_seed(0)
    weight, added = matrix(1, *shape), torch.randn(shape[0]) if bias else None
    layer = Int8Linear(weight, added, torch.bfloat16)
    kept = layer.weight.double() * layer.scales.double()[:, None]
    for rows in (1, 3, int8.NARROW, int8.NARROW + 1):
        x = torch.randn(2, rows, shape[1]).bfloat16() if rows < 3 else torch.randn(1, rows, shape[1]).bfloat16()
        expected, terms = x.double() @ kept.T, x.double().abs() @ kept.abs().T  # rounding is relative to the terms, which may cancel out
        if added is not None:
            expected, terms = expected + added.double(), terms + added.double().abs()
        error = (layer(x).double() - expected).norm() / terms.norm()
        assert error < 2**-7, (rows, float(error))


def test_layers_of_other_devices_and_dtypes_do_without_the_kernel(monkeypatch):
    monkeypatch.setattr(torch, "_weight_int8pack_mm", None)
    weight = matrix(2, 40, 16)
    layer, x = Int8Linear(weight, None, torch.float32), torch.randn(3, 16)
    assert torch.allclose(layer(x), x @ (layer.weight.float() * layer.scales.float()[:, None]).T, rtol=1e-5, atol=1e-6)


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits.float()


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def plain_copy(target):
    """As `self_draft` copies a target whose layers it does not know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "can_be_lean", lambda *_: False)
        return self_draft(target)


def without_window(name):
    return tiny(name, **({"sliding_window": None} if name == "Mistral" else {}))


@pytest.mark.parametrize("name", [*sorted(LEAN), "Mistral"])
def test_lean_layers_are_the_layers_of_transformers(name, monkeypatch):
    target = without_window(name)
    lean, plain = self_draft(target), plain_copy(target)
    assert {type(layer) for layer in layers_of(lean)} == {LeanLayer}
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    for left_out in (None, torch.ones(2, 20, dtype=torch.long).index_fill(1, torch.tensor([0, 1]), 0)):
        with torch.inference_mode():
            ours, theirs = (model(tokens, attention_mask=left_out).logits[:, 2:].float() for model in (lean, plain))
        assert relative(ours, theirs) < 0.05
    layers_of(lean)[1].scaling *= 1.5  # the control
    assert relative(logits(lean, tokens), logits(plain, tokens)) > 0.1


@pytest.mark.parametrize("name", sorted(READS_TREES.keys() - EXPERTS))
def test_decoding_is_exact_with_every_architecture(name):
    target = tiny(name)
    draft = self_draft(target)
    assert all(type(layer) is LeanLayer for layer in layers_of(draft)) == (name in LEAN)
    prompt = torch.randint(VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
    decoder = SequoiaDecoder(target, draft, TREE)
    ours = decoder.generate(prompt, 40)
    with torch.inference_mode():
        theirs = target.generate(prompt[None], attention_mask=torch.ones(1, 9, dtype=torch.long), max_new_tokens=40, do_sample=False)
    assert torch.equal(ours.sequences, theirs)
    assert ours.tokens_per_step > 2, "a copy in 8 bits must often agree with what it is a copy of"


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_are_refused(name):
    with pytest.raises(SequoiaPlanError, match=r"draft int8: .* has weights that are not those of linear layers \(mlp\.[a-z._]*\); name another draft"):
        self_draft(tiny(name))


@pytest.mark.skipif(not can_repack(torch.float32, "cpu"), reason="no kernels for repacked weights")
def test_a_repacked_target_is_refused():
    with pytest.raises(SequoiaPlanError, match="linear layers are repacked for this processor; make the draft before"):
        self_draft(repack(tiny("Llama")))


def test_a_model_whose_layers_cannot_be_found_is_refused():
    target = tiny("Llama")
    target.model.layers = nn.Sequential(*target.model.layers)
    with pytest.raises(SequoiaPlanError, match="llama: no list of 3 layers found in the model"):
        self_draft(target)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_stays_as_it_is_and_nothing_of_it_is_kept_but_its_embeddings(name, dtype):
    target = tiny(name).to(dtype)
    kinds, before = [type(each) for each in target.modules()], {key: value.clone() for key, value in target.state_dict().items()}
    draft = self_draft(target)
    assert [type(each) for each in target.modules()] == kinds
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    theirs = {parameter.data_ptr(): key for key, parameter in target.named_parameters()}
    shared = {theirs[parameter.data_ptr()] for parameter in draft.parameters() if parameter.data_ptr() in theirs}
    embeddings = {"Llama": {"model.embed_tokens.weight"}, "GPT-2": {"transformer.wte.weight", "transformer.wpe.weight"}}[name]
    assert shared == (embeddings if dtype == torch.bfloat16 else set())  # in another dtype they are looked up in the target and then converted
    matrices = [parameter for parameter in draft.parameters() if parameter.ndim > 1 and parameter.data_ptr() not in theirs]
    assert matrices and all(parameter.dtype == torch.int8 for parameter in matrices)
    assert draft.dtype == torch.bfloat16 and draft.config is target.config


@pytest.mark.parametrize("name", ["Llama", "GPT-NeoX"])
def test_layers_are_read_one_at_a_time(name):
    """A target whose layers are on the meta device: when a layer is read, none of the weights read before is alive."""
    whole = tiny(name)
    expected = logits(self_draft(whole), tokens := torch.arange(12)[None])
    weights = [{key: value.detach().clone() for key, value in layer.named_parameters()} for layer in layers_of(whole)]
    alive, most = weakref.WeakSet(), []

    def read():
        for layer in weights:
            most.append(len(alive))
            given = {key: value.clone() for key, value in layer.items()}
            for value in given.values():
                alive.add(value)
            yield given
            del given, value

    for layer in layers_of(whole):
        layer.to("meta")
    draft = self_draft(whole, read())
    assert most == [0, 0, 0] and not alive
    assert torch.equal(logits(draft, tokens), expected)
    assert all(parameter.device.type == "meta" for parameter in layers_of(whole).parameters())


def coarse_target():
    """A small Llama whose copy in 8 bits is a poor one: one large column, which meets only zeros, makes the other weights of its rows coarse."""
    target = tiny("Llama", vocab_size=8, num_hidden_layers=1)
    for name, parameter in target.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "lm_head.weight")):
            parameter.data[:, 0] = 100.0
        elif name.endswith("norm.weight"):
            parameter.data[0] = 0.0
    target.lm_head.weight.data[:, 1:] *= 0.4
    return target


def p_value(target, prompt, found):
    """Chi-square of the joint law of two tokens against the target's own."""
    contexts = [[*prompt, token] for token in range(8)]
    after = torch.softmax(logits(target, torch.tensor(contexts))[:, -2:].double(), -1)
    law = (after[0, 0][:, None] * after[:, 1]).flatten().numpy()
    expected, observed = law * len(found), np.bincount(found[:, 0] * 8 + found[:, 1], minlength=64)
    rare = expected < 5
    pooled = [np.append(each[~rare], each[rare].sum()) for each in (observed, expected)]
    return chisquare(*pooled).pvalue


@pytest.mark.parametrize("verifier", ["sequoia", "traversal"])
def test_sampled_tokens_have_the_targets_law(verifier):
    target, prompt = coarse_target(), [3, 1, 4]
    draft = self_draft(target)
    p, q = (torch.softmax(logits(model, torch.tensor([prompt]))[0, -1], -1) for model in (target, draft))
    assert (p - q).abs().sum() / 2 > 0.1, "the draft is too good for the control to show anything"
    found, broken = (
        first_tokens(SequoiaDecoder(target, draft, TokenTree.from_parents([-1, 0, 0, 1])), prompt, range(1000), 2, Sampling(1.0, verifier=verifier), fault)
        for fault in (False, True)
    )
    assert p_value(target, prompt, found) > 1e-3
    assert p_value(target, prompt, broken) < 1e-6  # the control: rejected probability is not moved to the residual


def test_greedy_with_drafts_that_cover_part_of_the_vocabulary():
    """A head of some tokens under the same layers, as for other drafts."""
    target = tiny("Llama")
    draft = self_draft(target)
    covered = torch.arange(0, VOCABULARY, 2)
    draft.lm_head = Int8Linear(target.lm_head.weight[covered], None, draft.dtype)
    draft.covered_tokens = covered
    prompt = torch.tensor([5, 6, 7])
    alone = SequoiaDecoder(target, None, TokenTree.chain(1)).generate(prompt, 40)
    assert torch.equal(SequoiaDecoder(target, draft, TREE).generate(prompt, 40).sequences, alone.sequences)
