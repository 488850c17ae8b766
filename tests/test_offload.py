"""A target whose layers are streamed decodes as the same target in memory, and no fault of the file goes unnoticed."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from architectures import READS_TREES, TREE, tiny
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import BitNetQuantConfig
from transformers.integrations.bitnet import BitLinear, pack_weights, replace_with_bitnet_linear

from sequoia_plan.artifacts import ArgumentError, Profile, SequoiaPlanError, TokenTree, load_tree, save_tree
from sequoia_plan.planner.cli import main
from sequoia_plan.profiler import latency, measure
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models import offload, stream
from sequoia_plan.runtime.models.load import load_model
from sequoia_plan.runtime.models.offload import SLOTS, Offloaded, as_bytes, split_memory
from sequoia_plan.runtime.models.stream import stream_of
from sequoia_plan.runtime.models.weight_file import ALIGNMENT, WeightFile

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
PROMPT = torch.arange(3, 20)
LAYERS = 8


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Weight files of tiny models go with the test."""
    monkeypatch.setenv("SEQUOIA_PLAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pair):
    """A Llama of eight layers and a draft, as transformers saves them."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("target", LAYERS), ("draft", 1)):
        tiny("Llama", num_hidden_layers=layers, tie_word_embeddings=True).save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    return folder


def streamed(folder, resident=2):
    """The pair with so many resident layers, and a decoder of it."""
    sizes = Offloaded(str(folder / "target"), "cpu", torch.float32).sizes()
    offload_all = load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", offload="disk", memory="1GB")
    fixed = offload_all.facts["target"]["resident_bytes"] - sum(sizes)
    draft = offload.own_bytes(load_model(str(folder / "draft"), "cpu", torch.float32)[0], offload_all.target)
    caches = offload.cache_bytes(offload_all.target) + offload.cache_bytes(load_model(str(folder / "draft"), "cpu", torch.float32)[0])
    memory = fixed + draft + caches + (SLOTS + resident) * max(sizes)
    return load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", offload="disk", memory=memory)


def decoder(pair, tree=TREE):
    return SequoiaDecoder(pair.target, pair.draft, tree)


def tokens(pair, temperature=0.0, seed=1):
    return decoder(pair).generate(PROMPT, 40, temperature=temperature, seed=seed).sequences


def weights(folder):
    """The one weight file of this test."""
    [path] = Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("*.weights")
    return path


@pytest.fixture
def slow_disk(monkeypatch):
    """Reads take longer than a layer computes, as on a real disk."""
    right = WeightFile.read

    def read(self, offset, memory):
        time.sleep(0.002)
        right(self, offset, memory)

    monkeypatch.setattr(WeightFile, "read", read)


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


def test_the_file_is_a_safetensors_file_in_pass_order(folder):
    made = Offloaded(str(folder / "target"), "cpu", torch.float32)
    model = load_model(str(folder / "target"), "cpu", torch.float32)[0]
    parameters = dict(model.named_parameters())
    with safe_open(weights(folder), framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith("padding.")]  # noqa: SIM118
        assert sorted(names) == sorted(parameters) and "lm_head.weight" not in names  # tied, so once
        assert all(torch.equal(file.get_tensor(name), parameters[name]) for name in names)
        assert json.loads(file.metadata()["sequoia_plan"])["format"] == "sequoia-plan-weights"
    assert len(made.file.blocks) == 1 + LAYERS
    for number, block in enumerate(made.file.blocks):
        assert block.offset % ALIGNMENT == block.size % ALIGNMENT == 0
        assert all((f"layers.{number - 1}." in name) == (number > 0) for name in block.tensors)
    assert set(made.layer(3)) == {name.removeprefix("model.layers.3.") for name in parameters if "layers.3." in name}


def test_a_pass_that_was_given_up_does_not_spoil_the_next(folder, slow_disk):
    there = streamed(folder)
    right = tokens(there)
    ring = stream_of(there.target)
    failing = there.target.model.layers[5].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokens(there)
    failing.remove()
    assert ring.used % len(ring.blocks) != 0
    assert torch.equal(tokens(there), right)


def test_a_read_error_in_mid_decode(folder, monkeypatch):
    """One line names the file; the next request finds everything as it was."""
    there = streamed(folder)
    right, count, read = tokens(there), [], os.preadv

    def broken(*arguments):
        count.append(1)
        if len(count) == 30:
            raise OSError(errno.EIO, "Input/output error")
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(SequoiaPlanError, match=r"target-.*\.weights: cannot be read \(Input/output error\); delete it, and it will be made again"):
        tokens(there)
    assert torch.equal(tokens(there), right)


def test_a_file_that_shrinks_or_changes_in_mid_decode(folder):
    there = streamed(folder)
    decoding = decoder(there).steps(PROMPT, 40, sampling=load_sampling())
    next(decoding)
    os.utime(weights(folder), ns=(1, 1))
    with pytest.raises(SequoiaPlanError, match="was written to while it was in use"):
        list(decoding)
    there = streamed(folder)
    decoding = decoder(there).steps(PROMPT, 40, sampling=load_sampling())
    next(decoding)
    os.truncate(weights(folder), ALIGNMENT * 4)
    with pytest.raises(SequoiaPlanError, match=r"was cut off|was written to"):
        list(decoding)


def load_sampling():
    from sequoia_plan.runtime import Sampling

    return Sampling()


def damaged(path, at, value=1):
    data = bytearray(path.read_bytes())
    data[at] ^= value
    path.write_bytes(data)


def test_damaged_weights_are_not_computed_with(folder):
    """A flipped bit in a block is an error; in the header, or at the end, the file is made again from the model's own."""
    right = tokens(streamed(folder))
    path = weights(folder)
    block = WeightFile(path).blocks[4]
    damaged(path, block.offset + 100)
    with pytest.raises(SequoiaPlanError, match=rf"the block at {block.offset} has the checksum .* it was damaged; delete it"):
        tokens(streamed(folder))
    for spoil in (lambda: damaged(path, 200), lambda: os.truncate(path, path.stat().st_size - 1), lambda: path.write_bytes(b"")):
        spoil()
        with pytest.raises(SequoiaPlanError, match="it will be made again"):
            WeightFile(path)
        if not path.stat().st_size:
            assert torch.equal(tokens(streamed(folder)), right)


def test_every_flipped_bit_of_the_header_is_noticed(folder):
    """No exception but ours comes out, whatever the header says."""
    Offloaded(str(folder / "target"), "cpu", torch.float32).file.close()
    path = weights(folder)
    header, chosen = path.read_bytes()[: WeightFile(path).blocks[0].offset], torch.Generator().manual_seed(0)
    text = len(header.rstrip())
    for at in torch.randint(text * 8, (400,), generator=chosen).tolist():
        damaged(path, at // 8, 1 << at % 8)
        with pytest.raises(SequoiaPlanError):
            WeightFile(path)
        damaged(path, at // 8, 1 << at % 8)
    WeightFile(path).close()


def test_another_model_in_the_same_folder(folder, tmp_path, pair):
    """The file is made again, and a process that uses the old one goes on with it."""
    for name in ("a", "draft"):
        tiny("Llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)
    old = Offloaded(str(tmp_path / "a"), "cpu", torch.float32)
    before = old.layer(2)
    tiny("Llama", seed=5, num_hidden_layers=LAYERS).save_pretrained(tmp_path / "a")
    new = Offloaded(str(tmp_path / "a"), "cpu", torch.float32)
    assert old.file.path == new.file.path
    for name, tensor in old.layer(2).items():
        assert torch.equal(tensor, before[name])
    name = "self_attn.q_proj.weight"
    assert not torch.equal(new.layer(2)[name], before[name])


CODE = """
import sys, torch
from sequoia_plan.runtime.models.offload import Offloaded
made = Offloaded(sys.argv[1], "cpu", torch.float32)
print(float(made.layer(1)["mlp.up_proj.weight"].double().sum()), flush=True)
"""


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_share_one_file(folder):
    both = [python(CODE, folder / "target") for _ in range(2)]
    found = [process.communicate(timeout=120) for process in both]
    assert all(process.returncode == 0 for process in both), found
    assert found[0][0] == found[1][0]
    assert len(list(Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("*weights*"))) == 1 + 1  # the file, and its lock


def test_a_kill_while_the_file_is_written(folder):
    """What the killed process left is neither used nor in the way."""
    slow = "import os, time\nfrom sequoia_plan.runtime.models import weight_file\n"
    slow += "os.fsync = lambda file: (print('written', flush=True), time.sleep(600))\n"
    killed = python(slow + CODE, folder / "target")
    assert killed.stdout.readline() == "written\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    cache = Path(os.environ["SEQUOIA_PLAN_CACHE"])
    assert list(cache.glob(".*.unfinished")) and not list(cache.glob("*.weights"))
    Offloaded(str(folder / "target"), "cpu", torch.float32)
    assert not list(cache.glob(".*.unfinished")) and weights(folder)


def test_a_full_disk_while_the_file_is_written(folder):
    """The kernel itself refuses to write on; one line says what to do, and nothing half-written stays."""
    small = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    process = python(small + CODE, folder / "target")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "cannot be written (File too large); it takes as much room as the weights: free some, or set SEQUOIA_PLAN_CACHE" in error
    assert not [file for file in Path(os.environ["SEQUOIA_PLAN_CACHE"]).iterdir() if not file.name.endswith(".lock")]


def test_threads_end_with_the_model(folder):
    before = set(threading.enumerate())
    there = streamed(folder)
    mine = decoder(there)
    mine.generate(PROMPT, 4)
    assert len(set(threading.enumerate()) - before) == stream.THREADS
    del there, mine
    gc.collect()
    assert set(threading.enumerate()) == before


def test_after_close_a_pass_is_refused(folder):
    there = streamed(folder)
    mine = decoder(there)
    stream_of(there.target).close()
    with pytest.raises(SequoiaPlanError, match="is closed; load the models again"):
        mine.generate(PROMPT, 4)


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
