"""The engine's process: its answers, its errors in one line, and its end with this program."""

import re
import signal
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import STAND_IN
from sessions import check_that_it_ends_with, has_ended, session_pids

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.driver import Driver, fill_up
from sequoia_plan.engines.engine_process import EngineProcess
from sequoia_plan.engines.plan import Drafting
from sequoia_plan.engines.vllm import VllmPool
from sequoia_plan.engines.workload import RunKind, Workload, text_before

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
    with EngineProcess(sys.executable) as engine:
        yield engine


def decode(engine, prompts, texts_before, tokens):
    arguments = {"prompts": prompts, "texts_before": texts_before, "tokens": tokens}
    return engine.ask("running", "run", **arguments)


def test_it_answers_and_ends(engine):
    info = {"version": "0.0.stand-in", "device": "cpu", "accepts_schedule": True}
    assert start(engine) == info
    prompts = ["ab", [{"role": "user", "content": "abc"}]]
    encoded, texts = engine.ask("reading", "encode", prompts=prompts)
    assert encoded == texts == [[97, 98], [97, 98, 99]]
    # the process that watches, the engine, and the engine's own child
    assert len(session_pids(engine.process.pid)) == 3
    engine.close()
    assert has_ended(engine.process.pid) and not engine.log.exists()


def test_a_run_counts_only_full_steps(engine):
    start(engine)
    run = decode(engine, [[1], [2], [3], [1]], [[], []], 20)
    steps = [step for steps in run["tokens_by_prompt"] for step in steps]
    # the first token of each of the four requests is not in the steps, and the run ends when the
    # last request is alone
    assert 3 * 20 < sum(steps) + 4 < 4 * 20
    assert len(run["step_seconds"]) == len(run["step_tokens"]) and min(run["step_seconds"]) > 0
    # two requests, one to four tokens each
    assert all(2 <= tokens <= 8 for tokens in run["step_tokens"])
    prefix = "vllm:spec_decode_num"
    assert run["counters"][f"{prefix}_drafts"] == len(steps)
    # the last step of a text may accept more tokens than it yields
    assert run["counters"][f"{prefix}_accepted_tokens"] >= sum(steps) - len(steps)
    per_position = f"{prefix}_accepted_tokens_per_pos"
    assert run["counters"][f"{per_position}[0]"] > run["counters"][f"{per_position}[2]"] > 0
    again = decode(engine, [[1]], [[]], 8)["counters"]
    assert 0 < again[f"{prefix}_drafts"] < 8  # of this run alone


def test_what_is_before_a_prompt():
    texts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert text_before(texts, 1, 12) == [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert text_before(texts, 7, 0) == []
    assert fill_up([0, 4], [1, 2, 3, 4]) == [1, 2, 0, 4]
    assert fill_up([6, 7, 8], [1, 2]) == [7, 8]


class RecordingEngine:
    """Yields a token a step; request i ends after 1 + i % 3 of them. Keeps the running prompts."""

    def __init__(self):
        self.prompts, self.num_tokens, self.running = {}, {}, []
        self.abort_request = self.has_unfinished_requests = lambda *_: False

    def add_request(self, request_id, prompt, sampling):
        self.prompts[request_id] = prompt["prompt_token_ids"]
        self.num_tokens[request_id] = 0

    def step(self):
        self.running.append(list(self.prompts.values()))
        outputs = []
        for request_id in list(self.prompts):
            self.num_tokens[request_id] += 1
            is_finished = self.num_tokens[request_id] == 1 + int(request_id) % 3
            sequence = SimpleNamespace(token_ids=[0] * self.num_tokens[request_id])
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[sequence], finished=is_finished)
            )
            if is_finished:
                del self.prompts[request_id]
        return outputs


def test_requests_that_run_together_share_no_begin():
    """A request takes the slot of one that has ended, so what is before prompts is used again."""
    driver = Driver()
    driver.engine = RecordingEngine()
    driver.llm = SimpleNamespace(get_metrics=list)
    driver.request_ids = count()
    driver.vllm = SimpleNamespace(SamplingParams=lambda **settings: settings)
    prompts = [[number] * 4 for number in range(12)]
    driver.run(prompts, [[slot] * 8 for slot in range(3)], tokens=5, drain=True)
    assert {len(prompt) for prompts in driver.engine.running for prompt in prompts} == {8}
    begins = [[prompt[0] for prompt in prompts] for prompts in driver.engine.running]
    assert all(len(set(together)) == len(together) for together in begins)
    assert {begin for together in begins for begin in together} == {0, 1, 2}
    ends = {prompt[-1] for prompts in driver.engine.running for prompt in prompts}
    assert ends == set(range(12))


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
    pattern = rf"^the engine {message} \(log: (.*\.log)\){advice}$"
    [log] = re.findall(pattern, str(caught.value))
    assert "the engine's own words" in Path(log).read_text()


def test_memory_holds_so_many_engines(monkeypatch):
    monkeypatch.setattr("sequoia_plan.engines.pool.MAX_CPU_ENGINES", 2)
    engines = VllmPool(
        target="works",
        draft=None,
        workload=Workload(["ab", "abc"], 1, tokens=8),
        python=sys.executable,
        speculative={},
        options={},
    )
    with engines:
        engines.ensure_running([Drafting(0)])  # says that it has no device
        engines.ensure_running([Drafting(0), Drafting(1)])
        assert engines.groups(map(Drafting, range(4))) == [
            [Drafting(0), Drafting(1)],
            [Drafting(2), Drafting(3)],
        ]
        first = engines.running[Drafting(0)]
        engines.ensure_running([Drafting(1), Drafting(2)])
        assert set(engines.running) == {Drafting(1), Drafting(2)}
        assert has_ended(first.process.pid)
        assert engines.run(RunKind(Drafting(2)), [0]).tokens > 0


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
    check_that_it_ends_with(script, 3, signal_number)
