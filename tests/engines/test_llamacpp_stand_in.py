"""`sequoia-plan engine llamacpp` with a stand-in: plans, bad input, servers that die."""

import pytest
from click.testing import CliRunner
from paths import STAND_IN

from sequoia_plan.engines.chain_replay import ChainStep, LookupText
from sequoia_plan.engines.llama_server import Build, steps_of_timings
from sequoia_plan.engines.llamacpp import LlamaCppPool, repeated
from sequoia_plan.engines.plan import Cell, EnginePlan
from sequoia_plan.engines.planning import neighbours
from sequoia_plan.engines.spec_types import LOOKUP, candidates, default_drafting
from sequoia_plan.engines.workload import NONE, Drafting, Workload
from sequoia_plan.planner.cli import main

pytestmark = pytest.mark.slow

SERVER = str(STAND_IN / "llama-server")


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs the command with the stand-in in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def invoke(*words, draft="draft.gguf"):
        words = ["--target", "target.gguf", "--server", SERVER, *words]
        words += ["--draft", draft] if draft else []
        return CliRunner().invoke(main, ["engine", "llamacpp", "--limit", "4", *words])

    return invoke


@pytest.mark.parametrize("spec_type", ["draft-simple", "draft-eagle3", LOOKUP])
def test_the_plan_of_a_type(invoke, spec_type):
    """The stand-in's steps take 5 ms, 1.5 more for each drafted token."""
    words = ["--spec-type", spec_type, "--most", "4", "--tokens", "90", "--context", "300,100"]
    draft = None if spec_type == LOOKUP else "draft.gguf"
    result = invoke(*words, "--verify", "-o", "plan.yaml", draft=draft)
    assert result.exit_code == 0, result.output
    plan = EnginePlan.load("plan.yaml")
    assert (plan.engine, plan.engine_version) == ("llamacpp", "1 (stand-in)")
    assert plan.method == spec_type and [part.context for part in plan.contexts] == [100, 300]
    for part in plan.contexts:
        assert f"4 prompts of {part.context} tokens" == part.acceptance.source
        for step in part.steps:
            assert step.seconds == pytest.approx(0.005 + 0.0015 * step.speculative_tokens)
        verified = [cell for cell in part.cells if cell.measured]
        drafted = {Drafting.of(cell) for cell in verified}
        best = Drafting.of(part.best_cell(1))
        assert {NONE, best, default_drafting(plan.method)} <= drafted
        if spec_type == "draft-simple":
            assert part.draft_pass_seconds == pytest.approx(0.00025, rel=0.02)
            assert best.length and part.lines[0] in result.stdout
            assert f"--spec-draft-n-max {best.length} " in part.lines[0]
            for cell in verified:  # chains do not depend on where they begin
                assert cell.throughput == pytest.approx(cell.measured.throughput, rel=0.25)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--spec-type", "medusa"], 2, "'medusa' is not one of 'draft-simple', 'draft-eagle3'"),
        (["--server", "nowhere"], 1, "--server nowhere: no such program; build llama.cpp"),
        (
            ["--target", "dies.gguf"],
            1,
            "died with exit code 1 while starting: llama_model_load:",
        ),
        (["--target", "breaks.gguf"], 1, "the engine died with exit code 3 while answering /comp"),
        (["--target", "silent.gguf"], 1, "log has fewer drafted tokens than its timings"),
        (["--server-args", "'"], 2, "'--server-args': No closing quotation"),
    ],
)
def test_a_failure_is_one_line(invoke, words, code, message):
    result = invoke("--tokens", "8", *words)
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    assert message in result.stderr.strip().splitlines()[-1]


def test_a_type_that_needs_a_draft(invoke):
    assert "--spec-type draft-simple: needs a draft model" in invoke(draft="").stderr


def test_steps_from_timings():
    timings = [
        {"predicted_n": 1, "predicted_ms": 0.001},
        {"predicted_n": 2, "predicted_ms": 10.0, "draft_n": 3, "draft_n_accepted": 1},
        {"predicted_n": 3, "predicted_ms": 10.0, "draft_n": 3, "draft_n_accepted": 1},
        # a step whose only token was part of a character, and the next one
        {"predicted_n": 6, "predicted_ms": 30.0, "draft_n": 9, "draft_n_accepted": 2},
        {},
        {"predicted_n": 7, "predicted_ms": 36.0, "draft_n": 9, "draft_n_accepted": 2},
    ]
    first, merged, plain = steps_of_timings(timings)
    assert first == ChainStep(3, 1, 2, seconds=first.seconds)
    assert first.seconds == pytest.approx(0.009999)
    assert merged == ChainStep(6, 1, 3, seconds=merged.seconds, is_single=False)
    assert plain == ChainStep(0, 0, 1, seconds=plain.seconds)


def test_a_cell_names_its_way_of_drafting():
    for spec_type in (LOOKUP, "draft-simple"):
        for drafting in candidates(spec_type, 8):
            figures = (1.0,) * 6
            cell = Cell(1, drafting.length, *figures, True, drafting.variant)
            assert Drafting.of(cell) == drafting


def test_neighbours_differ_in_one_setting():
    near = neighbours(Drafting(3, 0.5), candidates("draft-simple", 8))
    assert set(near) == {Drafting(2, 0.5), Drafting(4, 0.5), Drafting(3, 0.4), Drafting(3, 0.6)}
    assert Drafting(3) in candidates("draft-simple", 1) and NONE in candidates(LOOKUP, 4)


def test_a_text_is_repeated_until_it_is_longer_than_what_a_lookup_drafts():
    text = LookupText(range(60), range(60, 200), 2)
    assert repeated(text, 24, 40) == [*range(168, 200)] * 3
    assert repeated(text, 2, 100) == ([*range(184, 200)] * 7)[-100:]
    assert repeated(LookupText((1, 2, 3), (4, 5), 2), 2, 0) == [5, *[1, 2, 3, 4, 5] * 3] * 3


def test_what_comes_before_a_prompt_is_of_the_other_half_and_the_same_for_all():
    """A prompt that came twice would be looked up, and a server has the same begin in its cache."""
    pool = LlamaCppPool(
        target="t",
        draft=None,
        workload=Workload([""] * 4, 2),
        max_context=10,
        build=Build("", "", False),
        spec_type=LOOKUP,
    )
    pool.prompts = [[10, 11], [20, 21, 22], [30], [40, 41]]
    pool.texts = [[10], [20, 21], [30], [40]]
    assert [pool.prompt(1), pool.prompt(1, 2)] == [[20, 21, 22], [21, 22]]
    assert pool.prompt(0, 6) == [30, 40, 30, 40, 10, 11]
    assert pool.prompt(2, 6) == [10, 20, 21, 10, 20, 30]
