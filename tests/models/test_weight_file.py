"""Layers that are read from a file of weights compute as in memory, and its faults are noticed.

The packed pass reads them, or modules whose matrices are views of the slots that weights come to.
tests/hands/test_packed_files.py damages the files further, kills their makers, and leaves no room.
"""

import copy
import errno
import gc
import mmap
import os
import pickle
import shutil
import signal
import threading
import time

import psutil
import pytest
import torch
from architectures import PACKED
from forking import fork, status_of
from refusals import refusal
from safetensors.torch import load_file, save_file
from spies import spy
from streamed import LAYERS, PROMPT, decoder, in_memory, save_models, streamed, tokens, weights
from toys import PLAIN

from sequoia_plan.models.base import forks
from sequoia_plan.models.files.stored import Source
from sequoia_plan.models.offload import disk_stream, weight_cache, weight_file
from sequoia_plan.models.offload.disk_stream import DiskStream
from sequoia_plan.models.offload.weight_file import (
    ALIGNMENT,
    Place,
    WeightFile,
    aligned_memory,
    write_weights,
)
from sequoia_plan.runtime import Sampling, SequoiaDecoder

SIZES = {"packed": PACKED | {"vocab_size": 2000}, "modules": {}}
"""The packed output head has some blocks."""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="module", params=SIZES)
def folder(request, tmp_path_factory):
    return save_models(tmp_path_factory.mktemp(request.param), **SIZES[request.param])


@pytest.fixture
def pair(folder):
    return streamed(folder)


@pytest.fixture
def expected(pair):
    """The tokens of undisturbed streaming."""
    return tokens(pair)


@pytest.mark.parametrize("resident", [-1, 0, 2, 2 * LAYERS])
def test_streamed_layers_give_the_bits_of_layers_in_memory(folder, slow_disk, resident):
    """All of them, some, and none, with two slots (-1) and three."""
    resident_pair, pair = in_memory(folder), streamed(folder, resident)
    num_blocks = len(WeightFile(weights()).blocks) - 1
    assert num_blocks >= LAYERS + 2 if "packed" in folder.name else num_blocks == LAYERS
    resident = min(max(resident, 0), num_blocks)
    metadata, stream = pair.metadata["target"], pair.target.stream
    assert metadata["placement"] == pair.placement == "streamed from disk"
    assert metadata["resident_layers"] == resident and metadata["layers"] == num_blocks
    assert metadata["streamed_bytes"] == (stream.bytes if stream else 0)
    assert len(stream.blocks if stream else ()) == num_blocks - resident
    for key in ("digest", "content"):
        assert metadata[key] == resident_pair.metadata["target"][key]
    assert (pair.target.module is None) == ("packed" in folder.name)
    for temperature in (0.0, 1.0):
        options = dict(temperature=temperature, seed=1, logprobs=1)
        texts = [decoder(p).generate(PROMPT, 40, **options) for p in (resident_pair, pair)]
        expected, found = texts
        assert found.sequences.equal(expected.sequences)
        assert found.logprobs.equal(expected.logprobs)
    plain = SequoiaDecoder(pair.target, None, PLAIN).generate(PROMPT, 40).sequences
    assert plain.equal(tokens(pair)) and plain.equal(tokens(resident_pair))


def test_a_pass_reads_each_streamed_layer_once(folder, monkeypatch):
    counts = []

    def count(file, offset, memory):
        if threading.current_thread().name.startswith(disk_stream.THREAD_NAME):
            counts.append(len(memory))

    spy(monkeypatch, WeightFile, "read", count)
    pair = streamed(folder)
    stream, decoding = pair.target.stream, decoder(pair)
    assert stream.bytes == sum(block.size for block in stream.blocks) > 0
    for _ in range(2):  # passes that try the model come before the first text
        stream.wait_until_full()
        counts.clear()
        steps = decoding.generate(PROMPT, 40).steps
    stream.wait_until_full()
    # a packed target reads the prompt with the first step
    assert sum(counts) == (steps + ("modules" in folder.name)) * stream.bytes
    assert stream.layer_in_slot == [0, 1, 2]  # reading goes on between passes, as of drafts


def test_a_pass_that_does_not_wait_is_noticed(folder, slow_disk, pair, expected, monkeypatch):
    """The control: computing with whatever is in the slots gives other tokens."""
    if "packed" in folder.name:
        monkeypatch.setattr(DiskStream, "wait_for", lambda stream, layer: None)
    else:  # hooks hold that function
        monkeypatch.setattr(disk_stream.Future, "result", lambda read: None)
    assert not tokens(pair).equal(expected)


def test_kernels_without_large_pages(monkeypatch):
    monkeypatch.setattr(weight_file.mmap, "MADV_HUGEPAGE", 1 << 20)  # as if it was not known
    assert not weight_file.aligned_memory(5).any()


def test_a_streamed_target_cannot_be_copied(pair):
    """A copy's weights would stay what the stream's slots held at that moment."""
    for copied in (copy.deepcopy, pickle.dumps):
        with refusal("it can neither be pickled"):
            copied(pair.target)


def test_a_pass_that_was_given_up_does_not_spoil_the_next(folder, slow_disk, monkeypatch):
    interrupts = []

    def interrupt(stream, layer):
        if interrupts and layer == 4:
            raise interrupts.pop()

    spy(monkeypatch, DiskStream, "wait_for", interrupt)
    pair = streamed(folder)
    expected = tokens(pair)
    interrupts.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tokens(pair)
    assert pair.target.stream.layer_in_slot != [0, 1, 2]
    assert tokens(pair).equal(expected)


def test_a_read_error_in_mid_decode(pair, expected, monkeypatch):
    """One line names the file; the next request finds everything as it was."""
    calls = []

    def fail_once(*_):
        calls.append(1)
        if len(calls) == 30:
            raise OSError(errno.EIO, "Input/output error")

    spy(monkeypatch, os, "preadv", fail_once)
    message = r"target-\S*: cannot be read \(Input/output error\); delete it"
    with refusal(message):
        tokens(pair)
    assert tokens(pair).equal(expected)


def test_a_file_that_shrinks_in_mid_decode(folder, pair, expected):
    decoding = decoder(pair).steps(PROMPT, 40, sampling=Sampling())
    next(decoding)
    os.truncate(weights(), ALIGNMENT * 4)
    with refusal(r"was cut off|was written to"):
        list(decoding)
    assert tokens(streamed(folder)).equal(expected)


@pytest.mark.parametrize("is_checked", [True, False])
def test_the_rest_of_a_pass_uses_no_changed_weights(folder, is_checked, monkeypatch):
    """The control: unchecked, the step that reads them ends."""
    changed_from = []

    def touch(stream, layer):
        if layer in changed_from:
            os.utime(weights(), (5, 5))

    spy(monkeypatch, DiskStream, "wait_for", touch)
    decoding = decoder(streamed(folder)).steps(PROMPT, 40, sampling=Sampling())
    next(decoding)
    changed_from.append(1)
    if is_checked:
        with refusal("was written to while it was in use"):
            next(decoding)
    else:
        monkeypatch.setattr(WeightFile, "check_unchanged", lambda file: None)
        next(decoding)


def flip_bits(path, offset, bits=1):
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def test_damaged_weights_are_not_computed_with(folder, expected, tmp_path):
    """A flipped bit in a block is an error. A torn file is made again, and one of another model."""
    path = weights()
    last = WeightFile(path).blocks[-1]
    assert last.offset % ALIGNMENT == last.size % ALIGNMENT == 0
    assert all(f"layers.{LAYERS - 1}." in name for name in last.tensors)  # the head's has none
    flip_bits(path, last.offset + 100)
    with refusal(r"checksum .* it was damaged; delete it"):
        tokens(streamed(folder))
    foreign = write_blocks(tmp_path / "foreign").read_bytes()
    for damage in (lambda: flip_bits(path, -200), lambda: path.write_bytes(foreign)):
        damage()
        assert tokens(streamed(folder)).equal(expected)


def test_a_mapped_file_that_was_written_to_is_checked(tmp_path):
    """A file that was only touched is whole: the control."""
    path = write_blocks(tmp_path / "w")
    assert WeightFile(path).map()[0] == ord("a")
    os.utime(path, (5, 5))
    assert WeightFile(path).map()[0] == ord("a")
    flip_bits(path, 3)
    with refusal(r"checksum .* it was damaged; delete it"):
        WeightFile(path).map()


def write_blocks(path):
    """A file of three small blocks."""
    layout = [{"a": Place("float32", (3, 5)), "b": Place("uint8", (7,))}] * 3

    def fill(name, memory):
        memory[:] = ord(name)

    write_weights(path, layout, fill, lambda: Source("a model"))
    return path


def test_every_flipped_bit_of_the_index_is_noticed(tmp_path):
    """No exception but ours comes out, whatever the index says."""
    path = write_blocks(tmp_path / "w")
    last = WeightFile(path).blocks[-1]
    first_bit, end = (last.offset + last.size) * 8, path.stat().st_size * 8
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(first_bit, end, (400,), generator=generator).tolist()
    for bit in (*bits, *range(end - 96, end)):  # the length and the checksum of the index
        flip_bits(path, bit // 8, 1 << bit % 8)
        with refusal("it will be made again"):
            WeightFile(path)
        flip_bits(path, bit // 8, 1 << bit % 8)
    file = WeightFile(path)
    for block in file.blocks:
        for name, tensor in block.views(file.memory_of(block)).items():
            assert (tensor.view(torch.uint8) == ord(name)).all()


def test_another_model_in_the_same_folder(folder, tmp_path):
    """Of the same size and date, as `cp -p`, tar and the layers of container images leave them.

    Another file is made, and what decodes from the old one goes on with it.
    """
    copied = shutil.copytree(folder, tmp_path / folder.name)
    path = copied / "target" / "model.safetensors"
    before, old = path.stat(), streamed(copied)
    expected, tensors = tokens(old), load_file(path)
    for tensor in tensors.values():  # all but the first row
        tensor[1:] *= -1.0
    save_file(tensors, path, {"format": "pt"})
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    new, changed = streamed(copied), in_memory(copied)
    assert tokens(new).equal(tokens(changed)) and tokens(old).equal(expected)
    for pair in (new, changed):
        found = pair.metadata["target"]["content"]
        assert found != old.metadata["target"]["content"]
    assert not tokens(new).equal(expected)


def test_a_fork_streams_into_memory_of_its_own(pair, expected, monkeypatch):
    """The controls: without threads of its own it waits for ever; shared memory is written to."""

    def decode():
        assert tokens(pair).equal(expected)

    process = fork(decode)
    decode()
    assert status_of(process) == 0
    monkeypatch.setattr(forks, "_renewed", set())
    assert status_of(fork(decode), seconds=2) == -signal.SIGKILL
    for flag, written in ((mmap.MAP_PRIVATE, 0), (mmap.MAP_SHARED, 1)):
        monkeypatch.setattr(mmap, "MAP_PRIVATE", flag)
        memory = aligned_memory(8)
        assert status_of(fork(lambda memory=memory: memory.fill_(1))) == 0
        assert memory[0] == written


def test_two_processes_make_one_file(folder, expected, tmp_path):
    """One waits for the other, and both decode from the file."""
    log = tmp_path / "log"
    weights().unlink()

    def load():
        def noted(path, *arguments):
            with log.open("a") as file:
                file.write(path.name + "\n")
            time.sleep(0.3)
            write_weights(path, *arguments)

        weight_cache.write_weights = noted
        assert tokens(streamed(folder)).equal(expected)

    assert [*map(status_of, [fork(load) for _ in range(2)])] == [0, 0]
    assert log.read_text().split() == [weights().name]


def test_a_finished_file_is_neither_locked_nor_written(folder, expected, monkeypatch):
    """So it loads from a folder where nobody may write, also after its model was touched."""
    monkeypatch.setattr(weight_cache, "FileLock", lambda path: pytest.fail("locked"))
    os.utime(folder / "target" / "model.safetensors")
    assert tokens(streamed(folder)).equal(expected)


def test_threads_and_files_end_with_the_model(folder):
    gc.collect()
    threads_before, files_before = set(threading.enumerate()), psutil.Process().num_fds()
    pair = streamed(folder)
    tokens(pair)
    assert 1 <= len(set(threading.enumerate()) - threads_before) <= disk_stream.THREADS
    pair.target.stream.close()
    with refusal("is closed; load the models again"):
        tokens(pair)
    del pair
    gc.collect()
    assert set(threading.enumerate()) == threads_before
    assert psutil.Process().num_fds() <= files_before
