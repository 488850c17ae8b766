"""A target whose layers are streamed decodes as the same target in memory."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from architectures import READS_TREES, TREE, tiny
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from streamed import LAYERS, PROMPT, streamed, tokens
from transformers import BitNetQuantConfig
from transformers.integrations.bitnet import BitLinear, pack_weights, replace_with_bitnet_linear

from sequoia_plan.artifacts import ArgumentError, Profile, SequoiaPlanError, TokenTree, load_tree, save_tree
from sequoia_plan.planner.cli import main
from sequoia_plan.profiler import latency, measure
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models import offload
from sequoia_plan.runtime.models.load import load_model
from sequoia_plan.runtime.models.memory import SLOTS, as_bytes, split_memory
from sequoia_plan.runtime.models.offload import Offloaded
from sequoia_plan.runtime.models.stream import stream_of

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")


@pytest.mark.parametrize("resident", [0, 2, LAYERS - SLOTS - 1])
def test_tokens_are_those_of_the_resident_model(folder, slow_disk, resident):
    here = load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", placement="resident")
    there = streamed(folder, resident)
    facts, ring = there.facts["target"], stream_of(there.target)
    assert facts["placement"] == there.placement == "streamed from disk"
    assert facts["resident_layers"] == resident and facts["layers"] == LAYERS
    assert facts["streamed_bytes"] == ring.bytes and len(ring.blocks) == LAYERS - resident
    assert facts["digest"] == here.facts["target"]["digest"]
    assert torch.equal(tokens(there), tokens(here))
    assert torch.equal(tokens(there, 1.0), tokens(here, 1.0))


def test_a_pass_that_does_not_wait_is_noticed(folder, slow_disk, monkeypatch):
    """The control: computing with whatever is in the slots gives other tokens."""
    here = tokens(load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", placement="resident"))
    there = streamed(folder)
    assert torch.equal(tokens(there), here)
    monkeypatch.setattr(stream_of(there.target).changed, "wait_for", lambda condition: None)
    assert not torch.equal(tokens(there), here)


@pytest.mark.parametrize("name", READS_TREES)
def test_architectures(name, tmp_path, pair):
    """Tied weights, fused experts (which transformers converts as it loads them), windows, layers by other names."""
    model = tiny(name, **({"n_layer": 6} if name == "GPT-2" else {"num_hidden_layers": 6}), **({"layer_types": None} if "Gemma" in name else {}))
    model.save_pretrained(tmp_path / "m")
    pair.tokenizer.save_pretrained(tmp_path / "m")
    here = load_model(str(tmp_path / "m"), "cpu", torch.float32)[0]
    there = Offloaded(str(tmp_path / "m"), "cpu", torch.float32)
    there.place(split_memory(there.outside + SLOTS * max(there.sizes()) + max(there.sizes()), there.outside, 0, 0, there.sizes()), "disk")
    assert len(stream_of(there.model).blocks) == 5
    ours, theirs = (SequoiaDecoder(target, here, TREE).generate(PROMPT, 24).sequences for target in (there.model, here))
    assert torch.equal(ours, theirs)


def save_with_bitnet_weights(folder):
    """A Llama as BitNet checkpoints are published: ternary weights, four to a byte, each matrix with a scale."""
    model, config = tiny("Llama", num_hidden_layers=6), BitNetQuantConfig(modules_to_not_convert=["lm_head"])
    matrices = {name: module.weight.data for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    model = replace_with_bitnet_linear(model, modules_to_not_convert=["lm_head"], quantization_config=config)
    for name, module in model.named_modules():
        if isinstance(module, BitLinear):
            scale = matrices[name].abs().mean()
            module.weight, module.weight_scale = pack_weights((matrices[name] / scale).round().clamp(-1, 1)), scale.reshape(1)
    model.config.quantization_config = config
    model.save_pretrained(folder)


def test_quantised_weights_are_streamed_as_they_are(tmp_path, pair):
    """A layer takes as few bytes in the file and in the ring as in the checkpoint, and the tokens are those of the quantised model in memory."""
    save_with_bitnet_weights(tmp_path / "m")
    pair.tokenizer.save_pretrained(tmp_path / "m")
    here = load_model(str(tmp_path / "m"), "cpu", torch.float32)[0]
    there = Offloaded(str(tmp_path / "m"), "cpu", torch.float32)
    quantised = there.layer(0)["mlp.up_proj.weight"]
    assert quantised.dtype == torch.uint8 and quantised.numel() == 48 * 32 // 4
    there.place(split_memory(there.outside + SLOTS * max(there.sizes()), there.outside, 0, 0, there.sizes()), "disk")
    ours, theirs = (SequoiaDecoder(target, here, TREE).generate(PROMPT, 24).sequences for target in (there.model, here))
    assert torch.equal(ours, theirs)


def test_weights_that_are_more_than_tensors_are_refused(tmp_path, pair, monkeypatch):
    class Packed(torch.Tensor):
        pass

    save_with_bitnet_weights(tmp_path / "m")
    pair.tokenizer.save_pretrained(tmp_path / "m")
    monkeypatch.setattr(offload, "_tensors", lambda model: {"a": torch.zeros(2).as_subclass(Packed)})
    with pytest.raises(SequoiaPlanError, match="a is a Packed, expected plain tensors; a model quantised like this cannot be streamed"):
        Offloaded(str(tmp_path / "m"), "cpu", torch.float32)


@given(st.lists(st.integers(1, 100), min_size=4, max_size=40), st.integers(0, 4000), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_what_fits_stays(layers, memory, outside, draft, cache):
    try:
        split = split_memory(memory, outside, draft, cache, layers)
    except SequoiaPlanError:
        assert memory < outside + draft + cache + SLOTS * max(layers)
        return
    assert split.resident_bytes + split.streamed_bytes == sum(layers)
    assert outside + draft + cache + split.slots + split.resident_bytes <= memory
    assert sorted(set(split.resident)) == list(split.resident) and sum(layers[n] for n in split.resident) == split.resident_bytes
    if split.streamed_bytes and len(split.resident) + SLOTS < len(layers):
        assert outside + draft + cache + split.slots + (len(split.resident) + 1) * max(layers) > memory  # no further layer is sure to fit


def test_too_little_memory_says_what_is_needed(folder):
    with pytest.raises(SequoiaPlanError, match=r"memory: found 2 kB, expected at least .* for embeddings and head, .* for 3 layers at a time"):
        load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", offload="disk", memory=2000)


def test_sizes():
    here = torch.device("cpu")
    assert [as_bytes(text, here) for text in ("300MB", "1.5GB", "2GiB", "7", 12, " 3 kb")] == [300_000_000, 1_500_000_000, 2 << 30, 7, 12, 3000]
    assert 1e8 < as_bytes(None, here) < 1e14
    for wrong in ("", "much", "-3MB", "0", "1e400GB", "nan", "3 XB"):
        with pytest.raises(ArgumentError, match="expected a size, as 300MB or 24GB"):
            as_bytes(wrong, here)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1GB"], "memory 1GB: found without a link to stream from; add --offload host or disk"),
        (["--offload", "host", "--device", "cpu"], "to a CUDA device, found --device cpu; use --offload disk"),
        (["--offload", "disk", "--memory", "lots"], "memory: found 'lots', expected a size"),
    ],
)
def test_refused_options(folder, options, message, tmp_path):
    save_tree(TokenTree.chain(2), tmp_path / "t")
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    result = CliRunner().invoke(main, ["generate", "--tree", str(tmp_path / "t"), *models, *options])
    assert result.exit_code == 2 and message in result.output


def test_from_profile_to_bench(folder, tmp_path, monkeypatch):
    """The profile knows what a step waits for, the tree records where the weights were, and another placement warns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(latency, "SIZES", (1, 2, 4))
    Path("p.txt").write_text("What is rain?\n\nName three birds.\n")
    for module in (measure.__module__, "sequoia_plan.profiler.prompts"):
        monkeypatch.setattr(sys.modules[module], "encode", lambda tokenizer, prompt: PROMPT.tolist())
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--dtype", "float32"]
    placed = ["--offload", "disk", "--memory", str(streamed(folder).facts["target"]["memory"])]

    def run(*arguments):
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    out = run("profile", *models, *placed, "--prompts", "p.txt", "--tokens", "8", "--latency-seconds", "0", "-o", "p.yaml")
    found = Profile.load("p.yaml")
    facts = found.models["target"]
    assert found.latency.stream.bytes == facts["streamed_bytes"] > 0
    assert found.latency.stream.seconds > 0
    assert f"{facts['resident_layers']} of {LAYERS} layers" in out
    assert "more memory" in run("solve", "p.yaml", "-o", "t.safetensors")
    assert load_tree("t.safetensors").plan.latency.stream == found.latency.stream
    assert "Warning" not in run("generate", *models, *placed, "--tree", "t.safetensors", "--max-new-tokens", "4")
    elsewhere = run("generate", *models, "--tree", "t.safetensors", "--max-new-tokens", "4")
    assert f"was solved for the target streamed from disk with {facts['resident_layers']} of {LAYERS} layers in memory, this is repacked" in elsewhere


PLACES = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", **{f"model.layers.{n}": "disk" for n in range(1, LAYERS)}}
PLACES |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.mark.parametrize(
    "moved",
    [
        lambda model, folder: cpu_offload(model, torch.device("cpu")),
        lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
        lambda model, folder: dispatch_model(model, PLACES, main_device="cpu", offload_dir=folder),
    ],
    ids=["cpu_offload", "disk_offload", "device_map"],
)
def test_a_target_that_accelerate_has_offloaded(moved, tmp_path):
    target, draft = tiny("Llama", num_hidden_layers=LAYERS), tiny("Llama", seed=1)
    right = SequoiaDecoder(target, draft, TREE).generate(PROMPT, 24).sequences
    there = moved(copy.deepcopy(target), str(tmp_path))
    assert any(parameter.device.type == "meta" for parameter in there.parameters())
    assert torch.equal(SequoiaDecoder(there, draft, TREE).generate(PROMPT, 24).sequences, right)


def test_weights_that_nothing_brings_are_refused():
    target = tiny("Llama").to("meta")
    with pytest.raises(SequoiaPlanError, match="its weights are on the meta device and nothing brings them"):
        SequoiaDecoder(target, None, TokenTree.chain(1))


def test_the_embedded_pair(monkeypatch, tmp_path):
    """SmolLM2 with a fifth of its layers in memory writes the tokens of SmolLM2 in memory."""
    monkeypatch.delenv("SEQUOIA_PLAN_CACHE")
    here, there = load_pair(dtype="float32", placement="resident"), load_pair(dtype="float32", offload="disk", memory="450MB")
    assert 0 < there.facts["target"]["resident_layers"] <= 10
    tree, text = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 6]), "Explain how rain forms."
    ours, theirs = (SequoiaDecoder(each.target, each.draft, tree, tokenizer=each.tokenizer).generate(text, 24) for each in (there, here))
    assert torch.equal(ours.sequences, theirs.sequences)
