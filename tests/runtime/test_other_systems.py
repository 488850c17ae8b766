"""macOS and Windows as far as they can be had on Linux: without the names that they lack."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import PACKED
from streamed import save_models

SCRIPT = Path(__file__).parents[1] / "helpers" / "other_system.py"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="is a real one")]


@pytest.mark.parametrize(
    ("system", "cache", "num_refused"), [("darwin", "Library/Caches", 0), ("win32", "own", 4)]
)
def test_without_what_another_system_lacks(system, cache, num_refused, tmp_path):
    """The control is the same process before that."""
    folder = str(save_models(tmp_path, **PACKED))
    environment = os.environ | {"HOME": folder, "LOCALAPPDATA": f"{folder}/own"}
    environment.pop("XDG_CACHE_HOME", None)
    output = subprocess.check_output([sys.executable, str(SCRIPT), system, folder], env=environment)
    here, there = json.loads(output.splitlines()[-1])
    texts = here[0]
    assert texts[0] == texts[1] and here[1:] == [[], 0, f"{folder}/.cache/sequoia-plan"]
    assert there[0] == texts and len(there[1]) == num_refused
    assert there[3] == f"{folder}/{cache}/sequoia-plan"
    if system == "win32":
        assert "start a server yourself" in there[1][-1] and there[2] > 0
