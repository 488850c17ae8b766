"""The catalog: each tree is what its script makes, loads by name, and is listed in the docs."""

import pytest
from build_catalog import build, table
from commands import succeed
from paths import ROOT

from sequoia_plan.artifacts import Profile, SequoiaPlanError, TokenTree, load_tree, save_tree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.tree_file import CATALOG, catalog, to_bytes

DOCS = ROOT / "docs"
PROFILES = {Profile.load(file).sha256 for file in (CATALOG / "profiles").glob("*.yaml")}


def test_every_tree_is_what_the_command_makes():
    made = build()
    assert sorted(made) == catalog()
    assert len(made) >= 14
    for name, tree in made.items():
        assert (CATALOG / f"{name}.safetensors").read_bytes() == to_bytes(tree), (
            f"run python tools/build_catalog.py ({name})"
        )
    assert table(made) in (DOCS / "catalog.md").read_text(), (
        "run python tools/build_catalog.py and put its table into docs/catalog.md"
    )


@pytest.mark.parametrize("name", catalog())
def test_loads_by_name_with_its_promise_and_its_profile(name):
    tree = load_tree(name)
    assert tree.plan.expected_tokens == expected_tokens(tree, tree.plan.acceptance.rates)
    assert tree.plan.profile_sha256 in PROFILES


def test_a_file_wins_and_a_wrong_name_lists_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = catalog()[0]
    assert str(load_tree(name)) in succeed("show", name).stdout
    save_tree(TokenTree.chain(3), name)
    assert load_tree(name) == TokenTree.chain(3)
    with pytest.raises(SequoiaPlanError) as error:
        load_tree("llama")
    assert str(error.value) == (
        "llama: cannot be read (No such file or directory); expected a tree file written by "
        f"sequoia-plan solve, or a tree of the catalog: {', '.join(catalog())}"
    )
