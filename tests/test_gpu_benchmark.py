"""benchmarks/gpu.py runs, on tiny models; what it would say of a GPU is not tested here."""

from __future__ import annotations

import json
from dataclasses import replace

import gpu
import gpu_parts
import pytest
import torch

from sequoia_plan.artifacts import Latency, TokenTree
from sequoia_plan.artifacts.cost import StepTime


def run(monkeypatch, output, parts, *arguments):
    """The script's exit code and the files that it left."""
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "QUICK", replace(gpu.QUICK, largest=4, copied=1 << 16))
    code = gpu.main(["--device", "cpu", "--quick", "-o", str(output), *arguments])
    return code, {file.stem: json.loads(file.read_text()) for file in output.glob("*.json")}


def test_a_part_that_fails_and_one_that_does_not(tmp_path, monkeypatch):
    parts = {"broken": (1.0, lambda run: 1 / 0), "llama-2-7b": gpu.PARTS["llama-2-7b"]}
    code, found = run(monkeypatch, tmp_path / "out/gpu", parts)
    assert code == 1 and found["broken"]["error"] == "ZeroDivisionError: division by zero"
    found = found["llama-2-7b"]
    assert "error" not in found, found
    assert found["hardware"]["device"] == "cpu" and found["quick"] is True and found["peak_memory_bytes"] is None
    assert [*found["latency"]["target"]] == [*found["latency"]["draft"]] == ["1", "2", "3", "4"]
    assert found["plain"]["draft"] == 0 < found["bandwidth"]["share_of_copy"]
    layers, head = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 512 * 64
    size = 2 if found["settings"]["dtype"] == "bfloat16" else 4
    assert found["models"]["target"]["parameters"] == layers + 2 * head + 64
    assert found["bandwidth"]["bytes_read_a_pass"] == (layers + head + 64) * size
    assert {*found["trees"]} == {"sequoia-example", "llama3-70b-8b-cnn"}


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    """What is there is kept; what failed, or was measured at another scale, is measured again."""
    calls = []
    monkeypatch.setattr(gpu, "show", lambda found, device: None)

    def part(name):
        def measure(run):
            calls.append(name)
            if name == "sdpa" and calls.count(name) == 1:
                raise ValueError("once")
            return {"figure": len(calls)}

        return 1.0, measure

    parts = {name: part(name) for name in ("checks", "sdpa", "captured")}
    code, found = run(monkeypatch, tmp_path / "gpu", parts, "--only", "checks", "--only", "sdpa")
    assert code == 1 and calls == ["checks", "sdpa"] and {*found} == {"checks", "sdpa"}
    code, again = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and calls == ["checks", "sdpa", "sdpa", "captured"] and again["checks"] == found["checks"]
    (tmp_path / "gpu/checks.json").write_text(json.dumps(found["checks"] | {"quick": False}))
    code, again = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and calls[4:] == ["checks"] and again["checks"]["quick"] is True


def test_the_checks_of_a_device_run_without_one(tmp_path, monkeypatch):
    parts = {name: gpu.PARTS[name] for name in ("checks", "sdpa", "captured", "breakdown", "compiled")}
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: real(model, **options | {"backend": "eager"}))  # no C++ compiler is needed
    monkeypatch.setattr(gpu, "QUICK", replace(gpu.QUICK, tokens=2))
    code, found = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0, found
    assert found["checks"]["tests"]["exit"] == 0 and "6 skipped" in found["checks"]["tests"]["says"][0]
    attended = found["sdpa"]["attention"]
    assert [(each["nodes"], each["shared_heads"]) for each in attended] == [(2, 32), (2, 8), (5, 32), (5, 8)]
    assert all(each["seconds"]["first"] > 0 < each["seconds"]["later"] and each["seconds"]["replayed"] is None for each in attended)
    against = [*found["captured"]["against_eager"].values()]
    assert len(against) == 4 and all(each == {"graphs": 0, "equal": [True] * 4} for each in against)
    assert found["captured"]["not_finite"]["exit"] == 1 and "logits that are not finite" in found["captured"]["not_finite"]["says"][0]
    assert {(each["temperature"], each["top_p"], each["verifier"]) for each in found["breakdown"]["steps"]} == {
        (0.0, 1.0, None),
        *((0.6, top_p, verifier) for top_p in (1.0, 0.9) for verifier in ("sequoia", "traversal")),
    }
    assert [(each["tree"], each["compile"]) for each in found["compiled"]["compiled"]] == [(t, c) for t in ("plain", "tree") for c in (False, True)]
    assert all("peak_memory_bytes" in each and each["first_step_seconds"] > 0 for each in found["breakdown"]["steps"])


def test_a_tree_is_judged_by_known_times(monkeypatch):
    """Passes of 12 ms (target), 1.5 and 1 ms (draft), a step of 16 ms and a plain one of 10.5 ms: every figure by hand."""
    tree = TokenTree.from_parents([-1, 0, 0, 1])
    times = StepTime(Latency({1: 0.010, 4: 0.012}, {1: 0.001, 2: 0.0015}, overhead=0.0005))
    monkeypatch.setattr(gpu_parts, "breakdown", lambda *_, **__: {"step": 0.016})
    found = gpu_parts.judged(None, tree, [0.5, 0.25], times, None, 0.0105, rounds=1)
    assert found["step_seconds"] == pytest.approx({"measured": 0.016, "planned": 0.015, "sum_of_passes": 0.0145})
    assert found["overhead_share"] == pytest.approx(0.09375)
    figures = {"expected_tokens": 2.0, "tokens_per_second": 125.0, "plain_tokens_per_second": 95.238, "speedup": 1.3125}
    assert found["projected"] == pytest.approx(figures, rel=1e-4)
    assert (found["size"], found["depth"], found["parents"]) == (4, 3, [-1, 0, 0, 1])


def test_parts_that_would_start_too_late_are_skipped(tmp_path, monkeypatch):
    parts = dict.fromkeys(gpu.PARTS, (1.0, lambda run: pytest.fail("started")))
    shown = []
    monkeypatch.setattr(gpu, "show", lambda found, device: shown.append(found))
    code, found = run(monkeypatch, tmp_path / "gpu", parts, "--minutes", "0")
    assert code == 0 and found == {} and shown == [{name: {"skipped": "out of time"} for name in gpu.PARTS}]


def test_shapes_have_the_parameters_that_are_published():
    """7B, 13B and 68M, as published."""

    def parameters(shape):
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        return layers * (4 * hidden**2 + 3 * hidden * shape["intermediate_size"] + 2 * hidden) + 2 * shape["vocab_size"] * hidden + hidden

    assert [parameters(each) for each in (*gpu.FULL.targets.values(), gpu.FULL.draft)] == [6_738_415_616, 13_015_864_320, 68_030_208]
