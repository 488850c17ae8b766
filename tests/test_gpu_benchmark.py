"""benchmarks/gpu.py runs, on tiny models; what it would say of a GPU is not tested here."""

from __future__ import annotations

import json

import gpu
import gpu_scale
import pytest

pytestmark = pytest.mark.slow


def run(monkeypatch, output, parts, *arguments):
    """Run the script. Returns its exit code and the contents of the files that it left."""
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "QUICK", gpu.QUICK._replace(max_size=4, copy_bytes=1 << 16))
    code = gpu.main(["--device", "cpu", "--quick", "--here", "-o", str(output), *arguments])
    return code, {file.stem: json.loads(file.read_text()) for file in output.glob("*.json")}


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    """A finished part stays; one that failed goes on after the last setting that was measured."""
    measured = []

    def part(name):
        def measure_setting(setting):
            measured.append((name, setting["number"]))
            if measured == [("checks", 0), ("sdpa", 0), ("sdpa", 1)]:
                raise RuntimeError("CUDA error: the device is lost")
            return {"figure": 10 * setting["number"]}

        def measure(run):
            settings = [{"number": number} for number in range(1 if name == "checks" else 3)]
            return gpu_scale.measure_each(run, "figures", settings, measure_setting)

        return 1.0, measure

    parts = {name: part(name) for name in ("checks", "sdpa")}
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 1 and {*files} == {"checks", "sdpa"}
    assert files["sdpa"]["error"] == "RuntimeError: CUDA error: the device is lost"
    assert [figure["figure"] for figure in files["sdpa"]["figures"]] == [0]
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and measured[3:] == [("sdpa", 1), ("sdpa", 2)]
    assert [figure["figure"] for figure in files["sdpa"]["figures"]] == [0, 10, 20]


def test_the_parts_of_a_device_run_without_one(tmp_path, monkeypatch):
    names = {*gpu.PARTS} - {"llama-2-13b", "pair-t0", "pair-t06", "variants"}
    parts = {name: gpu.PARTS[name] for name in gpu.PARTS if name in names}
    monkeypatch.setattr(gpu, "QUICK", gpu.QUICK._replace(tokens=2))
    code, results = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and results.keys() == names, results
    tests = results["checks"]["tests"]
    assert tests["exit"] == 0 and "6 skipped" in tests["says"][0]
    comparisons = [*results["captured"]["against_eager"].values()]
    assert comparisons == [{"graphs": 0, "equal": [True] * 4}] * 4
    not_finite = results["captured"]["not_finite"]
    assert not_finite["exit"] == 1
    assert "logits that are not finite" in not_finite["says"][0]
    plain = results["llama-2-7b"]
    layers, head = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 512 * 64
    bytes_per_weight = 2 if plain["settings"]["dtype"] == "bfloat16" else 4
    assert plain["bandwidth"]["bytes_read_a_pass"] == (layers + head + 64) * bytes_per_weight
    assert {*plain["trees"]} == {"sequoia-example", "llama3-70b-8b-cnn"}
