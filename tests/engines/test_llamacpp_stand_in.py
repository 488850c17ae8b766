"""`sequoia-plan engine llamacpp` with a stand-in: plans, bad input, servers that die."""

from __future__ import annotations

from pathlib import Path

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
    """Runs the command with the stand-in in a folder with GGUF files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("target", "draft", "dies", "breaks", "silent"):
        Path(f"{name}.gguf").write_bytes(b"GGUF")
    Path("folder").mkdir()
    Path("text.gguf").write_text("no model")

    def invoke(*words, target="target.gguf", draft="draft.gguf", server=SERVER):
        words = ["--target", target, "--server", server, *words]
        words += ["--draft", draft] if draft else []
        return CliRunner().invoke(main, ["engine", "llamacpp", "--limit", "4", *words])

    return invoke


@pytest.fixture
def run(invoke):
    """Runs the command, which fails; returns its one line."""

    def run(*words, code=1, **files):
        result = invoke("--tokens", "8", *words, **files)
        assert result.exit_code == code and "Traceback" not in result.output, result.output
        return result.stderr.strip().splitlines()[-1]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("spec_type", ["draft-simple", "eagle3", LOOKUP])
def test_the_plan_of_a_type(invoke, spec_type):
    """The stand-in's steps take 5 ms, 1.5 more for each drafted token."""
    words = ["--spec-type", spec_type, "--most", "4", "--tokens", "90", "--context", "300,100"]
    result = invoke(*words, "--verify", "-o", "plan.yaml")
    assert result.exit_code == 0, result.output
    plan = EnginePlan.load("plan.yaml")
    assert (plan.engine, plan.engine_version) == ("llamacpp", "1 (stand-in)")
    assert plan.method.endswith(spec_type) and [part.context for part in plan.contexts] == [
        100,
        300,
    ]
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
    ("options", "words", "message"),
    [
        ({"target": "none.gguf"}, [], "--target none.gguf: cannot be read (No such file"),
        ({"target": "folder"}, [], "--target folder: cannot be read (Is a directory"),
        ({"target": "text.gguf"}, [], "--target text.gguf: begins with b'no m'; expected a GGUF"),
        ({"draft": "text.gguf"}, [], "--draft text.gguf: begins with"),
        ({"draft": ""}, [], "--spec-type draft-simple: needs a draft model"),
        ({}, ["--spec-type", "medusa"], "'--spec-type': 'medusa' is not one of"),
        ({}, ["--server-args", "'"], "'--server-args': No closing quotation"),
    ],
)
def test_bad_input_is_one_line(run, options, words, message):
    assert message in run(*words, **options, code=2 if message.startswith("--s") else 1)


def test_a_program_that_is_not_there(run):
    assert "--server nowhere: no such program; build llama.cpp" in run(server="nowhere")


@pytest.mark.parametrize(
    ("lacks", "words", "missing"),
    [
        ("--spec-type", [], "this build has no --spec-type;"),
        ("--spec-draft-p-min", [], "this build has no --spec-draft-p-min;"),
        ("--spec-ngram-simple", ["--spec-type", LOOKUP], "has no --spec-ngram-simple-size-n;"),
        ("-", ["--spec-type", "mtp"], "this build has no --spec-type mtp;"),
    ],
)
def test_a_build_that_lacks_an_option_is_one_line(run, monkeypatch, lacks, words, missing):
    monkeypatch.setenv("LACKS", lacks if lacks != "-" else "no option")
    assert missing in run(*words)


def test_a_server_that_dies_while_it_loads(run):
    message = run(target="dies.gguf")
    assert "the engine died with exit code 1 while starting: " in message
    assert "error loading model: wrong magic; its options are set by --server-args" in message


def test_a_server_that_dies_in_the_middle_of_a_text(run):
    message = run(target="breaks.gguf")
    assert "the engine died with exit code 3 while " in message
    assert "error: out of memory; set a smaller context with --server-args" in message


def test_a_context_that_a_server_has_no_room_for(run):
    message = run("--context", "300,900", "--server-args", "-c 1000", code=2)
    assert "--context 900: needs a server with a context of 1420 tokens, this one has 1" in message


def test_a_build_with_another_log_is_one_line(run):
    assert "its debug log has fewer drafted tokens than its timings" in run(target="silent.gguf")


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
    text = LookupText(tuple(range(60)), tuple(range(60, 200)), 2)
    tokens = repeated(text, 24, 40)
    assert tokens == [*range(168, 200)] * 3
    longer = repeated(text, 2, 1000)
    assert len(longer) == 1000 and longer[-16:] == longer[-32:-16] == [*range(184, 200)]
    assert repeated(LookupText((1, 2, 3), (4, 5), 2), 2, 0) == [5, *[1, 2, 3, 4, 5] * 3] * 3


def test_what_comes_before_a_prompt_is_of_the_other_half_and_the_same_for_all():
    """A prompt that came twice would be looked up, and a server has the same begin in its cache."""
    pool = LlamaCppPool(
        target="t",
        draft=None,
        workload=Workload([""] * 4, 2),
        max_context=10,
        build=Build("", "", LOOKUP, frozenset(), False),
    )
    pool.prompts = [[10, 11], [20, 21, 22], [30], [40, 41]]
    pool.texts = [[10], [20, 21], [30], [40]]
    assert pool.prompt(1) == [20, 21, 22]
    assert pool.prompt(0, 6) == [30, 40, 30, 40, 10, 11]
    assert pool.prompt(1, 6) == [30, 40, 30, 20, 21, 22]
    assert pool.prompt(2, 6) == [10, 20, 21, 10, 20, 30]
    assert pool.prompt(1, 2) == [21, 22]
