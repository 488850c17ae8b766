"""A copy of the target that reads the target's KV cache: exactness, and what it reads."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import READS_TREES, VOCABULARY, plain_text, tiny
from streamed import LAYERS, PROMPT
from transformers import AutoModelForCausalLM

from sequoia_plan.artifacts import SELF_DRAFT, TokenTree
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.draft import self_draft as module
from sequoia_plan.runtime.draft.language_model import SelfDrafter
from sequoia_plan.runtime.draft.self_draft import copy_bytes, self_draft, shares_cache
from sequoia_plan.runtime.models.architecture import decoder_layers
from sequoia_plan.runtime.models.int8 import Int8Linear
from sequoia_plan.runtime.offload.memory import SLOTS, cache_bytes, own_bytes
from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 6])
EXPERTS = {"Qwen3-MoE", "Mixtral"}


@pytest.fixture
def in_the_targets_dtype(monkeypatch):
    """Copies compute in float32, in which equal texts are asserted."""
    monkeypatch.setattr(module, "draft_dtype", lambda target: target.dtype)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", sorted(READS_TREES.keys() - EXPERTS))
def test_greedy_text_is_the_targets(name, shares, monkeypatch):
    """A copy in the target's dtype shares its cache; on the CPU that of float32 is bfloat16."""
    if shares:
        monkeypatch.setattr(module, "draft_dtype", lambda target: target.dtype)
    target = tiny(name)
    prompt = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    decoder = SequoiaDecoder(target, self_draft(target), TREE)
    result = decoder.generate(prompt, 40)
    sequence = decoder.step.sequence
    assert (decoder.step.drafter.drafting == SELF_DRAFT) == shares
    assert (sequence.draft is sequence.target) == shares
    assert torch.equal(result.sequences, plain_text(target, prompt, 40))
    assert result.tokens_per_step > 2, "a copy in 8 bits must often agree with its original"


@pytest.mark.usefixtures("in_the_targets_dtype")
def test_a_draft_that_writes_what_is_committed_breaks_the_text(monkeypatch):
    """Negative control: keys and values of committed tokens must be the target's own."""
    target = tiny("Llama")
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = plain_text(target, prompt, 40)
    decoder = SequoiaDecoder(target, self_draft(target), TREE)
    layers = decoder.step.drafter.model.model.model.layers
    layers[0].self_attn.qkv_proj.scales.data.mul_(3)
    monkeypatch.setattr(SelfDrafter, "prefill", lambda self, *args: None)
    assert torch.equal(decoder.generate(prompt, 40).sequences, expected), "a poor copy is exact"
    prefill = decoder.step.target.prefill

    def read_by_both(cache, tokens, on_chunk=None):
        prefill(cache, tokens, on_chunk)
        decoder.step.drafter.model.prefill(cache, tokens)

    monkeypatch.setattr(decoder.step.target, "prefill", read_by_both)
    assert not torch.equal(decoder.generate(prompt, 40).sequences, expected)


def test_only_copies_of_the_target_share():
    target, other = tiny("Llama").bfloat16(), tiny("Llama").bfloat16()
    draft = self_draft(target)
    assert shares_cache(draft, target)
    assert not shares_cache(draft, other) and not shares_cache(other, target)
    decoder = SequoiaDecoder(target, draft, TREE)
    copied = copy.deepcopy(decoder)
    sequence = copied.step.sequence
    assert sequence.draft is sequence.target is not decoder.step.sequence.target
    first, second = (each.generate([3, 1, 4], 30, 1.0, seed=0) for each in (decoder, copied))
    assert torch.equal(first.sequences, second.sequences)


@pytest.mark.usefixtures("in_the_targets_dtype")
@pytest.mark.parametrize("placement", ["auto", "resident"])
@pytest.mark.parametrize("resident", [0, 1, LAYERS - SLOTS - 2])
def test_layers_in_memory_serve_target_and_draft(folder, resident, placement):
    target = str(folder / "target")
    options = {"dtype": "float32", "offload": "disk", "placement": placement}
    pair = load_pair(target, "int8", memory=memory_for(target, resident), **options)
    metadata = pair.metadata["target"]
    assert metadata["resident_layers"] == resident
    assert metadata["cache_bytes"] == cache_bytes(pair.target), "both models have one cache"
    layers = zip(decoder_layers(pair.draft)[1], decoder_layers(pair.target)[1], strict=True)
    assert sum(own is of_the_target for own, of_the_target in layers) == resident
    assert 0 < own_bytes(pair.draft, pair.target) <= metadata["draft_bytes"]
    in_memory = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    result = SequoiaDecoder(pair.target, pair.draft, TREE).generate(PROMPT, 40)
    assert torch.equal(result.sequences, plain_text(in_memory, PROMPT[None], 40))
    assert result.tokens_per_step > 2


def memory_for(target, resident):
    """Bytes with which so many layers of a target stay in memory, beside its copy."""
    offloaded = OffloadedTarget(target, "cpu", torch.float32)
    size = max(offloaded.layer_sizes())
    copy_size = max(copy_bytes(layer.parameters(), torch.float32) for layer in offloaded.layers)
    offloaded.file.close()
    some_bytes = 1000  # the copy of what is outside of the layers, and less than a layer
    assert some_bytes < size - copy_size
    fixed_bytes = offloaded.outside_bytes + cache_bytes(offloaded.model) + some_bytes
    return fixed_bytes + SLOTS * size + resident * size + (LAYERS - resident) * copy_size


def test_a_target_that_fits_has_a_whole_copy(folder):
    pair = load_pair(str(folder / "target"), "int8", dtype="bfloat16", offload="disk", memory="1GB")
    assert pair.metadata["target"]["streamed_bytes"] == 0
    assert isinstance(pair.draft.get_output_embeddings(), Int8Linear)
    draft_layers, target_layers = (
        set(decoder_layers(model)[1]) for model in (pair.draft, pair.target)
    )
    assert not draft_layers & target_layers and shares_cache(pair.draft, pair.target)
