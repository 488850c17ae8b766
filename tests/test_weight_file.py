"""No fault of a file of weights goes unnoticed, and none leaves anything spoilt behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from architectures import tiny
from safetensors import safe_open
from streamed import LAYERS, PROMPT, decoder, streamed, tokens, weights

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.models import stream
from sequoia_plan.runtime.models.load import load_model
from sequoia_plan.runtime.models.offload import Offloaded
from sequoia_plan.runtime.models.stream import stream_of
from sequoia_plan.runtime.models.weight_file import ALIGNMENT, WeightFile

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")


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
    decoding = decoder(there).steps(PROMPT, 40, sampling=Sampling())
    next(decoding)
    os.utime(weights(folder), ns=(1, 1))
    with pytest.raises(SequoiaPlanError, match="was written to while it was in use"):
        list(decoding)
    there = streamed(folder)
    decoding = decoder(there).steps(PROMPT, 40, sampling=Sampling())
    next(decoding)
    os.truncate(weights(folder), ALIGNMENT * 4)
    with pytest.raises(SequoiaPlanError, match=r"was cut off|was written to"):
        list(decoding)


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
