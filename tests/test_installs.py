"""What is needed for what: the wheel in environments that hold a few packages only, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = ("numpy", "numpy.libs", "safetensors", "msgspec", "yaml", "_yaml")
PLANNING = (*BASE, "numba", "llvmlite", "llvmlite.libs", "click", "rich", "pygments", "markdown_it", "mdurl")
DECODING_ONLY = {"numba", "llvmlite", "llvmlite.libs", "click", "rich", "matplotlib", "accelerate", "gguf", "scipy", "sequoia_plan"}
"""What a slim runtime does without."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the sources."""
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    ignored = {".git", ".venv", "build", "tests", "docs", "benchmarks"}
    for entry in ROOT.iterdir():
        if entry.name not in ignored and not entry.name.startswith("."):
            (source / entry.name).symlink_to(entry)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def environment(folder, wheel, packages):
    """A virtual environment with the wheel and these packages, linked from where they are installed; its Python."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in packages:
        for place in {Path(entry) for entry in sys.path if entry.endswith("site-packages")}:
            if (place / name).exists():
                (site / name).symlink_to(place / name)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    return folder / "bin" / "python"


def run(python, *arguments, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([python, *arguments], cwd=cwd, capture_output=True, text=True, env=clean, check=False)


def test_the_wheel_has_every_file_that_is_loaded_by_name(wheel):
    """Models, prompts and catalog; what the sources have of them."""
    patterns = ("runtime/*.safetensors", "runtime/smollm2-135m-eagle3/*", "artifacts/*.jsonl", "artifacts/catalog/**/*.*")
    expected = {f"sequoia_plan/{file.relative_to(ROOT)}" for pattern in patterns for file in ROOT.glob(pattern) if "__pycache__" not in file.parts}
    with zipfile.ZipFile(wheel) as opened:
        assert len(expected) > 5 and expected <= set(opened.namelist())


def test_planning_needs_no_torch_and_other_commands_say_what_they_need(wheel, tmp_path):
    python = environment(tmp_path / "env", wheel, PLANNING)
    (tmp_path / "p.json").write_text("[0.5, 0.2, 0.1]")
    solved = run(python, "-m", "sequoia_plan", "solve", "--acceptance", "p.json", "--budget", "8", "--depth", "4", "--json", cwd=tmp_path)
    assert json.loads(solved.stdout)["size"] == 8, solved.stderr
    shown = run(python, "-m", "sequoia_plan", "show", cwd=tmp_path)
    assert "8 nodes" in shown.stdout, shown.stderr
    for arguments, missing, extra in (
        (("show", "--plot", "t.png"), "matplotlib", "plot"),
        (("generate",), "torch", "runtime"),
        (("profile",), "torch", "runtime"),
        (("bench",), "torch", "runtime"),
    ):
        found = run(python, "-m", "sequoia_plan", *arguments, cwd=tmp_path)
        assert found.returncode == 1, found.stdout
        assert found.stderr == f"Error: {arguments[0]} needs {missing}, which is not installed: pip install 'sequoia-plan[{extra}]'\n"


SLIM = """
import sys, types, importlib.util, torch
from transformers import LlamaConfig, LlamaForCausalLM
from sequoia_plan.artifacts import load_tree
from sequoia_plan.runtime import SequoiaDecoder
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)).eval()
found = SequoiaDecoder(model, model, load_tree("sequoia-example-64x6")).generate([1, 2, 3], 12)
plain = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
assert found.sequences.tolist() == plain.tolist()
absent = ["numba", "click", "matplotlib", "rich"]
assert not any(importlib.util.find_spec(name) for name in absent), absent
assert not {"sequoia_plan.planner", "sequoia_plan.profiler"} & sys.modules.keys()
print(found.new_tokens)
"""


def test_a_slim_runtime_decodes_without_planner_packages(wheel, tmp_path):
    site = Path(importlib.util.find_spec("torch").origin).parent.parent
    kept = [entry.name for entry in site.iterdir() if entry.name.split("-")[0].lower() not in DECODING_ONLY and not entry.name.startswith("__editable__")]
    python = environment(tmp_path / "env", wheel, [name for name in kept if not name.lower().startswith(("sequoia_plan", "pytest", "_pytest", "typer"))])
    found = run(python, "-c", SLIM, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[-1]) == 12
