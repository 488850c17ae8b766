"""benchmarks/gpu.py runs, on tiny models; what it would say of a GPU is not tested here."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import gpu
import gpu_scale
import pytest
from paths import ROOT

pytestmark = pytest.mark.slow
BARE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
sys.path[:] = [folder for folder in sys.path if not folder.endswith(("src", "typings"))]
sys.modules |= dict.fromkeys(["numba", "click", "rich", "matplotlib", "sequoia_plan_drafts"])
sys.path.insert(0, sys.argv[1])
import gpu
sys.exit(gpu.main(sys.argv[2:]))
"""
"""Runs the script where neither this package nor some that it needs elsewhere are installed."""
HANGING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
child.wait()
"""


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

        return measure

    module = SimpleNamespace(checks=part("checks"), sdpa=part("sdpa"))
    monkeypatch.setitem(sys.modules, "parts", module)
    parts = {name: (1.0, "parts", name) for name in ("checks", "sdpa")}
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 1 and {*files} == {"checks", "sdpa"}
    assert files["sdpa"]["error"] == "RuntimeError: CUDA error: the device is lost"
    assert [figure["figure"] for figure in files["sdpa"]["figures"]] == [0]
    code, files = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and measured[3:] == [("sdpa", 1), ("sdpa", 2)]
    assert [figure["figure"] for figure in files["sdpa"]["figures"]] == [0, 10, 20]


def test_the_parts_of_a_device_run_without_one(tmp_path, monkeypatch):
    names = {*gpu.PARTS} - {"pair"}
    parts = {name: gpu.PARTS[name] for name in gpu.PARTS if name in names}
    monkeypatch.setattr(gpu, "QUICK", gpu.QUICK._replace(tokens=2))
    code, results = run(monkeypatch, tmp_path / "gpu", parts)
    assert code == 0 and results.keys() == names, results
    (tests,) = results["checks"]["tests"]
    assert tests["exit"] == 0 and "6 skipped" in tests["says"][0]
    comparisons = results["captured"]["against_eager"]
    assert [figures["equal"] for figures in comparisons] == [[True] * 4] * 4
    not_finite = results["captured"]["not_finite"]
    assert not_finite["exit"] == 1
    assert "SequoiaPlanError" in not_finite["says"][0]  # a compiled pass says it in its own words
    plain = results["llama-2"]["pairs"][0]
    layers, head = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 512 * 64
    bytes_per_weight = 2 if plain["settings"]["dtype"] == "bfloat16" else 4
    assert plain["bandwidth"]["bytes_read_a_pass"] == (layers + head + 64) * bytes_per_weight
    assert {*plain["trees"]} == {"sequoia-example", "llama3-70b-8b-cnn"}


def test_parts_fit_a_machine_that_is_lent_for_ten_minutes():
    """And that returns eight files."""
    assert len(gpu.PARTS) <= 8
    assert max(seconds for seconds, *_ in gpu.PARTS.values()) + gpu.GRACE_SECONDS < 9 * 60


def test_a_bare_machine_needs_no_installation(tmp_path):
    options = ["--device", "cpu", "--quick", "--only", "captured", "-o", str(tmp_path)]
    command = [sys.executable, "-c", BARE, str(ROOT / "benchmarks"), *options]
    subprocess.run(command, check=True, cwd=tmp_path)
    result = json.loads((tmp_path / "captured.json").read_text())
    assert len(result["against_eager"]) == 4 and result["not_finite"]["exit"] == 1


def test_a_part_that_hangs_leaves_nothing_on_the_device(tmp_path, monkeypatch):
    """Neither its process nor those that it started."""
    file = tmp_path / "child"
    command = [sys.executable, "-c", HANGING, str(file)]
    monkeypatch.setattr(gpu, "part_command", lambda *_: command)
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 2)
    options = SimpleNamespace(quick=True)
    result = gpu.run_in_own_process("sdpa", tmp_path / "sdpa.json", options, 1.0)
    assert "was ended 2 s after its time" in result["error"]
    child = int(file.read_text())
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True)
        if not state.stdout.strip() or state.stdout.startswith(b"Z"):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child goes on")
