"""The packed file in a hostile cache: damaged, torn, killed makers, no room, a changed GGUF."""

import faulthandler
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from architectures import tiny
from forking import fork, status_of
from gguf_files import SIZES, is_right, write_gguf
from refusals import refusal

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.offload.weight_file import WeightFile
from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.captured_step import CapturedStep

pytestmark = pytest.mark.usefixtures("own_cache")
OTHER = tiny("Llama", **SIZES)
OTHER.model.embed_tokens.weight.data.mul_(0.5)


@pytest.fixture
def path(model, tmp_path):
    return write_gguf(tmp_path / "m.gguf", model)


def load(path):
    return load_pair(path, "none", dtype="float32")


def packed(tmp_path):
    [file] = tmp_path.glob("cache/m-*")
    return file


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "longer": lambda data: data + b"\0" * 4096,
    "only its index": lambda data: data[-2000:],
    "index": lambda data: flip(data, len(data) - 100),
    "version": lambda data: data.replace(b'"version":1', b'"version":2'),
    "another file": lambda data: b"GGUF" * (len(data) // 4),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_packed_file_is_made_again(name, path, model, tmp_path):
    load(path)
    data = packed(tmp_path).read_bytes()
    packed(tmp_path).write_bytes(DAMAGES[name](data))
    assert is_right(load(path), model)


def write_into(file):
    with open(file, "r+b") as opened:  # the same file, which others have mapped
        opened.write(bytes(100_000))


@pytest.mark.parametrize(
    ("change", "in_a_step", "unchecked"),
    [(write_into, True, 0), (lambda file: os.truncate(file, 4096), False, -signal.SIGBUS)],
)
def test_a_mapped_file_that_changes_in_the_middle_of_a_text(
    change, in_a_step, unchecked, path, tmp_path, monkeypatch
):
    """The control: unchecked, another text comes, or the system ends the process."""
    decoder = SequoiaDecoder(load(path).target, None, TokenTree.chain(1))
    prompt, launch, file = torch.tensor([1, 2, 3]), CapturedStep.launch, packed(tmp_path)
    expected = decoder.generate(prompt, 40).sequences[0, 3:].tolist()

    def decode(is_checked):
        with closing(decoder.steps(prompt, 40, Sampling())) as steps:
            assert next(steps).tokens == expected[:1]
            if in_a_step:
                monkeypatch.setattr(CapturedStep, "launch", changing)
            else:
                change(file)
            if is_checked:
                with refusal(r"was written to .* made again"):
                    next(steps)
                return
            faulthandler.disable()
            monkeypatch.setattr(WeightFile, "check_unchanged", lambda file: None)
            assert [token for step in steps for token in step.tokens] != expected[1:]

    def changing(*arguments):
        read_output = launch(*arguments)
        change(file)
        return read_output

    copy = shutil.copy2(file, tmp_path)
    assert status_of(fork(lambda: decode(is_checked=True))) == 0
    shutil.copyfile(copy, file)
    shutil.copystat(copy, file)
    assert status_of(fork(lambda: decode(is_checked=False))) == unchecked


def test_a_gguf_file_changed_with_the_same_size_and_time(path, model, tmp_path):
    """In place and by a rename; the old model, which is in the cache, stays as it is."""
    for way in ("place", "rename"):
        write_gguf(path, model)
        before, status = load(path), os.stat(path)
        other = write_gguf(tmp_path / "other", OTHER)
        if way == "rename":
            os.replace(other, path)
        else:
            with open(path, "r+b") as file:
                file.write(Path(other).read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert os.stat(path).st_size == status.st_size
        assert is_right(load(path), OTHER) and is_right(before, model)


def start(path, tmp_path, command=""):
    """A process that makes the packed file, and is asleep before it is renamed."""
    command = command or f"load_pair({path!r}, 'none', dtype='float32')"
    code = "import os, time; from sequoia_plan.runtime import load_pair; "
    code += f"os.fsync = lambda fd: time.sleep(60); {command}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, env=os.environ | ONE_THREAD
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if any(file.stat().st_size for file in tmp_path.glob("cache/.m-*unfinished")):
            break
        time.sleep(0.02)
    return process


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_maker_that_is_killed_leaves_nothing_that_counts(path, model, tmp_path):
    process = start(path, tmp_path)
    process.kill()
    process.wait()
    assert list(tmp_path.glob("cache/.m-*unfinished")), "the control: it was writing"
    assert is_right(load(path), model)
    assert not list(tmp_path.glob("cache/.m-*unfinished"))


@pytest.mark.slow
def test_a_command_that_is_terminated_removes_what_is_unfinished(path, tmp_path):
    options = ["generate", "--target", path, "--dtype", "float32"]
    command = f"from sequoia_plan.planner.cli import main; main({options!r})"
    process = start(path, tmp_path, command=command)
    assert list(tmp_path.glob("cache/.m-*unfinished")), "the control: it was writing"
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not [file for file in tmp_path.glob("cache/*") if file.suffix != ".lock"]


def test_five_makers_at_once(path, model, tmp_path):
    with ThreadPoolExecutor(5) as makers:
        assert all(is_right(pair, model) for pair in makers.map(load, [path] * 5))
    assert packed(tmp_path) and not list(tmp_path.glob("cache/.m-*unfinished"))


def test_no_room_and_no_folder(path, model, tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with refusal(r"packed: cannot be written \(.*free some"):
            load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("cache/.m-*unfinished"))
    assert is_right(load(path), model)
    (link := tmp_path / "link").symlink_to("nowhere")
    for folder, reason in (
        (path, "m.gguf is a file"),
        (link / "below", "link is a link that leads nowhere"),
        ("/proc/self/nowhere", "No such file or directory"),
    ):
        monkeypatch.setenv("SEQUOIA_PLAN_CACHE", str(folder))
        with refusal(rf"{reason}\); set SEQUOIA_PLAN_CACHE to"):
            load(path)


@pytest.mark.parametrize("name", ["{} {0} {x} {", "n" * 240, "ä" * 120])
def test_any_name_of_a_model_names_its_packed_file(name, path, model, tmp_path):
    renamed = str(Path(path).rename(tmp_path / f"{name}.gguf"))
    for _ in range(2):
        assert is_right(load(renamed), model)
        [file] = tmp_path.glob("cache/*.packed")
        assert file.name.startswith(name[:9])
