"""`sequoia-plan doctor`: what it says, on what installations, and that it names nothing private."""

from __future__ import annotations

import getpass
import importlib
import json
import socket
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sequoia_plan.artifacts import Acceptance, Latency, Profile, processor
from sequoia_plan.planner.cli import main
from sequoia_plan.profiler import hardware
from sequoia_plan.profiler.hardware import QUERIED_FIELDS, fingerprint
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.models.dtype import dtype_name, resolve_dtype

doctor_module = importlib.import_module("sequoia_plan.planner.cli.doctor")
"""The module; the package has the command under its name."""
X86 = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512f_not amx_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def run(*arguments):
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_says_what_would_be_used():
    report = json.loads(run("--json"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert report["machine"] == fingerprint(device) and report["error"] is None
    assert report["dtype"] == dtype_name(resolve_dtype("auto", device))
    assert report["versions"]["torch"] == torch.__version__
    if device == "cpu":
        assert report["kernels"] == "not used: no CUDA device or no Triton"
    text = run()
    assert (
        report["machine"]["processor"] in text and f"dtype              {report['dtype']}" in text
    )


def test_all_keys_of_fingerprints_and_settings_are_printed():
    keys = {*fingerprint("cpu"), *QUERIED_FIELDS.values()}
    assert keys | {"gpu", "cuda"} == set(doctor_module.HARDWARE_KEYS)
    assert set(Sampling().settings()) == set(doctor_module.SETTING_KEYS)


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_private_is_printed(tmp_path, as_json):
    secret = "Ada Lovelace"
    profile = Profile(
        Acceptance.given((0.5, 0.2)),
        latency=Latency({1: 0.04, 4: 0.05}, {1: 0.003}, 0.0, 0),
        settings={"temperature": 0.5, "prompts": secret, "top_k": [secret]},
        models={"target": {"name": secret, "dtype": "float32", "folder": secret}, secret: {}},
        hardware={"processor": "A Xeon", "threads": 999, "host": secret},
    )
    profile.save(tmp_path / "own.yaml")
    printed = run("--profile", str(tmp_path / "own.yaml"), *(["--json"] if as_json else []))
    private = [secret, str(tmp_path), "own.yaml", str(Path.home()), str(Path.cwd())]
    private += [socket.gethostname(), str(Path(doctor_module.__file__).parent)]
    if getpass.getuser() not in ("root", "user"):  # words that may occur anywhere
        private.append(getpass.getuser())
    assert [text for text in private if text in printed] == []
    assert "A Xeon" in printed and "999" in printed and "0.5" in printed and "float32" in printed
    if as_json:
        measurement = json.loads(printed)["profile"]
        assert (
            measurement["timed"]
            and f"threads 999, here {torch.get_num_threads()}" in (measurement["differences"])
        )


def test_a_broken_torch_is_reported(monkeypatch):
    home = Path.home() / "lib"

    def fail(device):
        raise OSError(f"cannot load\n{home}/libtorch.so: no file C:\\Users\\Ada\\torch.dll")

    monkeypatch.setattr("sequoia_plan.profiler.hardware.fingerprint", fail)
    report = json.loads(run("--json"))
    assert report["error"] == "torch cannot be used: OSError: libtorch.so: no file torch.dll"
    assert report["dtype"] is None and report["machine"]["processor"]
    assert report["error"] in run()


@pytest.mark.parametrize(
    ("failure", "state"),
    [(None, "compiled"), (RuntimeError("no C compiler"), "cannot be compiled: RuntimeError: no C")],
)
def test_kernels_are_tried(monkeypatch, failure, state):
    def silu_mul(gate_up):
        if failure:
            raise failure

    monkeypatch.setattr(hardware, "kernels_available", lambda device: device.type == "cuda")
    monkeypatch.setattr(hardware, "silu_mul", silu_mul)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    assert doctor_module._kernel_state("cuda").startswith(state)
    assert doctor_module._kernel_state("cpu").startswith("not used")


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


def test_files_that_are_missing():
    result = CliRunner().invoke(main, ["doctor", "--profile", "none.yaml"])
    assert result.exit_code != 0 and result.stderr.startswith("Error: none.yaml")
