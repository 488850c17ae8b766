"""benchmarks/gpu.py runs, on tiny models; what it would say of a GPU is not tested here."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import gpu
import gpu_parts
import pytest
import torch

from sequoia_plan.artifacts import Acceptance, Latency, TokenTree

pytestmark = pytest.mark.slow


def run(monkeypatch, output, parts, *arguments):
    """Run the script. Returns its exit code and the contents of the files that it left."""
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "QUICK", replace(gpu.QUICK, max_size=4, copy_bytes=1 << 16))
    code = gpu.main(["--device", "cpu", "--quick", "--here", "-o", str(output), *arguments])
    return code, {file.stem: json.loads(file.read_text()) for file in output.glob("*.json")}


def test_a_part_that_fails_and_one_that_does_not(tmp_path, monkeypatch):
    parts = {"broken": (1.0, lambda run: 1 / 0), "llama-2-7b": gpu.PARTS["llama-2-7b"]}
    code, results = run(monkeypatch, tmp_path / "out/gpu", parts)
    assert code == 1
    assert results["broken"]["error"] == "ZeroDivisionError: division by zero"
    result = results["llama-2-7b"]
    assert "error" not in result, result
    assert result["hardware"]["device"] == "cpu"
    assert result["quick"] is True
    assert result["peak_memory_bytes"] is None
    latency = result["latency"]
    assert [*latency["target"]] == [*latency["draft"]] == ["1", "2", "3", "4"]
    assert result["plain"]["draft"] == 0 < result["bandwidth"]["share_of_copy"]
    layers, head = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 512 * 64
    bytes_per_weight = 2 if result["settings"]["dtype"] == "bfloat16" else 4
    assert result["models"]["target"]["parameters"] == layers + 2 * head + 64
    assert result["bandwidth"]["bytes_read_a_pass"] == (layers + head + 64) * bytes_per_weight
    assert {*result["trees"]} == {"sequoia-example", "llama3-70b-8b-cnn"}


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    """A finished part stays; one that failed, or has another scale, is measured again."""
    calls = []
    monkeypatch.setattr(gpu, "show", lambda results, device: None)

    def part(name):
        def measure(run):
            calls.append(name)
            if name == "sdpa" and calls.count(name) == 1:
                raise ValueError("once")
            return {"figure": len(calls)}

        return 1.0, measure

    parts = {name: part(name) for name in ("checks", "sdpa", "captured")}
    code, first = run(monkeypatch, tmp_path / "gpu", parts, "--only", "checks", "--only", "sdpa")
    assert code == 1 and calls == ["checks", "sdpa"] and {*first} == {"checks", "sdpa"}
    code, second = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and calls == ["checks", "sdpa", "sdpa", "captured"]
    assert second["checks"] == first["checks"]
    (tmp_path / "gpu/checks.json").write_text(json.dumps(first["checks"] | {"quick": False}))
    code, third = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and calls[4:] == ["checks"] and third["checks"]["quick"] is True


def test_what_was_measured_before_an_error_is_kept(tmp_path, monkeypatch):
    """The file is written after every setting, and the next run goes on after the last one."""
    measured, errors = [], []

    def measure(run):
        def measure_setting(setting):
            if setting["number"] == 2 and not errors:
                errors.append(RuntimeError("CUDA error: the device is lost"))
                raise errors[0]
            measured.append(setting["number"])
            return {"figure": 10 * setting["number"]}

        return gpu_parts.measure_each(run, "figures", map(numbered, range(4)), measure_setting)

    def numbered(number):
        return {"number": number}

    monkeypatch.setattr(gpu, "show", lambda results, device: None)
    parts = {"checks": (1.0, measure)}
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 1 and measured == [0, 1]
    assert files["checks"]["error"] == "RuntimeError: CUDA error: the device is lost"
    assert [figure["figure"] for figure in files["checks"]["figures"]] == [0, 10]
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and measured == [0, 1, 2, 3] and "error" not in files["checks"]
    assert [figure["figure"] for figure in files["checks"]["figures"]] == [0, 10, 20, 30]


def test_settings_that_would_start_too_late_are_left_for_the_next_run():
    saved = []
    late = gpu_parts.Run(torch.device("cpu"), gpu_parts.QUICK, 0.0, {}, saved.append)
    settings = [{"number": 0}]
    result = gpu_parts.measure_each(late, "figures", settings, pytest.fail)
    assert result == {"figures": [], "unfinished": True} and saved == []


def test_a_device_that_has_failed_loses_no_file(tmp_path, monkeypatch):
    """After an error of the device, even freeing its memory raises."""

    def raise_error(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "fingerprint", lambda device: {})
    for name in ("max_memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, raise_error)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    options = gpu.parse_options(["--quick", "-o", str(tmp_path)])
    file = tmp_path / "sdpa.json"
    result = gpu.run_part(raise_error, file, options, math.inf)
    assert result["error"].startswith("RuntimeError: CUDA error: an illegal memory access")
    assert json.loads(file.read_text()) == result


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "its process ended with code -6"),
        ("", "its process wrote no file"),
    ],
)
def test_a_process_that_dies_takes_no_other_part_with_it(code, error, tmp_path, monkeypatch):
    """The first part's process dies, the second one runs as usual."""
    command = gpu.part_command

    def command_of_part(name, options, seconds):
        if name == "checks":
            return [sys.executable, "-c", code]
        return command(name, options, seconds)

    monkeypatch.setattr(gpu, "part_command", command_of_part)
    output = tmp_path / "gpu"
    chosen = ["--only", "checks", "--only", "sdpa"]
    assert gpu.main(["--device", "cpu", "--quick", "-o", str(output), *chosen]) == 1
    checks, sdpa = (json.loads((output / f"{name}.json").read_text()) for name in chosen[1::2])
    assert checks == {"quick": True, "error": error}
    assert len(sdpa["attention"]) == 4 and "error" not in sdpa


def test_the_checks_of_a_device_run_without_one(tmp_path, monkeypatch):
    names = ("checks", "captured", "shared-heads", "sdpa", "host-stream", "breakdown")
    parts = {name: gpu.PARTS[name] for name in names}
    monkeypatch.setattr(gpu, "QUICK", replace(gpu.QUICK, tokens=2))
    code, results = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0, results
    tests = results["checks"]["tests"]
    assert tests["exit"] == 0 and "6 skipped" in tests["says"][0]

    figures = results["sdpa"]["attention"]
    shapes = [(figure["nodes"], figure["shared_heads"]) for figure in figures]
    assert shapes == [(1, 32), (1, 8), (5, 32), (5, 8)]
    for figure in figures:
        seconds = figure["seconds"]
        assert seconds["first"] > 0 < seconds["later"] and seconds["replayed"] is None

    comparisons = [*results["captured"]["against_eager"].values()]
    assert comparisons == [{"graphs": 0, "equal": [True] * 4}] * 4
    not_finite = results["captured"]["not_finite"]
    assert not_finite["exit"] == 1
    assert "logits that are not finite" in not_finite["says"][0]

    steps = results["breakdown"]["steps"]
    assert {(step["temperature"], step["top_p"], step["verifier"]) for step in steps} == {
        (0.0, 1.0, None),
        *((0.6, top_p, verifier) for top_p in (1.0, 0.9) for verifier in ("sequoia", "traversal")),
    }
    assert all("peak_memory_bytes" in step and step["first_step_seconds"] > 0 for step in steps)
    assert all("keep" in step for step in steps), "the keys are those of a bench file"

    shared_heads = results["shared-heads"]
    assert {(step["tree"], step["context"]) for step in shared_heads["steps"]} == {
        (tree, context) for tree in ("plain", "tree") for context in (16, 40)
    }
    assert {*shared_heads["kernels"]} == {"plain", "tree"}
    assert all(kernels[0]["calls"] > 0 for kernels in shared_heads["kernels"].values())
    assert len(shared_heads["steady"]) == 8
    assert all(figure["seconds"] > 0 for figure in shared_heads["steady"])
    assert {*results["host-stream"]["breakdown"]} == {"plain, resident", "tree, resident"}


def test_the_figures_of_a_tree_follow_from_known_times(monkeypatch):
    """Passes take 12 ms (target), 1.5 and 1 ms (draft), the step 16 ms and a plain one 10.5 ms.

    Every figure is calculated by hand.
    """
    tree = TokenTree.from_parents([-1, 0, 0, 1])
    latency = Latency({1: 0.010, 4: 0.012}, {1: 0.001, 2: 0.0015}, overhead=0.0005)
    monkeypatch.setattr(gpu_parts, "step_breakdown", lambda *_: {"step": 0.016})
    cpu_run = gpu_parts.Run(torch.device("cpu"), gpu_parts.QUICK, math.inf)
    result = gpu_parts.compare_with_passes(
        cpu_run, None, tree, None, Acceptance.given([0.5, 0.25]), latency, 0.0105
    )
    assert result["step_seconds"] == pytest.approx(
        {"measured": 0.016, "planned": 0.015, "sum_of_passes": 0.0145}
    )
    assert result["overhead_share"] == pytest.approx(0.09375)
    projected = {
        "expected_tokens": 2.0,
        "tokens_per_second": 125.0,
        "plain_tokens_per_second": 95.238,
        "speedup": 1.3125,
    }
    assert result["projected"] == pytest.approx(projected, rel=1e-4)
    assert (result["size"], result["depth"], result["parents"]) == (4, 3, [-1, 0, 0, 1])


def test_parts_that_would_start_too_late_are_skipped(tmp_path, monkeypatch):
    parts = dict.fromkeys(gpu.PARTS, (1.0, lambda run: pytest.fail("started")))
    shown = []
    monkeypatch.setattr(gpu, "show", lambda results, device: shown.append(results))
    code, files = run(monkeypatch, tmp_path / "gpu", parts, "--minutes", "0")
    assert code == 0 and files == {}
    assert shown == [{name: {"skipped": "out of time"} for name in gpu.PARTS}]


def test_shapes_have_the_parameters_that_are_published():
    """The shapes have 7B, 13B and 68M parameters, as published."""

    def num_parameters(shape):
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        attention, feed_forward = 4 * hidden**2, 3 * hidden * shape["intermediate_size"]
        norms = 2 * hidden
        embeddings_and_head = 2 * shape["vocab_size"] * hidden
        return layers * (attention + feed_forward + norms) + embeddings_and_head + hidden

    shapes = (*gpu.FULL.targets.values(), gpu.FULL.draft)
    assert [num_parameters(shape) for shape in shapes] == [
        6_738_415_616,
        13_015_864_320,
        68_030_208,
    ]
