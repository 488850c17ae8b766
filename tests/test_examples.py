"""The scripts in examples/ run as they are, with the embedded pair; so do the notebook's cells.

Arguments make them short. Each script is run in this process but the first, which takes none.
"""

import json
import re
import runpy
import subprocess
import sys

import pytest
from paths import ROOT

from sequoia_plan.artifacts import load_tree

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples"
NOTEBOOK = FOLDER / "story.ipynb"
SHORT = {
    "num_prompts": 3,
    "tokens": 6,
    "latency_seconds": 0,
    "max_size": 3,
    "num_held_out": 2,
    "held_out_tokens": 8,
}
"""What the notebook's first cell of code sets, made short."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function: what a script prints, run with arguments in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_decode_in_ten_lines(tmp_path):
    script = FOLDER / "decode.py"
    assert len([line for line in script.read_text().splitlines()[1:] if line.strip()]) <= 10
    process = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Paris" in process.stdout
    tokens, steps = map(int, re.findall(r"(\d+) tokens in (\d+) passes", process.stdout)[0])
    assert 0 < steps < tokens  # the draft's tokens are accepted


def test_own_models(run):
    short = ("--num-prompts", "2", "--tokens", "6", "--seconds", "0", "--max-size", "3")
    printed = run("own_models.py", *short, "-o", "own.safetensors")
    tree = load_tree("own.safetensors")
    assert tree.plan.models["target"]["name"] == "SmolLM2-135M-Instruct"
    assert 1 <= tree.size <= 3
    assert f"predicted {tree.plan.predicted_speedup:.2f}x" in printed


def test_transformers_generate_has_the_same_tokens_with_the_tree(run):
    printed = run("transformers_generate.py", "--tokens", "16", "--dtype", "float32")
    names, texts = printed.splitlines()[::2], printed.splitlines()[1::2]
    assert [name.partition(":")[0] for name in names] == ["generate alone", "with the tree"]
    assert texts[0] == texts[1] and len(texts[0]) > 16


def test_stream_a_target_that_does_not_fit(run):
    printed = run("stream.py", "--tokens", "8")
    resident, layers = map(int, re.findall(r"(\d+) of (\d+) layers stay", printed)[0])
    assert 0 < resident < layers
    passes = dict(re.findall(r"(\w+): .*, (\d+) passes", printed))
    assert int(passes["tree"]) < int(passes["plain"]) == 8


def test_the_notebook_runs(pair, monkeypatch, capsys):
    """Every cell in order, without Jupyter; the parameters of the first are made short."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr("sequoia_plan.runtime.load_pair", lambda dtype: pair)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    parameters, *cells = code
    names = {}
    exec(parameters, names)
    assert names.keys() >= SHORT.keys()
    names |= SHORT
    pyplot.close("all")
    for source in cells:
        exec(source, names)
    pictures = [pyplot.figure(number).axes for number in pyplot.get_fignums()]
    pyplot.close("all")
    assert len(pictures) == 4
    predicted, _, measured = pictures[3][0].lines
    assert predicted.get_ydata()[0] == names["promised"]
    assert len(measured.get_ydata()) == 2
    assert "2 of 2 texts are the same" in capsys.readouterr().out  # the pair is in float32
