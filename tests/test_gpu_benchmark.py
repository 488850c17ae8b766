"""benchmarks/gpu.py runs, on tiny models; what it would say of a GPU is not tested here."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import gpu
import gpu_parts
import pytest
import torch
from paths import ROOT

from sequoia_plan.models.base.dtype import resolve_dtype

pytestmark = pytest.mark.slow
BARE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
sys.path[:] = [folder for folder in sys.path if not folder.endswith(("src", "typings"))]
sys.modules |= dict.fromkeys(["numba", "gguf", "click", "rich", "matplotlib"])
sys.path.insert(0, sys.argv[1])
import gpu, gpu_parts, pathlib
gpu_parts.measure_part(pathlib.Path(sys.argv[2]), 0)
"""
"""Measures a part where neither this package nor some that it needs elsewhere are installed."""
CHILD = """
import json, subprocess, sys, time
from pathlib import Path
path, number = Path(sys.argv[1]), int(sys.argv[2])
report = json.loads(path.read_text())
run = report["runs"][number]
if run["part"] != "step":
    run["rows"] = [{"setting": {"nodes": 1}, "figure": 7}]
    path.write_text(json.dumps(report))
    sys.exit(0 if run["part"] == "works" else 3)
run["rows"].insert(0, {"setting": {"nodes": 1}, "figure": 7})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
run["child"] = child.pid
path.write_text(json.dumps(report))
child.wait()
"""
"""Takes the place of the program that measures a part: one part hangs, and one fails."""


def order(path, part, **options):
    """Write a report in which a part is to be measured."""
    run = {"part": part, "device": "cpu", "quick": True, "broken": False, "without": []}
    run |= {"settings": [None], "rows": [{"setting": None, "error": gpu.UNFINISHED}]}
    path.write_text(json.dumps({"runs": [run | options]}))


def measured(path, part, **options):
    """Measure a part in this process. Returns its run."""
    order(path, part, **options)
    gpu_parts.measure_part(path, 0)
    return gpu.read(path)["runs"][0]


def figures(run, *names):
    """The figures of these names in each row, without those that lack one."""
    return [[row[n] for n in names] for row in run["rows"] if all(n in row for n in names)]


def test_every_part_has_its_figures(tmp_path):
    runs = {part: measured(tmp_path / "report.json", part) for part in gpu.LIMITS}
    for part, run in runs.items():
        assert not gpu.failed_settings(run), (part, run)
        assert run["hardware"]["device"] == "cpu"
    same = ("tokens", "equal_if_captured", "equal_without_kernels")
    assert figures(runs["works"], *same) == [[8, 8, 8]] * 4
    ((says, tokens),) = figures(runs["works"], "says", "tokens")
    assert "not finite" in says and tokens == 8
    assert len(figures(runs["step"], "step", "draft", "target", "verify")) == 8
    assert len(figures(runs["step"], "kernels", "calls")) == 4
    layers, head = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64), 512 * 64
    bytes_per_weight = torch.finfo(resolve_dtype("auto", "cpu")).bits // 8
    for part in ("step", "llama-2"):
        ((num_bytes, _),) = figures(runs[part], "bytes_read_a_pass", "copy_bytes_per_second")
        assert num_bytes == (layers + head + 64) * bytes_per_weight
    off = [row["setting"]["without"] for row in runs["kernels"]["rows"]]
    assert off == [[], *([name] for name in gpu.KERNELS), [*gpu.KERNELS], []]
    names = ("expected_tokens", "projected_tokens_per_second", "step", "depth")
    best = {1: 1, 4: sum(0.634182929993**level for level in range(4))}  # the best is a chain
    for tokens, per_second, step, depth in figures(runs["llama-2"], *names):
        assert tokens == pytest.approx(best[depth])
        assert per_second == pytest.approx(tokens / step)
    assert len(figures(runs["streamed"], "step")) == 2
    assert [[*methods] for (methods,) in figures(runs["pair"], "methods")] == [
        ["plain", "generate", "traversal"]
    ] * 2


def test_a_row_that_fails_leaves_the_others(tmp_path, monkeypatch):
    """In another run only what failed is measured, and a warning is an error with its cause."""

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access")

    def warn():
        try:
            fail()
        except RuntimeError:
            warnings.warn("norm: its Triton kernel cannot be compiled", stacklevel=1)
        return {"figure": 8}

    def part(scale, device):
        rows = [lambda: {"figure": 7}, fail, warn, lambda: {"figure": 9}]
        yield from (({"number": number}, measure) for number, measure in enumerate(rows))
        raise ValueError("no more memory")

    monkeypatch.setitem(gpu_parts.PARTS, "works", part)
    run = measured(tmp_path / "report.json", "works")
    assert figures(run, "figure") == [[7], [8], [9]]
    assert run["rows"][1]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert "in fail\n" in run["rows"][1]["traceback"]
    assert run["rows"][2]["warnings"] == ["norm: its Triton kernel cannot be compiled"]
    assert run["rows"][4]["error"] == "ValueError: no more memory"
    settings = gpu.failed_settings(run)
    assert settings == [{"number": 1}, {"number": 2}, None]
    run = measured(tmp_path / "report.json", "works", broken=True, settings=settings[:2])
    assert [row["setting"] for row in run["rows"]] == settings
    assert "illegal memory" in run["rows"][1]["traceback"] and "figure" not in run["rows"][1]


def test_kernels_are_off_in_a_context():
    kernels = {("norm", torch.float32), ("norm", torch.bfloat16), ("norm", torch.float16)}
    failed = gpu_parts.kernel_launch._failed_kernels
    with gpu_parts.without_kernels("norm"):
        assert kernels <= failed
        with gpu_parts.without_kernels(*gpu.KERNELS):
            assert len(failed) == 3 * len(gpu.KERNELS)
        assert failed == kernels
    assert not failed


def test_a_bare_machine_needs_no_installation(tmp_path):
    path = tmp_path / "report.json"
    order(path, "llama-2")
    command = [sys.executable, "-c", BARE, str(ROOT / "benchmarks"), str(path)]
    subprocess.run(command, check=True, cwd=tmp_path)
    (run,) = gpu.read(path)["runs"]
    assert len(figures(run, "expected_tokens")) == 4 and not gpu.failed_settings(run)


def test_a_part_that_hangs_leaves_the_others_and_nothing_on_the_device(tmp_path, monkeypatch):
    """And what failed is run again, at first with all kernels."""
    path, child = tmp_path / "report.json", tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(gpu, "CHILD", child)
    monkeypatch.setattr(gpu, "LIMITS", {"works": 30, "step": 2, "pair": 30})
    options = ["-o", str(path), "--device", "cpu"]
    assert gpu.main(options) == 1
    works, step, pair = gpu.read(path)["runs"]
    assert figures(works, "figure") == figures(step, "figure") == figures(pair, "figure") == [[7]]
    assert "error" not in works and pair["error"] == "its process ended with code 3"
    assert step["error"] == "its process was ended after 2 s"
    wait_until_ended(step["child"])
    monkeypatch.setattr(gpu, "KERNELS", ("norm",))
    assert gpu.main([*options, "--broken"]) == 1
    again = gpu.read(path)["runs"][3:]
    assert [run["part"] for run in again] == ["step"] * 3  # the other has no row that failed
    assert [run["without"] for run in again] == [[], ["norm"], ["norm"]]
    assert all(run["broken"] and run["settings"] == [None] for run in again)


def wait_until_ended(pid):
    """Fail if a process does not end within ten seconds."""
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True)
        if not state.stdout.strip() or state.stdout.startswith(b"Z"):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child goes on")


def test_the_parts_fit_eight_minutes():
    assert sum(gpu.LIMITS.values()) <= 8 * 60 and gpu.LIMITS.keys() == gpu_parts.PARTS.keys()
