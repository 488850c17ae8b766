"""How many cores a process may use: a real affinity, and quotas in trees of control groups."""

import os
import shutil
import subprocess
import sys

import pytest

from sequoia_plan.artifacts import processor
from sequoia_plan.artifacts.processor import usable_cores

AFFINITY = 8
QUOTAS = {
    "0::/a/b": ({"a/b/cpu.max": "350000 100000", "a/cpu.max": "max 100000"}, 3),
    "0::/a": ({"a/cpu.max": "500000 100000", "cpu.max": "100000 50000"}, 2),
    "0::/of/the/host": ({"cpu.max": "50000 100000"}, 1),
    "2:cpuset:/\n4:cpuacct,cpu:/": (
        {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    "1:cpu:/": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, AFFINITY),
}  # fmt: skip
"""Groups of a process -> what the files say, and the cores that are left."""


@pytest.mark.parametrize("groups", QUOTAS)
def test_quotas_of_control_groups(groups, tmp_path, monkeypatch):
    """From the process's own group up; without the files, the affinity alone counts."""
    files, cores = QUOTAS[groups]
    (tmp_path / "own").write_text(groups + "\n")
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(processor, "GROUPS", tmp_path)
    monkeypatch.setattr(processor, "OWN_GROUPS", tmp_path / "nowhere")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(AFFINITY), raising=False)
    assert usable_cores() == AFFINITY, "the control"
    monkeypatch.setattr(processor, "OWN_GROUPS", tmp_path / "own")
    assert usable_cores() == cores


@pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset")
def test_a_process_on_one_core():
    core = min(os.sched_getaffinity(0))
    code = "from sequoia_plan.artifacts.processor import usable_cores; print(usable_cores())"
    command = ["taskset", "-c", str(core), sys.executable, "-c", code]
    assert subprocess.check_output(command) == b"1\n"
