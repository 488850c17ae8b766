"""Every fault of a file of weights is noticed, and none leaves anything damaged behind.

The layers that read it are fused ones, whose matrices are views of the slots that weights come to.
"""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from architectures import tiny
from streamed import LAYERS, PROMPT, decoder, streamed, tokens, weights

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.backends.modules import offloaded_target
from sequoia_plan.runtime.backends.modules.offloaded_target import OffloadedTarget
from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.models.fused_layer import FusedLayer
from sequoia_plan.runtime.models.pretrained import find_model, load_module
from sequoia_plan.runtime.offload import disk_stream
from sequoia_plan.runtime.offload.weight_file import ALIGNMENT, WeightFile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_the_file_has_every_weight_in_pass_order(folder):
    offloaded = OffloadedTarget(find_model(str(folder / "target")), "cpu", torch.float32)
    model = load_module(str(folder / "target"), "cpu", torch.float32)[0]
    parameters = dict(model.named_parameters())  # the head is tied to the embeddings
    blocks = WeightFile(weights(folder)).blocks
    assert len(blocks) == 1 + LAYERS
    for number, block in enumerate(blocks):
        assert block.offset % ALIGNMENT == block.size % ALIGNMENT == 0
        assert all((f"layers.{number - 1}." in name) == (number > 0) for name in block.tensors)
        for name, tensor in block.views(offloaded.file.memory_of(block)).items():
            assert torch.equal(tensor, parameters.pop(name))
    assert not parameters


def test_a_pass_that_was_given_up_does_not_spoil_the_next(folder, slow_disk):
    def interrupt(*_):
        raise KeyboardInterrupt

    offloaded = streamed(folder)
    expected = tokens(offloaded)
    stream = offloaded.target.stream
    hook = offloaded.target.module.model.layers[5].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokens(offloaded)
    hook.remove()
    assert stream.layer_in_slot != [0, 1, 2]
    assert torch.equal(tokens(offloaded), expected)


def test_a_read_error_in_mid_decode(folder, monkeypatch):
    """One line names the file; the next request finds everything as it was."""
    offloaded = streamed(folder)
    expected, calls, preadv = tokens(offloaded), [], os.preadv

    def fails_once(*arguments):
        calls.append(1)
        if len(calls) == 30:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fails_once)
    message = r"target-.*\.weights: cannot be read \(Input/output error\); delete it"
    with pytest.raises(SequoiaPlanError, match=message):
        tokens(offloaded)
    assert tokens(offloaded).equal(expected)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.utime(path, ns=(1, 1)), "was written to while it was in use"),
        (lambda path: os.truncate(path, ALIGNMENT * 4), "was cut off|was written to"),
    ],
)
def test_a_file_that_shrinks_or_changes_in_mid_decode(folder, damage, message):
    decoding = decoder(streamed(folder)).steps(PROMPT, 40, sampling=Sampling())
    next(decoding)
    damage(weights(folder))
    with pytest.raises(SequoiaPlanError, match=message):
        list(decoding)


def flip_bits(path, offset, bits=1):
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def test_damaged_weights_are_not_computed_with(folder):
    """A flipped bit in a block is an error.

    After one in the index, or a cut, the file is made again from the model's own files.
    """
    expected = tokens(streamed(folder))
    path = weights(folder)
    block = WeightFile(path).blocks[4]
    flip_bits(path, block.offset + 100)
    with pytest.raises(SequoiaPlanError, match=r"checksum .* it was damaged; delete it"):
        tokens(streamed(folder))
    damages = (
        lambda: flip_bits(path, -200),
        lambda: os.truncate(path, path.stat().st_size - 1),
        lambda: path.write_bytes(b""),
    )
    for damage in damages:
        damage()
        with pytest.raises(SequoiaPlanError, match="it will be made again"):
            WeightFile(path)
    assert tokens(streamed(folder)).equal(expected)


def test_every_flipped_bit_of_the_index_is_noticed(folder):
    """No exception but ours comes out, whatever the index says."""
    OffloadedTarget(find_model(str(folder / "target")), "cpu", torch.float32).file.close()
    path = weights(folder)
    last = WeightFile(path).blocks[-1]
    first_bit, end = (last.offset + last.size) * 8, path.stat().st_size * 8
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(first_bit, end, (400,), generator=generator).tolist()
    for bit in (*bits, *range(end - 96, end)):  # the length and the checksum of the index
        flip_bits(path, bit // 8, 1 << bit % 8)
        with pytest.raises(SequoiaPlanError):
            WeightFile(path)
        flip_bits(path, bit // 8, 1 << bit % 8)
    WeightFile(path).close()


def test_another_model_in_the_same_folder(folder, tmp_path, pair):
    """Another file is made, and a process that uses the old one goes on with it."""
    for name in ("a", "draft"):
        tiny("Llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)
    old = OffloadedTarget(find_model(str(tmp_path / "a")), "cpu", torch.float32)
    old_layer = old.layer(2)
    tiny("Llama", seed=5, num_hidden_layers=LAYERS).save_pretrained(tmp_path / "a")
    new = OffloadedTarget(find_model(str(tmp_path / "a")), "cpu", torch.float32)
    assert old.file.path != new.file.path
    for name, tensor in old.layer(2).items():
        assert tensor.equal(old_layer[name])
    name = "self_attn.q_proj.weight"
    assert not new.layer(2)[name].equal(old_layer[name])


CODE = """
import sys, torch
from sequoia_plan.runtime.backends.modules.offloaded_target import OffloadedTarget
from sequoia_plan.runtime.models.pretrained import find_model
target = OffloadedTarget(find_model(sys.argv[1]), "cpu", torch.float32)
print(float(target.layer(1)["mlp.up_proj.weight"].double().sum()), flush=True)
"""


def start_python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_share_one_file(folder):
    processes = [start_python(CODE, folder / "target") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert outputs[0][0] == outputs[1][0]
    files = Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("*weights*")
    assert len(list(files)) == 2  # the file, and its lock


def test_a_kill_while_the_file_is_written(folder):
    """What the killed process left is neither used nor in the way."""
    slow = "import os, time\nfrom sequoia_plan.runtime.offload import weight_file\n"
    slow += "os.fsync = lambda file: (print('written', flush=True), time.sleep(600))\n"
    killed = start_python(slow + CODE, folder / "target")
    assert killed.stdout.readline() == "written\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    cache = Path(os.environ["SEQUOIA_PLAN_CACHE"])
    assert list(cache.glob(".*.unfinished")) and not list(cache.glob("*.weights"))
    OffloadedTarget(find_model(str(folder / "target")), "cpu", torch.float32)
    assert not list(cache.glob(".*.unfinished")) and weights(folder)


def test_a_full_disk_while_the_file_is_written(folder):
    """The kernel refuses to write on; one line says what to do, and nothing half-written stays."""
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    process = start_python(limit + CODE, folder / "target")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "cannot be written (File too large)" in error and "or set SEQUOIA_PLAN_CACHE" in error
    files = Path(os.environ["SEQUOIA_PLAN_CACHE"]).iterdir()
    assert all(file.name.endswith(".lock") for file in files)


def test_threads_end_with_the_model(folder):
    threads_before = set(threading.enumerate())
    offloaded_decoder = decoder(streamed(folder))
    offloaded_decoder.generate(PROMPT, 4)
    assert 1 <= len(set(threading.enumerate()) - threads_before) <= disk_stream.THREADS
    offloaded_decoder.step.target.stream.close()
    with pytest.raises(SequoiaPlanError, match="is closed; load the models again"):
        offloaded_decoder.generate(PROMPT, 4)
    del offloaded_decoder
    gc.collect()
    assert set(threading.enumerate()) == threads_before


RESIDENT = 2


def in_memory(folder, placement):
    target, draft = str(folder / "target"), str(folder / "draft")
    return load_pair(target, draft, dtype="float32", placement=placement)


def test_no_weight_is_held_twice_or_read_in_vain(folder):
    """A slot has no room, and a pass no bytes, but for the weights and the end of a page."""
    pair = streamed(folder, RESIDENT)
    expected = in_memory(folder, "resident").target.module
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in pair.target.module.parameters()
    }
    metadata = pair.metadata["target"]
    norms = sum(p.nbytes for name, p in expected.named_parameters() if "norm" in name)
    # fused norms have copies of their weights
    assert sum(storages.values()) <= metadata["resident_bytes"] + metadata["slot_bytes"] + norms
    layer_bytes = sum(p.nbytes for p in expected.model.layers[0].parameters())
    stream = pair.target.stream
    assert stream.bytes <= (LAYERS - RESIDENT) * round_up(layer_bytes, ALIGNMENT)


def test_logits_are_bit_by_bit_those_of_fused_layers_in_memory(folder):
    pairs = streamed(folder, RESIDENT), in_memory(folder, "fused")
    text = torch.arange(3, 40)[None]
    with torch.inference_mode():
        logits = [pair.target.module(text).logits for pair in pairs]
    assert torch.equal(*logits)


def test_weights_in_the_wrong_place_are_noticed(folder, monkeypatch):
    """The control: with another order of the file a layer would not read what is in its slot."""
    in_order = offloaded_target.in_joined_order
    monkeypatch.setattr(offloaded_target, "in_joined_order", lambda names: in_order(names)[::-1])
    with pytest.raises(SequoiaPlanError, match=r"reads \d+ bytes of its slot, expected \d+"):
        streamed(folder, RESIDENT)


def test_layers_of_transformers_are_streamed_where_the_user_asks_for_them(folder):
    pair = streamed(folder, RESIDENT, placement="resident")
    assert not any(type(layer) is FusedLayer for layer in pair.target.module.model.layers)
    assert tokens(pair).equal(tokens(in_memory(folder, "resident")))
