"""What the tests of commands share."""

import pytest
from click.testing import CliRunner

from sequoia_plan.artifacts import TokenTree, save_tree
from sequoia_plan.planner.cli import main


@pytest.fixture
def run(request, tmp_path, monkeypatch):
    """Runs a command in a folder that holds the module's PROFILE and a tree."""
    monkeypatch.chdir(tmp_path)
    request.module.PROFILE.save("profile.yaml")
    save_tree(TokenTree([-1, 0, 0, 1], {"acceptance": [0.5, 0.2]}), "tree.safetensors")
    return lambda *arguments, **options: CliRunner().invoke(main, arguments, **options)
