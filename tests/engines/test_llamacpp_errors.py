"""`sequoia-plan engine llamacpp`: bad input, builds that lack something, servers that die."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from paths import STAND_IN

from sequoia_plan.engines.drafting import (
    LOOKUP,
    NONE,
    Drafting,
    candidates,
    defaults,
    neighbours,
)
from sequoia_plan.engines.llamacpp import Build, ServerPool, steps_of_timings
from sequoia_plan.engines.llamacpp_plan import drafting_of, repeated
from sequoia_plan.engines.replay import ChainStep, LookupText
from sequoia_plan.engines.vllm import Workload
from sequoia_plan.planner.cli import main

SERVER = str(STAND_IN / "llama-server")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command with the stand-in in a folder with GGUF files; returns its one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("target", "draft", "dies", "breaks", "silent"):
        Path(f"{name}.gguf").write_bytes(b"GGUF")
    Path("folder").mkdir()
    Path("text.gguf").write_text("no model")

    def run(*words, target="target.gguf", draft="draft.gguf", server=SERVER, code=1):
        words = ["--target", target, *words]
        words += ["--draft", draft] if draft else []
        words += ["--server", server] if server else []
        words += ["--tokens", "8", "--limit", "2"]
        result = CliRunner().invoke(main, ["engine", "llamacpp", *words])
        assert result.exit_code == code and "Traceback" not in result.output, result.output
        return result.stderr.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"target": "none.gguf"}, [], "--target none.gguf: cannot be read (No such file"),
        ({"target": "folder"}, [], "--target folder: cannot be read (Is a directory"),
        ({"target": "text.gguf"}, [], "--target text.gguf: begins with b'no m', expected a GGUF"),
        ({"draft": "text.gguf"}, [], "--draft text.gguf: begins with"),
        ({"draft": ""}, [], "--spec-type draft-simple: needs a draft model"),
        ({}, ["--spec-type", "medusa"], "--spec-type medusa: cannot be planned; expected one of"),
        ({}, ["--server-args", "'"], "--server-args ': No closing quotation"),
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
    from sequoia_plan.engines.plan import Cell

    for spec_type in (LOOKUP, "draft-simple"):
        for drafting in candidates(spec_type, 8):
            cell = Cell(
                1, drafting.max_length, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, True, drafting.variant
            )
            assert drafting_of(cell, spec_type) == drafting


def test_neighbours_differ_in_one_setting():
    best = Drafting("draft-simple", 3, 0.5)
    others = neighbours(best, candidates("draft-simple", 8))
    assert set(others) == {
        Drafting("draft-simple", 2, 0.5),
        Drafting("draft-simple", 4, 0.5),
        Drafting("draft-simple", 3, 0.4),
        Drafting("draft-simple", 3, 0.6),
    }
    assert defaults("draft-simple") in candidates("draft-simple", 1)
    assert NONE in candidates(LOOKUP, 4)


def test_a_text_is_repeated_until_it_is_longer_than_what_a_lookup_drafts():
    text = LookupText(tuple(range(60)), tuple(range(60, 200)), 2)
    tokens = repeated(text, 24, 40)
    assert tokens == [*range(168, 200)] * 3
    longer = repeated(text, 2, 1000)
    assert len(longer) == 1000 and longer[-16:] == longer[-32:-16] == [*range(184, 200)]
    assert repeated(LookupText((1, 2, 3), (4, 5), 2), 2, 0) == [5, *[1, 2, 3, 4, 5] * 3] * 3


def test_what_comes_before_a_prompt_is_of_the_other_half_and_the_same_for_all():
    """A prompt that came twice would be looked up, and a server has the same begin in its cache."""
    pool = ServerPool(Build("", "", "", False), "t", None, Workload([]), max_context=10)
    pool.prompts = [[10, 11], [20, 21, 22], [30], [40, 41]]
    pool.texts = [[10], [20, 21], [30], [40]]
    assert pool.prompt(1) == [20, 21, 22]
    assert pool.prompt(0, 6) == [30, 40, 30, 40, 10, 11]
    assert pool.prompt(1, 6) == [30, 40, 30, 20, 21, 22]
    assert pool.prompt(2, 6) == [10, 20, 21, 10, 20, 30]
    assert pool.prompt(1, 2) == [21, 22]
