"""Artifacts are declared once.

The documented tables agree, files of earlier versions load, and every declared field is checked.
"""

from __future__ import annotations

import pytest
from format_tables import TABLES, with_tables
from msgspec.structs import replace
from paths import ROOT

from sequoia_plan.artifacts import (
    Acceptance,
    Drafting,
    Latency,
    Plan,
    Profile,
    SequoiaPlanError,
    TokenTree,
    VerificationCost,
    load_tree,
    save_tree,
)
from sequoia_plan.artifacts.schema import UNDECLARED, field_specs
from sequoia_plan.planner import solve

FORMAT = ROOT / "docs" / "format.md"


def test_the_documented_tables_are_what_is_declared():
    text = FORMAT.read_text()
    assert with_tables(text) == text, "run python tools/format_tables.py docs/format.md"
    assert text.count("<!-- table ") == len(TABLES)
    assert (
        with_tables(text.replace("| `budget` |", "| `nodes` |")) == text
    )  # a table that was edited by hand is seen


@pytest.mark.parametrize("cls", [cls for cls, _ in TABLES.values()], ids=lambda cls: cls.__name__)
def test_every_field_says_what_it_means(cls):
    assert all(spec.meaning for spec in field_specs(cls) if spec.name != UNDECLARED)


def test_what_is_new_survives_and_is_left_out_where_it_says_nothing():
    verification = VerificationCost(0.001, 0.00001)
    profile = Profile(
        Acceptance.given((0.5, 0.2)),
        latency=Latency({1: 0.04}, {2: 0.004}, verification=verification),
        drafting=Drafting("block draft", 8, False, 8),
    )
    assert Profile.from_bytes(profile.to_yaml().encode(), "p") == profile
    plain_latency = Latency({1: 0.04}, {2: 0.004})
    assert "verification" not in Profile(Acceptance.given((0.5,)), latency=plain_latency).to_yaml()
    assert "drafting" not in Profile(Acceptance.given((0.5,))).to_yaml()
    plan = Plan(latency=profile.latency, drafting=profile.drafting)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan().to_dict() == {}
    assert Plan.from_dict({"budget": None, "later": [1]}).to_dict() == {"later": [1]}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("first: 8", "first: 0", "drafting.first: found 0, expected a whole number >= 1"),
        ("by_level: false", "by_level: 0", "drafting.by_level: found 0, expected true or false"),
        ("kind: block", "king: block", "drafting.kind: found None, expected text"),
        (
            "base: 0.001",
            "base: .inf",
            "latency.verification.base: found inf, expected a number >= 0",
        ),
        ("{base", "3 # {base", "latency.verification: found 3, expected a mapping"),
    ],
)
def test_what_is_new_is_checked(old, new, message):
    latency = Latency(
        {1: 0.04},
        {2: 0.004},
        verification=VerificationCost(0.001, 0.00001),
    )
    text = Profile(
        Acceptance.given((0.5,)), latency=latency, drafting=Drafting("block", 8, False)
    ).to_yaml()
    assert old in text
    with pytest.raises(SequoiaPlanError) as error:
        Profile.from_bytes(text.replace(old, new).encode(), "p.yaml")
    assert str(error.value) == f"p.yaml: {message}"


PREDICTED_TREE = solve(
    Profile(
        Acceptance.given((0.5, 0.25)), latency=Latency({1: 0.04, 8: 0.05}, {1: 0.003, 8: 0.004})
    ),
    budget=8,
    depth=4,
).tree


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"expected_tokens": 9.5},
            "plan.expected_tokens: found 9.5, its tree, acceptance and latencies give ",
        ),
        ({"step_seconds": 0.001}, "plan.step_seconds: found 0.001, its tree"),
        ({"predicted_speedup": 9.5}, "plan.predicted_speedup: found 9.5, its tree"),
        ({"upper_bound": 1.2}, "plan.upper_bound: found 1.2, the tree itself has "),
        ({"speedup_bound": 1.01}, "plan.speedup_bound: found 1.01, the tree itself has "),
        ({"latency": None}, "plan.step_seconds: found "),
        ({"acceptance": (0.6, 0.25)}, "plan.expected_tokens: found "),
    ],
)
def test_a_plan_that_promises_what_its_tree_does_not_give_is_refused(tmp_path, changed, message):
    path = tmp_path / "tree.safetensors"
    save_tree(PREDICTED_TREE, path)
    assert load_tree(path).plan == PREDICTED_TREE.plan
    save_tree(TokenTree(PREDICTED_TREE.parents, replace(PREDICTED_TREE.plan, **changed)), path)
    with pytest.raises(SequoiaPlanError) as error:
        load_tree(path)
    assert str(error.value).startswith(f"{path}: {message}") and str(error.value).endswith(
        "; solve again"
    )
