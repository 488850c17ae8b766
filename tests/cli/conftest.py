"""What the tests of commands share."""

import pytest
from commands import PROFILE, call

from sequoia_plan.artifacts import TokenTree, save_tree


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder that holds a profile and a tree."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.yaml")
    save_tree(TokenTree([-1, 0, 0, 1], {"acceptance": [0.5, 0.2]}), "tree.safetensors")
    return call
