"""benchmarks/gpu.py runs, on tiny models; what it would say of a GPU is not tested here."""

from __future__ import annotations

import json
from dataclasses import replace

import gpu
import gpu_parts
import pytest
import torch

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
    assert result["quick"] is True
    assert [*result["latency"]["target"]] == [*result["latency"]["draft"]] == ["1", "2", "3", "4"]
    assert result["plain"]["draft"] == 0 < result["bandwidth"]["share_of_copy"]
    layers, head = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 512 * 64
    bytes_per_weight = 2 if result["settings"]["dtype"] == "bfloat16" else 4
    assert result["bandwidth"]["bytes_read_a_pass"] == (layers + head + 64) * bytes_per_weight
    assert {*result["trees"]} == {"sequoia-example", "llama3-70b-8b-cnn"}


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    """A finished part stays; one that failed goes on after the last setting that was measured."""
    measured = []
    monkeypatch.setattr(gpu, "show", lambda results, device: None)

    def part(name):
        def measure_setting(setting):
            measured.append((name, setting["number"]))
            if measured == [("checks", 0), ("sdpa", 0), ("sdpa", 1)]:
                raise RuntimeError("CUDA error: the device is lost")
            return {"figure": 10 * setting["number"]}

        def measure(run):
            settings = [{"number": number} for number in range(1 if name == "checks" else 3)]
            return gpu_parts.measure_each(run, "figures", settings, measure_setting)

        return 1.0, measure

    parts = {name: part(name) for name in ("checks", "sdpa")}
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 1 and {*files} == {"checks", "sdpa"}
    assert files["sdpa"]["error"] == "RuntimeError: CUDA error: the device is lost"
    assert [figure["figure"] for figure in files["sdpa"]["figures"]] == [0]
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and measured[3:] == [("sdpa", 1), ("sdpa", 2)]
    assert [figure["figure"] for figure in files["sdpa"]["figures"]] == [0, 10, 20]


def test_the_checks_of_a_device_run_without_one(tmp_path, monkeypatch):
    names = ("checks", "captured", "shared-heads", "sdpa", "host-stream", "compiled", "breakdown")
    parts = {name: gpu.PARTS[name] for name in names}
    torch_compile = torch.compile

    def compile_eagerly(model, **options):
        """Needs no C++ compiler."""
        return torch_compile(model, **options | {"backend": "eager"})

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(gpu, "QUICK", replace(gpu.QUICK, tokens=2))
    code, results = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0, results
    tests = results["checks"]["tests"]
    assert tests["exit"] == 0 and "6 skipped" in tests["says"][0]

    figures = results["sdpa"]["attention"]
    shapes = [(figure["nodes"], figure["shared_heads"]) for figure in figures]
    assert shapes == [(1, 32), (1, 8), (5, 32), (5, 8)]
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
    steady = results["shared-heads"]["steady"]
    assert len(steady) == 8 and all(figure["seconds"] > 0 for figure in steady)
    assert {*results["host-stream"]["breakdown"]} == {"plain, resident", "tree, resident"}
    assert len(results["compiled"]["compiled"]) == 4
