"""Which packages each part needs: the wheels in environments that hold only a few packages."""

import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

WEIGHTS = ROOT / "drafts"
BASE = ("numpy", "numpy.libs", "safetensors", "msgspec", "yaml", "_yaml")
COMMAND_LINE = ("click", "rich", "pygments", "markdown_it", "mdurl")
PLANNING = (*BASE, "numba", "llvmlite", "llvmlite.libs", *COMMAND_LINE)
NOT_FOR_DECODING = {
    "numba",
    "llvmlite",
    "llvmlite.libs",
    "click",
    "rich",
    "matplotlib",
    "accelerate",
    "gguf",
    "scipy",
    "sequoia_plan",
}
"""Packages that a runtime without the planner does not have."""
pytestmark = pytest.mark.slow
MAX_WHEEL_BYTES = 1_000_000
"""The main wheel has code, prompts and the catalog, and no weights."""


def build_wheel(sources, ignored, tmp_path_factory):
    """Build a wheel from links to the sources, so that nothing is written into the repository."""
    linked = tmp_path_factory.mktemp("source")
    for entry in sources.iterdir():
        if entry.name not in ignored and not entry.name.startswith("."):
            (linked / entry.name).symlink_to(entry)
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(linked)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The main wheel."""
    return build_wheel(ROOT, {"build", "tests", "docs", "benchmarks"}, tmp_path_factory)


@pytest.fixture(scope="module")
def weights_wheel(tmp_path_factory):
    """The wheel of the embedded draft weights."""
    return build_wheel(WEIGHTS, {"build"}, tmp_path_factory)


def contents(wheel):
    """The paths of all files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files(folder, *patterns):
    """The files below a folder that match one of the patterns, relative to the folder."""
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return {str(path.relative_to(folder)) for path in paths if "__pycache__" not in path.parts}


def environment(folder, wheel, packages):
    """Make a virtual environment with a wheel and linked packages; returns its Python."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in packages:
        for place in {Path(entry) for entry in sys.path if entry.endswith("site-packages")}:
            if (place / name).exists():
                (site / name).symlink_to(place / name)
    options = ["--quiet", "--no-deps", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "bin" / "python"


def run(python, *arguments, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, *arguments], cwd=cwd, capture_output=True, text=True, env=clean, check=False
    )


def test_wheels_have_every_file_that_is_loaded_by_name(wheel, weights_wheel):
    """Prompts and catalog, and the drafts; the main wheel has neither weights nor scripts."""
    modules = (
        f"{name}/**/*.py" for name in ("artifacts", "engines", "profiler", "models", "runtime")
    )
    loaded = files(ROOT, "artifacts/*.jsonl", "artifacts/catalog/**/*.*", *modules)
    names = contents(wheel)
    assert len(loaded) > 5 and {f"sequoia_plan/{path}" for path in loaded} <= names
    package = "sequoia_plan_drafts"
    drafts = files(WEIGHTS, f"{package}/*.safetensors", f"{package}/*-eagle3/*")
    assert len(drafts) == 5 and drafts <= contents(weights_wheel)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    outside = {Path(name).name for name in drafts | files(ROOT, "tools/*.py")}
    assert len(outside) >= 5 and not outside & {Path(name).name for name in names}


def test_planning_needs_no_torch_and_other_commands_say_what_they_need(wheel, tmp_path):
    python = environment(tmp_path / "env", wheel, PLANNING)
    (tmp_path / "p.json").write_text("[0.5, 0.2, 0.1]")
    options = ["--acceptance", "p.json", "--budget", "8", "--depth", "4", "--json"]
    solved = run(python, "-m", "sequoia_plan", "solve", *options, cwd=tmp_path)
    assert json.loads(solved.stdout)["size"] == 8, solved.stderr
    shown = run(python, "-m", "sequoia_plan", "show", cwd=tmp_path)
    assert "8 nodes" in shown.stdout, shown.stderr
    report = run(python, "-m", "sequoia_plan", "doctor", cwd=tmp_path).stdout
    assert "machine            cannot be used: ModuleNotFoundError" in report
    for arguments, missing, extra in (
        (("show", "--plot", "t.png"), "matplotlib", "plot"),
        (("generate",), "torch", "runtime"),
        (("profile",), "torch", "runtime"),
        (("bench",), "torch", "runtime"),
    ):
        result = run(python, "-m", "sequoia_plan", *arguments, cwd=tmp_path)
        assert result.returncode == 1, result.stdout
        assert result.stderr == (
            f"Error: {arguments[0]} needs {missing}, which is not installed: "
            f"pip install 'sequoia-plan[{extra}]'\n"
        )


SLIM = """
import sys, types, importlib.util, torch
from transformers import LlamaConfig, LlamaForCausalLM
from sequoia_plan.artifacts import load_tree
from sequoia_plan.runtime import SequoiaDecoder
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
)
model = LlamaForCausalLM(config).eval()
tree = load_tree("sequoia-example-64x6")
generation = SequoiaDecoder(model, model, tree).generate([1, 2, 3], 12)
prompt = torch.tensor([[1, 2, 3]])
plain = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
assert generation.sequences.tolist() == plain.tolist()
absent = ["numba", "click", "matplotlib", "rich"]
assert not any(importlib.util.find_spec(name) for name in absent), absent
assert not {"sequoia_plan.planner", "sequoia_plan.profiler"} & sys.modules.keys()
print(generation.new_tokens)
"""


def is_for_decoding(package):
    """Whether a slim runtime has this entry of site-packages."""
    if package.split("-")[0].lower() in NOT_FOR_DECODING or package.startswith("__editable__"):
        return False
    return not package.lower().startswith(("sequoia_plan", "pytest", "_pytest", "typer"))


def test_a_slim_runtime_decodes_without_planner_packages(wheel, tmp_path):
    site = Path(importlib.util.find_spec("torch").origin).parent.parent
    packages = [entry.name for entry in site.iterdir() if is_for_decoding(entry.name)]
    result = run(environment(tmp_path / "env", wheel, packages), "-c", SLIM, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) == 12
