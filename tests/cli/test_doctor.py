"""`sequoia-plan doctor`: what it says, on what installations, and that it names nothing private."""

import socket
from pathlib import Path

import pytest
import torch
from commands import succeed

from sequoia_plan.artifacts import processor
from sequoia_plan.profiler.hardware import default_device, default_dtype, fingerprint

X86 = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512f_not amx_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def run():
    return succeed("doctor").stdout


def test_it_says_what_would_be_used_and_nothing_private():
    text = run()
    device = default_device()
    assert f"torch {torch.__version__}" in text
    assert all(f"{name} {value}" in text for name, value in fingerprint(device).items())
    assert f"dtype              {default_dtype(device)}" in text
    private = [str(Path.home()), str(Path.cwd()), socket.gethostname()]
    assert not [name for name in private if name in text]


def test_a_broken_torch_is_reported(monkeypatch):
    def fail(device):
        raise OSError(f"cannot load {Path.home()}/libtorch.so")

    monkeypatch.setattr("sequoia_plan.profiler.hardware.fingerprint", fail)
    text = run()
    assert "machine            cannot be used: OSError\n" in text and str(Path.home()) not in text


@pytest.mark.parametrize(
    ("kernel", "state"),
    [
        (lambda device: True, "compiled"),
        (lambda device: False, "not used"),
        (lambda device: 1 / 0, "cannot be used: ZeroDivisionError"),
    ],
)
def test_kernels_are_tried(monkeypatch, kernel, state):
    monkeypatch.setattr("sequoia_plan.profiler.hardware.run_small_kernel", kernel)
    assert f"kernels            {state}" in run()


@pytest.mark.parametrize(
    ("cpuinfo", "name", "sets"),
    [(X86, "A Xeon", ["avx2", "amx_bf16"]), (ARM, None, ["asimd", "bf16"]), (None, None, None)],
)
def test_processors_are_read(monkeypatch, tmp_path, cpuinfo, name, sets):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "processor", lambda: "what Python knows")
    if cpuinfo:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert processor.processor_name() == (name or "what Python knows")
    assert processor.instruction_sets() == sets
