"""The engine's process: its answers, its errors in one line, and its end with this program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT, STAND_IN
from sessions import has_ended, session_pids

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.driver import Driver
from sequoia_plan.engines.engine_process import EngineProcess
from sequoia_plan.engines.vllm import VllmPool
from sequoia_plan.engines.workload import (
    Drafting,
    RunKind,
    Workload,
    text_before,
    with_text_before,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def logs_go_with_the_test(tmp_path, monkeypatch):
    """An engine that fails leaves its log in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def this_python_has_the_stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))


def start_engine(model="works", length=3):
    engine = EngineProcess(sys.executable, hints=[("vocab", "use another draft"), ("", "see")])
    speculative = {"num_speculative_tokens": length} if length else None
    engine.send("start", model=model, speculative=speculative, options={"max_num_seqs": 4})
    return engine


def test_it_answers_and_ends():
    with start_engine() as engine:
        info = engine.receive("starting")
        assert (info["version"], info["device"]) == ("0.0.stand-in", "cpu")
        assert info["accepts_schedule"] is True
        prompts = ["ab", [{"role": "user", "content": "abc"}]]
        encoded = engine.ask("reading", "encode", prompts=prompts)
        assert encoded["prompts"] == encoded["texts"] == [[97, 98], [97, 98, 99]]
        # the process that watches, the engine, and the engine's own child
        assert len(session_pids(engine.process.pid)) == 3
    assert has_ended(engine.process.pid)


def decode(engine, prompts, texts_before, tokens, drain=False):
    arguments = {"prompts": prompts, "texts_before": texts_before, "tokens": tokens, "drain": drain}
    return engine.ask("running", "run", **arguments)


def test_a_run_counts_only_full_steps():
    with start_engine() as engine:
        engine.receive("starting")
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


def test_every_prompt_of_a_run_has_the_context():
    prompts = [[1], [2, 3], [4] * 90]
    with start_engine() as engine:
        engine.receive("starting")
        for before, expected in (([], 1 + 2 + 90), ([9] * 50, 3 * 50)):
            run = decode(engine, prompts, [before, before], 8, drain=True)
            assert run["counters"]["vllm:spec_decode_num_prompt_tokens"] == expected


def test_what_is_before_a_prompt():
    texts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert text_before(texts, 0, 12) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert text_before(texts, 1, 7) == [4, 5, 6, 7, 8, 9, 1]
    assert text_before(texts, 7, 0) == []
    assert with_text_before([0, 4], [1, 2, 3, 4]) == [1, 2, 0, 4]
    assert with_text_before([6, 7, 8], [1, 2]) == [7, 8]
    assert with_text_before([6, 7, 8], []) == [6, 7, 8]


class RecordingEngine:
    """Yields a token a step; request i ends after 1 + i % 3 of them. Keeps the running prompts."""

    def __init__(self):
        self.prompts, self.num_tokens, self.running = {}, {}, []

    def add_request(self, request_id, prompt, sampling):
        self.prompts[request_id] = prompt["prompt_token_ids"]
        self.num_tokens[request_id] = 0

    def step(self):
        self.running.append(list(self.prompts.values()))
        outputs = []
        for request_id in list(self.prompts):
            self.num_tokens[request_id] += 1
            is_finished = self.num_tokens[request_id] == 1 + int(request_id) % 3
            token_ids = [0] * self.num_tokens[request_id]
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    outputs=[SimpleNamespace(token_ids=token_ids)],
                    finished=is_finished,
                )
            )
            if is_finished:
                del self.prompts[request_id]
        return outputs

    def abort_request(self, request_ids):
        pass

    def has_unfinished_requests(self):
        return False


def test_requests_that_run_together_share_no_begin():
    """A request takes the slot of one that has ended, so what is before prompts is used again."""
    driver = Driver()
    driver.engine = RecordingEngine()
    driver.llm = SimpleNamespace(get_metrics=list)
    driver.num_requests = 0
    driver.vllm = SimpleNamespace(SamplingParams=lambda **settings: settings)
    prompts = [[number] * 4 for number in range(12)]
    driver.run(prompts, [[slot] * 8 for slot in range(3)], tokens=5, drain=True)
    begins = [[prompt[0] for prompt in prompts] for prompts in driver.engine.running]
    assert all(len(set(together)) == len(together) for together in begins)
    assert {begin for together in begins for begin in together} == {0, 1, 2}
    ends = {prompt[-1] for prompts in driver.engine.running for prompt in prompts}
    assert ends == set(range(12))


def test_an_error_of_the_engine_is_one_line():
    with start_engine("wrong vocabulary") as engine, pytest.raises(SequoiaPlanError) as caught:
        engine.receive("starting with 3 speculative tokens")
    cause = (
        "ValidationError: Value error, Target and draft model should have the same vocabulary "
        "size; use another draft"
    )
    activity = "starting with 3 speculative tokens"
    message = str(caught.value).split(" (its log: ")[0]
    assert message == f"the engine failed while {activity}: {cause}"
    assert has_ended(engine.process.pid)


def pool(target, max_engines=4):
    return VllmPool(
        target=str(target),
        draft=None,
        workload=Workload(["ab", "abc"], 1, tokens=8),
        python=sys.executable,
        speculative={},
        options={},
        max_engines=max_engines,
    )


@pytest.fixture
def folder(tmp_path):
    """Where the stand-in counts how often each of its engines was started."""
    (tmp_path / "starts").mkdir()
    return tmp_path / "starts"


def test_engines_that_disturb_each_other_are_started_once_more(folder):
    """Each fails the first time: the first engine alone, and the others together."""
    with pool(f"disturbed:{folder}") as engines:
        engines.ensure_running([Drafting(0), Drafting(1), Drafting(3)])
        assert engines.run(RunKind(Drafting(3)), [0]).tokens > 0
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys("013", "2")


def test_memory_holds_so_many_engines(folder):
    with pool("works", max_engines=2) as engines:
        engines.ensure_running([Drafting(0), Drafting(1)])
        assert engines.groups(map(Drafting, range(4))) == [
            [Drafting(0), Drafting(1)],
            [Drafting(2), Drafting(3)],
        ]
        first = engines.running[Drafting(0)]
        engines.ensure_running([Drafting(1), Drafting(2)])
        assert set(engines.running) == {Drafting(1), Drafting(2)}
        assert has_ended(first.process.pid)


def test_an_engine_that_fails_twice_leaves_its_log(folder):
    with pool(f"broken:{folder}") as engines, pytest.raises(SequoiaPlanError) as caught:
        engines.ensure_running([Drafting(0)])
    [*_, log] = re.findall(r"\(its log: (.*\.log)\)$", str(caught.value))
    assert "the engine's own words" in Path(log).read_text()
    assert (folder / "0").read_text() == "2" and "\n" not in str(caught.value)


def test_a_failure_with_a_known_cause_is_not_tried_again():
    texts = []
    with pool("wrong vocabulary") as engines:
        engines.report_status = texts.append
        with pytest.raises(SequoiaPlanError, match="same vocabulary size"):
            engines.ensure_running([Drafting(0)])
    assert len(texts) == 1


def test_an_engine_that_dies_is_one_line_and_its_child_dies_with_it():
    with start_engine("dies") as engine:
        engine.receive("starting")
        with pytest.raises(SequoiaPlanError, match="died by signal SIGSEGV while running: "):
            decode(engine, [[1]], [[]], 4)
        assert has_ended(engine.process.pid)  # before this program closes it


def test_a_python_that_cannot_be_run():
    message = (
        r"--python /none/python: cannot be run \(No such file or directory\); "
        "give the Python that has the engine"
    )
    with pytest.raises(SequoiaPlanError, match=message):
        EngineProcess("/none/python")


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_engine_never_outlives_the_program(signal_number):
    """Whatever ends the program, the engine and its child end, also while the engine works."""
    script = (
        "import signal, sys, time; sys.path[:0] = ['tests/engines', 'tests/helpers']\n"
        # a shell's background jobs ignore SIGINT, and so would this program
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from test_engine_process import start_engine\n"
        "engine = start_engine(); engine.receive('starting')\n"
        "print(engine.process.pid, flush=True)\n"
        "engine.send('run', prompts=[[1]], texts_before=[[]], tokens=10**6); time.sleep(600)\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    pid = int(program.stdout.readline())
    try:
        assert len(session_pids(pid)) == 3
        os.kill(program.pid, signal_number)
        program.wait()
        assert has_ended(pid)
    finally:
        program.kill()
        program.stdout.close()
        for session_pid in session_pids(pid):
            os.kill(session_pid, signal.SIGKILL)
