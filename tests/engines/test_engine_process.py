"""The engine's process: its answers, its errors in one line, and its end with this program."""

import re
import signal
import sys
from pathlib import Path

import pytest
from paths import STAND_IN
from refusals import refusal
from sessions import check_that_it_ends_with, has_ended, session_pids

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.engine_process import EngineProcess
from sequoia_plan.engines.plan import Drafting
from sequoia_plan.engines.pool import RunKind, Workload
from sequoia_plan.engines.vllm import VllmPool

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def has_the_stand_in(monkeypatch):
    """This Python has the stand-in for vLLM."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))


def start(engine, model="works"):
    speculative = {"num_speculative_tokens": 3}
    return engine.ask("starting", "start", model=model, speculative=speculative, options={})


@pytest.fixture
def engine():
    engine = EngineProcess(sys.executable)
    yield engine
    engine.close()


def decode(engine, prompts, texts_before, tokens, **options):
    arguments = {"prompts": prompts, "texts_before": texts_before, "tokens": tokens, **options}
    return engine.ask("running", "run", **arguments)


def test_it_answers_and_ends(engine):
    assert start(engine) == ["0.0.stand-in", "cpu"]
    prompts = ["ab", [{"role": "user", "content": "abc"}]]
    assert engine.ask("reading", "encode", prompts=prompts) == [[97, 98], [97, 98, 99]]
    # the process that watches, the engine, and the engine's own child
    assert len(session_pids(engine.process.pid)) == 3
    engine.close()
    assert has_ended(engine.process.pid) and not engine.log.exists()


def test_a_run_counts_only_full_steps(engine):
    start(engine)
    run = decode(engine, [[1], [2], [3], [4]], [[], []], 20)
    steps = [step for steps in run["tokens_by_prompt"] for step in steps]
    # all tokens but the first one of each text are in steps, of which those of a request that is
    # alone are not full
    assert sum(steps) == 4 * 19
    assert sum(tokens for _, tokens in run["steps"]) < sum(steps)
    # two requests, one to four tokens each
    assert all(2 <= tokens <= 8 and seconds > 0 for seconds, tokens in run["steps"])
    prefix = "vllm:spec_decode_num"
    assert run["counters"][f"{prefix}_drafts"] == len(steps)
    # the last step of a text may accept more tokens than it yields
    assert run["counters"][f"{prefix}_accepted_tokens"] >= sum(steps) - len(steps)
    again = decode(engine, [[1]], [[]], 80, steps=3)
    assert len(again["steps"]) == again["counters"][f"{prefix}_drafts"] == 3  # of this run alone


def test_requests_that_run_together_share_no_begin(engine):
    """The stand-in refuses those that do; a request takes the slot of one that has ended."""
    start(engine, "strict")
    decode(engine, [[9]] * 12, [[slot] * 8 for slot in range(3)], 7)
    with refusal("share their begin"):
        decode(engine, [[9]] * 2, [[], []], 7)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "wrong vocabulary",
            "failed while starting: ValidationError: Value error, Target and draft model should "
            r"have the same vocabulary size\.",
        ),
        ("broken", "failed while starting: RuntimeError: Engine core initialization failed.*"),
        ("dies", "died with exit code -11 while running: this line is no answer .*"),
    ],
)
def test_a_failure_is_one_line_and_leaves_its_log(engine, model, message):
    """Also of an engine that dies, whose child dies with it."""

    def start_and_decode():
        start(engine, model)
        decode(engine, [[1]], [[]], 4)

    with pytest.raises(SequoiaPlanError) as caught:
        start_and_decode()
    assert model != "dies" or has_ended(engine.process.pid)  # before this program closes it
    engine.close()
    advice = "; the draft does not pair .*" * (model == "wrong vocabulary")
    [log] = re.findall(rf"^the engine {message} \(log: (.*\.log)\){advice}$", str(caught.value))
    assert "the engine's own words" in Path(log).read_text()


def test_memory_holds_so_many_engines(monkeypatch):
    monkeypatch.setattr("sequoia_plan.engines.vllm.MAX_CPU_ENGINES", 2)
    engines = VllmPool(
        target="works",
        draft=None,
        workload=Workload(["ab", "cd", "ef"], 2, tokens=8),
        max_length=3,
        python=sys.executable,
        speculative={},
        options={},
    )
    kinds = [RunKind(Drafting(length)) for length in range(3)]
    order = []
    with engines:
        engines.ensure_running([Drafting(1)])
        first = engines.running[Drafting(1)]
        assert engines.most_running() == 2  # it says that it has no device
        engines.run_in_rounds(kinds, lambda kind, i: order.append((kind.drafting.length, i)), 2)
        assert {*engines.running} == {Drafting(2)} and has_ended(first.process.pid)
        assert engines.run(kinds[2], [0]).tokens > 0
    # those that run come first, and every second round goes the other way
    assert order == [(0, 0), (1, 0), (1, 1), (0, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_engine_never_outlives_the_program(signal_number):
    """Whatever ends the program, the engine and its child end, also while the engine works."""
    script = (
        "import signal, sys; sys.path[:0] = ['tests/engines', 'tests/helpers']\n"
        # a shell's background jobs ignore SIGINT, and so would this program
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from test_engine_process import EngineProcess, decode, start\n"
        "engine = EngineProcess(sys.executable); start(engine)\n"
        "print(engine.process.pid, flush=True); decode(engine, [[1]], [[]], 10**6)\n"
    )
    check_that_it_ends_with(script, signal_number)
