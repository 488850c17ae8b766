"""A target whose layers are streamed decodes as the same target in memory."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from architectures import FUSED, READS_TREES, TREE, tiny, words
from commands import call
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from streamed import LAYERS, PROMPT, decoder, in_memory, save_models, streamed, tokens
from transformers import BitNetQuantConfig
from transformers.integrations.bitnet import BitLinear, pack_weights, replace_with_bitnet_linear

from sequoia_plan.artifacts import ArgumentError, Profile, SequoiaPlanError, load_tree
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.models.layers.fused_layer import FusedLayer
from sequoia_plan.models.modules import offloaded_target
from sequoia_plan.models.modules.offloaded_target import OffloadedTarget
from sequoia_plan.models.offload import disk_stream
from sequoia_plan.models.offload.memory import SLOTS, as_bytes, split_memory
from sequoia_plan.runtime import SequoiaDecoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def offloaded_from(folder):
    """The target in a folder, which gets a tokenizer, before its layers have their places."""
    words().save_pretrained(folder)
    return OffloadedTarget(find_model(str(folder)), "cpu", torch.float32)


@pytest.mark.parametrize("name", READS_TREES)
def test_architectures(name, tmp_path):
    """Tied weights, experts that transformers fuses as it loads them, windows, other names."""
    changes = {"n_layer": 6} if name == "GPT-2" else {"num_hidden_layers": 6}
    tiny(name, **changes).save_pretrained(tmp_path)
    offloaded = offloaded_from(tmp_path)
    assert place(offloaded, resident=1) == (6 if name in FUSED else 0)
    assert len(offloaded.backend.stream.blocks) >= 5
    assert_same_tokens(offloaded, tmp_path)


@torch.inference_mode()
def test_a_pass_reads_the_experts_that_it_chooses(tmp_path, monkeypatch):
    """The first pass reads all, to check them; the second one's logits are the same, bit for bit.

    So are they with the experts in memory that were chosen most often, and fewer bytes are read.
    The control reads one expert too few.
    """
    wide = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    tiny("Qwen3-MoE", num_hidden_layers=6, num_local_experts=16, **wide).save_pretrained(tmp_path)
    offloaded = offloaded_from(tmp_path)
    read_chosen, counts, left_out = disk_stream.DiskStream.read_chosen, Counter(), []

    def noted(stream, layer, experts):
        counts.update((layer, row) for row in experts.flatten().tolist())
        read_chosen(stream, layer, experts.unique()[len(left_out) :] if left_out else experts)

    monkeypatch.setattr(disk_stream.DiskStream, "read_chosen", noted)
    place(offloaded, resident=-2 + 1 / 2)
    stream = offloaded.backend.stream

    def logits():
        return offloaded.model(PROMPT[None, :4]).logits

    whole = logits()
    expert_bytes = stream.blocks[0].size // 16

    def bytes_read():
        """Of a pass; the experts that it needs and that are not in memory, and few more."""
        counts.clear()
        assert logits().equal(whole)
        union = sum(expert not in stream.kept for expert in counts) * expert_bytes
        assert union <= stream.bytes < 1.1 * union
        return stream.bytes

    bytes_before = bytes_read()
    stream.keep_most_chosen([3, 4])  # of another model: what this one has counted holds
    assert len(stream.kept) == 8
    assert_most_chosen(stream.kept, counts)
    logits()
    assert bytes_read() <= bytes_before - expert_bytes
    left_out.append(1)
    assert not logits().equal(whole)


def assert_most_chosen(kept, counts):
    others = [count for expert, count in counts.items() if expert not in kept]
    assert 0 < max(others) <= min(counts.get(expert, 0) for expert in kept)


def place(offloaded, resident):
    """Keep so many layers in memory, and stream the others from disk; how many are fused."""
    sizes, outside_bytes = offloaded.layer_sizes(), offloaded.outside_bytes
    # a family's layers may differ in size
    memory = outside_bytes + int(min((SLOTS + resident) * max(sizes), sum(sizes) - 1))
    slots = 1 if offloaded.routed else SLOTS
    offloaded.load(split_memory(memory, outside_bytes, 0, 0, sizes, slots=slots), "disk")
    return offloaded.backend.recorded["fused_layers"]


def assert_same_tokens(offloaded, folder):
    """The text is that of the folder's model in memory."""
    in_memory = find_model(str(folder)).module(torch.float32)
    sequences = [
        SequoiaDecoder(target, in_memory, TREE).generate(PROMPT, 24).sequences
        for target in (offloaded.model, in_memory)
    ]
    assert torch.equal(*sequences)


def save_with_bitnet_weights(folder):
    """Save a Llama as BitNet checkpoints are published.

    Weights are ternary, four to a byte, and each matrix has a scale.
    """
    model, kept = tiny("Llama", num_hidden_layers=6), {"modules_to_not_convert": ["lm_head"]}
    config = BitNetQuantConfig(**kept)
    model = replace_with_bitnet_linear(model, **kept, quantization_config=config)
    for module in model.modules():
        if isinstance(module, BitLinear):
            size = module.out_features, module.in_features
            module.weight = pack_weights(torch.randint(-1, 2, size).float())
            module.weight_scale *= 0.3
    model.config.quantization_config = config
    model.save_pretrained(folder)


@torch.compiler.set_stance("force_eager")  # transformers compiles such layers
def test_quantised_weights_are_streamed_as_they_are(tmp_path):
    """A layer has as few bytes in the file and in its slot as in the checkpoint.

    The tokens are those of the quantised model in memory.
    """
    save_with_bitnet_weights(tmp_path)
    offloaded = offloaded_from(tmp_path)
    quantised = offloaded.layer(0)["mlp.up_proj.weight"]
    assert quantised.dtype == torch.uint8 and quantised.numel() == 48 * 32 // 4
    assert place(offloaded, resident=0) == 0, "matrices in buffers are no linear layers"
    assert_same_tokens(offloaded, tmp_path)


def test_weights_that_are_more_than_tensors_are_refused(tmp_path, monkeypatch):
    class Packed(torch.Tensor):
        pass

    save_with_bitnet_weights(tmp_path)
    tensors = {"a": torch.zeros(2).as_subclass(Packed)}
    monkeypatch.setattr(offloaded_target, "_saved_tensors", lambda model: tensors)
    with refusal("a is a Packed, expected plain tensors"):
        offloaded_from(tmp_path)


def test_weights_in_the_wrong_place_are_noticed(folder, monkeypatch):
    """The control: with another order of the file a layer would not read what is in its slot."""
    in_order = offloaded_target.in_joined_order
    monkeypatch.setattr(offloaded_target, "in_joined_order", lambda names: in_order(names)[::-1])
    with refusal(r"reads \d+ bytes of its slot, expected \d+"):
        streamed(folder)


def test_layers_of_transformers_are_streamed_where_the_user_asks_for_them(folder):
    pair = streamed(folder, placement="resident")
    assert not any(type(layer) is FusedLayer for layer in pair.target.module.model.layers)
    assert tokens(pair).equal(tokens(in_memory(folder, "resident")))


@given(
    st.lists(st.integers(1, 100), min_size=4, max_size=40),
    st.integers(0, 4000),
    *[st.integers(0, 50)] * 3,
)
def test_what_fits_stays(sizes, memory, outside_bytes, draft_bytes, cache_bytes):
    fixed_bytes = outside_bytes + draft_bytes + cache_bytes
    try:
        split = split_memory(memory, outside_bytes, draft_bytes, cache_bytes, sizes)
    except SequoiaPlanError:
        assert memory < fixed_bytes + 2 * max(sizes)
        return
    resident = split.resident_layers
    assert split.resident_bytes + split.streamed_bytes == sum(sizes)
    assert split.draft_bytes == draft_bytes
    fixed_bytes += split.slot_bytes
    assert fixed_bytes + split.resident_bytes <= memory
    assert sorted(set(resident)) == list(resident)
    assert sum(sizes[layer] for layer in resident) == split.resident_bytes
    if split.streamed_bytes and len(resident) + SLOTS < len(sizes):
        one_more = (len(resident) + 1) * max(sizes)
        assert fixed_bytes + one_more > memory  # it is not sure to fit


def test_sizes():
    cpu = torch.device("cpu")
    texts = ("300MB", "1.5GB", "2GiB", "7", 12, " 3 kb")
    sizes = [300_000_000, 1_500_000_000, 2 << 30, 7, 12, 3000]
    assert [as_bytes(text, cpu) for text in texts] == sizes
    assert 1e8 < as_bytes(None, cpu) < 1e14
    for wrong in ("", "much", "-3MB", "0", "nan", "3 XB", "1e400GB"):
        with refusal("expected a size, as 300MB or 24GB", ArgumentError):
            as_bytes(wrong, cpu)


def models_of(folder):
    return ["--target", folder / "target", "--draft", folder / "draft", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1GB"], "add --offload host or disk"),
        (["--offload", "host", "--device", "cpu"], "found --device cpu; use --offload disk"),
        (["--offload", "disk", "--memory", "lots"], "memory: found 'lots', expected a size"),
        (["--offload", "disk", "--memory", "2kB"], "memory: found 2 kB, expected at least"),
    ],
)
def test_refused_options(folder, options, message):
    result = call("generate", "--tree", "sequoia-example-64x6", *models_of(folder), *options)
    assert result.exit_code in (1, 2) and message in result.output


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE"])
def test_from_profile_to_generate(name, tmp_path, monkeypatch, run_briefly):
    """The profile says what a step waits for, the tree where the weights were; others warn.

    The experts stay in memory that were chosen most often on the profile's prompts.
    """
    monkeypatch.chdir(tmp_path)
    folder = save_models(tmp_path, name)
    Path("p.txt").write_text("dadbdcdddedfdgdhdidj\n\nfafbfcfdfefffgfhfifj\n")
    models = models_of(folder)
    placed = ["--offload", "disk", "--memory", str(streamed(folder).metadata["target"]["memory"])]

    brief = ["--prompts", "p.txt", "--tokens", "8"]
    output = run_briefly("profile", *models, *placed, *brief, "-o", "p.yaml")
    profile = Profile.load("p.yaml")
    metadata = profile.models["target"]
    stream, experts = profile.latency.stream, itertools.product(range(8), range(4))
    assert 0 < stream.bytes <= metadata["streamed_bytes"] and stream.seconds > 0
    assert f"{metadata['resident_layers']} of {LAYERS} layers" in output
    run_briefly("solve", "p.yaml", "-o", "t.safetensors")
    assert "more memory" in run_briefly("show", "t.safetensors")
    tree, offloaded = load_tree("t.safetensors"), streamed(folder)
    assert tree.plan.latency.stream == stream
    decoder(offloaded, tree)
    if name != "Llama":
        counts = dict(zip(experts, stream.expert_counts, strict=True))
        assert_most_chosen(offloaded.target.stream.kept, counts)
    generate = ["--tree", "t.safetensors", "--max-new-tokens", "4"]
    # a busy machine may be warned of; the tree must fit
    assert "the tree was solved for" not in run_briefly("generate", *models, *placed, *generate)
    assert (
        "was solved for another target than target (placement streamed from disk, here fused)"
    ) in run_briefly("generate", *models, *generate)
