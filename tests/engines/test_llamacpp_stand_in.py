"""`sequoia-plan diagnose llamacpp` and `--url` with a stand-in: plans, and faults of servers."""

import subprocess
from pathlib import Path

import pytest
from commands import call, engine_plan, refused
from paths import STAND_IN
from sessions import session_pids

from sequoia_plan.engines import llama_server, llamacpp
from sequoia_plan.engines.chain_replay import ChainStep
from sequoia_plan.engines.llama_server import Timings, steps_of_timings
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import NONE
from sequoia_plan.engines.pool import Workload
from sequoia_plan.engines.spec_types import is_recurrent, type_of_files

pytestmark = pytest.mark.slow

SERVER = str(STAND_IN / "llama-server")
EAGLE3 = b"GGUF general.architecture\x08\0\0\0\x06\0\0\0\0\0\0\0eagle3"


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs the command with the stand-in in a folder of files that stand for models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llama_server, "LOG_SECONDS", 0)  # the stand-in logs before it answers
    monkeypatch.setattr(llama_server, "END_SECONDS", 0.5)
    monkeypatch.setattr(llamacpp, "TIMING_ROUNDS", 3)
    for name in ("target", "draft", "dies", "breaks", "unpaired", "memory", "hangs"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    (tmp_path / "eagle3.gguf").write_bytes(EAGLE3)
    (tmp_path / "mtp.gguf").write_bytes(b"GGUF x.nextn_predict_layers x.ssm.conv_kernel")

    def invoke(*words, server=SERVER):
        words = ["--server", server, "--limit", "3", "--tokens", "32", "--most", "3", *words]
        return call("diagnose", "llamacpp", *words)

    return invoke


@pytest.mark.parametrize(
    "words",
    [
        "-m target.gguf",
        "-m target.gguf -md draft.gguf --spec-type draft-simple,ngram-mod",
        "-m target.gguf -md eagle3.gguf",
        "-m mtp.gguf --context 100,300",
    ],
)
def test_a_diagnosis(invoke, words):
    """The stand-in's steps take 5 ms, 1.5 more for each drafted token, and .5 for a last pass."""
    result = invoke(*words.split(), "--verify", "--json", "--report", "page.html")
    assert result.exit_code == 0, result.output
    plan = engine_plan(result)
    assert (plan.engine, plan.engine_version) == ("llamacpp", "1 (stand-in)")
    assert [part.context for part in plan.contexts] == ([100, 300] if "context" in words else [0])
    html = Path("page.html").read_text()
    for part in plan.contexts:
        for step in part.steps:
            assert step.seconds == pytest.approx(0.005 + 0.0015 * step.speculative_tokens, rel=0.02)
        for tokens, seconds in part.target_seconds.items():
            assert seconds == pytest.approx(0.0035 + 0.0015 * tokens)
        assert len(part.tree) == (0 if words == "-m target.gguf" else 2)
        verified = [cell for cell in part.cells if cell.measured]
        assert NONE in {cell.drafting for cell in verified} and part.bounds
        assert any(cell.drafting.lookup_size for cell in verified)
        if "simple" in words:
            assert {cell.drafting.types for cell in part.cells} == {"", "ngram-mod"}
            assert max(part.changes.values()) > part.best_cell(1).throughput * 0.9
            for cell in verified:  # chains do not depend on where they begin
                if cell.drafting.is_chain:
                    assert cell.throughput == pytest.approx(cell.measured.throughput, rel=0.25)
        assert all(line in html for line in part.lines)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        *(
            (f"-m target.gguf {words}", 2, ": expected one type of a draft at most, which goes w")
            for words in (
                "--spec-type draft-simple",
                "-md draft.gguf --spec-type draft-mtp",
                "-md draft.gguf --spec-type draft-simple,draft-eagle3",
            )
        ),
        ("-m target.gguf --spec-type medusa", 1, "unknown speculative type: medusa"),
        ("-m dies.gguf", 1, "died with exit code 1 while starting: llama_model_load:"),
        ("-m breaks.gguf", 1, "the engine died with exit code 3 while answering /comp"),
        ("-m memory.gguf", 1, "not enough memory: a shorter context (-c"),
        ("-m hangs.gguf", 1, "it hangs: see whether it answers /completion at all"),
        ("-m unpaired.gguf -md draft.gguf", 1, "the draft does not pair with this target: take"),
        ("-m target.gguf --server-args --bad", 1, "has no such option: build a newer one"),
        ("-m target.gguf --server-args '", 2, "'--server-args': No closing quotation"),
        ("-m none.gguf", 1, "none.gguf: No such file or directory"),
    ],
)
def test_a_fault_is_one_line_and_nothing_runs_on(invoke, monkeypatch, words, code, message):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(llama_server, "ANSWER_SECONDS", 1)
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    refused(invoke(*words.split()), code, message)
    assert not any(session_pids(process.pid) for process in [*started])


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("nowhere", "--server nowhere: no such program; build llama.cpp"),
        ("./old", "--spec-type; this llama-server has no such option: build a newer one"),
        ("./foreign", "exit code -4: it printed nothing; it was built for another processor:"),
    ],
)
def test_a_server_that_cannot_be_used(invoke, server, message):
    for name in ("old", "foreign"):
        Path(name).symlink_to(SERVER)
    assert message in invoke("-m", "target.gguf", server=server).stderr


def test_the_type_that_a_draft_names(invoke):
    types = [type_of_files("target.gguf", draft) for draft in (None, "draft.gguf", "eagle3.gguf")]
    assert types == ["none", "draft-simple", "draft-eagle3"]
    assert type_of_files("mtp.gguf", None) == "draft-mtp"
    assert is_recurrent("mtp.gguf") and not is_recurrent("target.gguf")


def test_steps_from_timings():
    timings = [
        Timings(0.001, 1),
        Timings(10.0, 3, 3, 1),
        # a step whose only token was part of a character, and the next one
        Timings(30.0, 6, 9, 2),
        Timings(36.0, 7, 9, 2),
    ]
    first, merged, plain = steps_of_timings(timings)
    assert first == ChainStep(3, 1, 2, seconds=first.seconds)
    assert first.seconds == pytest.approx(0.009999)
    assert merged == ChainStep(6, 1, 3, seconds=merged.seconds, is_single=False)
    assert plain == ChainStep(0, 0, 1, seconds=plain.seconds)


def test_what_comes_before_a_prompt_is_of_the_other_half_and_the_same_for_all():
    """A prompt that came twice would be looked up, and a server has the same begin in its cache."""
    workload = Workload([""] * 4, 2)
    pool = LlamaCppPool(target="t", draft=None, workload=workload, max_length=3, build=None)
    pool.prompts = [[10, 11], [20, 21, 22], [30], [40, 41]]
    assert pool.prompt(1, 2) == [21, 22]
    assert pool.prompt(0, 6) == [30, 40, 41, 30, 10, 11]
    assert pool.prompt(2, 6) == [10, 11, 20, 21, 22, 30]
