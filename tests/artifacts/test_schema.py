"""Artifacts are declared once: the documented tables agree, and contradictions are refused."""

import pytest
from format_tables import FILES, with_tables
from paths import ROOT
from refusals import refusal

from sequoia_plan.artifacts import Acceptance, Drafting, Latency, Plan, Profile
from sequoia_plan.artifacts.yaml_text import load

FORMAT = ROOT / "docs" / "format.md"
PROFILE = Profile(
    Acceptance.given((0.5, 0.2)),
    latency=Latency({1: 0.04, 8: 0.05}, {2: 0.004}, 0.001, 128),
    drafting=Drafting("block draft", 8, False, 8),
    models={"target": {"name": "t"}},
)


def test_the_documented_tables_are_what_is_declared():
    text = FORMAT.read_text()
    assert with_tables(text) == text, "run python tools/format_tables.py docs/format.md"
    assert text.count("<!-- table ") == len(FILES)
    assert "|  |" not in text, "a field without its meaning"
    edited = text.replace("| `budget` |", "| `nodes` |")
    assert edited != text == with_tables(edited)  # a table that was edited by hand is seen


def test_what_has_its_default_is_not_written():
    assert Profile.from_bytes(PROFILE.to_yaml().encode(), "p") == PROFILE
    assert "drafting" not in Profile(Acceptance.given((0.5,))).to_yaml()
    plan = Plan(latency=PROFILE.latency, drafting=PROFILE.drafting)
    assert Plan.from_dict(plan.to_dict(), "plan") == plan
    assert Plan.from_dict({"budget": None, "of a later version": 1}, "plan") == Plan()
    assert Plan().to_dict() == {}
    assert Plan(upper_bound=float("2.5"), speedup_by_kind={}).to_dict() == {"upper_bound": 2.5}


def test_profiles_of_copies_that_shared_the_targets_cache_load():
    """Their trees decode; the placement of the draft, which they record, is another one."""
    text = PROFILE.to_yaml().replace("drafts_by_level: false", "drafts_by_level: true")
    text = text.replace("draft_type: block", "shares_cache: true, draft_type: self")
    assert Profile.from_bytes(text.encode(), "p").drafting == Drafting("self draft", 8, True, 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("first_width: 8", "first_width: 0", "first_width: expected `int` >= 1; docs"),
        ("draft_type: block", "kind: block", "drafting: object missing .* `draft_type`"),
        ("overhead: 0.001", "overhead: 1e999", "latency: expected .* finite numbers"),
        ("1: 0.04,", "3: 0.04,", "no measurement of the target at 1 token"),
        ("1: 0.04,", "1: 0.04, 1: 0.05,", "at line .*key 1 occurs twice; keep one"),
        ("context: 128", "context: 2:08", "latency.context: expected `int`, got `str`"),
        ("name: t", r'name: "\e[2J"', "models: expected printable text"),
        ("name: t", "name: " + 20 * "[" + 20 * "]", "models: .* at most 16 levels deep"),
        ("{name: t}", "&t {name: t}\n  draft: *t", "at line .*neither aliases nor tags"),
        *(
            ("version: 1", f"version: {x}", f"found format .*, version {x.title()}, .*, version 1")
            for x in ("2", "true", "1.0")
        ),
        ("[0.5, 0.2]", "[0.9, 0.2]", "acceptance: acceptance: found .* the sum 1.1"),
        ("[0.5, 0.2]", "[{trials: 9, counts: [10]}]", r"acceptance: counts\[0\]: found .* 10 of 9"),
    ],
)
def test_profiles_are_checked(old, new, message):
    text = PROFILE.to_yaml()
    assert old in text
    with refusal(f"^p.yaml: .*{message}") as error:
        Profile.from_bytes(text.replace(old, new, 1).encode(), "p.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"- " * 100_000, b"{a: " * 100_000, b"9" * 9999, b"\xff", b"? {}\n"]
)
def test_yaml_that_no_reader_can_hold(content):
    with refusal(r"f: cannot be read as YAML.*; expected a profile"):
        load(content, "f", "a profile")


def test_numbers_are_read_as_people_mean_them():
    text = b"[1e-5, .5, 5., 010, -0, +8, 1:30, 0x1f, 1_000, 2001-01-01, .nan, yes, null]"
    assert load(text, "f", "a list") == [
        *(1e-5, 0.5, 5.0, 10, 0, 8),
        *("1:30", "0x1f", "1_000", "2001-01-01", ".nan", True, None),
    ]
