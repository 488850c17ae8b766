"""The engine's process: its answers, its errors in one line, and its end with this program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT, STAND_IN

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.driver import Driver, padded
from sequoia_plan.engines.process import EngineProcess
from sequoia_plan.engines.vllm import EnginePool, Workload

STAND_IN = {"PYTHONPATH": str(STAND_IN)}


@pytest.fixture(autouse=True)
def logs_go_with_the_test(tmp_path, monkeypatch):
    """An engine that fails leaves its log in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def session_pids(pid):
    """The processes of a session."""
    command = ["ps", "-o", "pid=", "-s", str(pid)]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [int(line) for line in listing.split()]


def has_ended(pid, timeout=20.0):
    """True if the session is empty, now or within the timeout."""
    deadline = time.monotonic() + timeout
    while session_pids(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not session_pids(pid)


def start_engine(model="works", length=3):
    engine = EngineProcess(sys.executable, environment=STAND_IN)
    speculative = {"num_speculative_tokens": length} if length else None
    engine.send("start", model=model, speculative=speculative, options={"max_num_seqs": 4})
    return engine


def test_it_answers_and_ends():
    with start_engine() as engine:
        info = engine.receive("starting")
        assert (info["version"], info["device"]) == ("0.0.stand-in", "cpu")
        assert info["accepts_schedule"] is True
        prompts = ["ab", [{"role": "user", "content": "abc"}]]
        assert engine.ask("reading", "encode", prompts=prompts)["lengths"] == [2, 3]
        # the process that watches, the engine, and the engine's own child
        assert len(session_pids(engine.process.pid)) == 3
    assert has_ended(engine.process.pid)


def test_a_run_counts_only_full_steps():
    with start_engine() as engine:
        engine.receive("starting")
        engine.ask("reading", "encode", prompts=["a", "b", "c"])
        run = engine.ask("running", "run", batch=2, prompts=[0, 1, 2, 0], tokens=20)
    steps = [step for steps in run["tokens_by_prompt"] for step in steps]
    # the first token of each of the four requests is not in the steps
    assert sum(steps) + 4 == run["total_tokens"]
    # the run ends when the last request is alone
    assert 3 * 20 < run["total_tokens"] < 4 * 20
    assert len(run["step_seconds"]) == len(run["step_tokens"]) and min(run["step_seconds"]) > 0
    # two requests, one to four tokens each
    assert all(2 <= tokens <= 8 for tokens in run["step_tokens"])
    before, after = run["counters_before"], run["counters_after"]
    increase = {name: after[name] - before[name] for name in after}
    prefix = "vllm:spec_decode_num"
    assert increase[f"{prefix}_drafts"] == len(steps)
    # the last step of a text may accept more tokens than it yields
    assert increase[f"{prefix}_accepted_tokens"] >= sum(steps) - len(steps)
    per_position = f"{prefix}_accepted_tokens_per_pos"
    assert increase[f"{per_position}[0]"] > increase[f"{per_position}[2]"] > 0


def test_every_prompt_of_a_run_has_the_context():
    name = "vllm:spec_decode_num_prompt_tokens"
    with start_engine() as engine:
        engine.receive("starting")
        engine.ask("reading", "encode", prompts=["a", "bc", "d" * 90])
        for context, expected in ((0, 1 + 2 + 90), (50, 3 * 50)):
            run = engine.ask(
                "running", "run", batch=2, prompts=[0, 1, 2], tokens=8, drain=True, context=context
            )
            assert run["counters_after"][name] - run["counters_before"][name] == expected


def test_what_is_before_a_prompt_depends_on_its_slot_alone():
    texts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert padded([0, 4], texts, 0, 12) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0, 4]
    assert padded([0, 6, 7, 8], texts, 0, 12) == [1, 2, 3, 4, 5, 6, 7, 8, 0, 6, 7, 8]
    assert padded([0, 6, 7, 8], texts, 1, 12) == [4, 5, 6, 7, 8, 9, 1, 2, 0, 6, 7, 8]
    assert padded([0, 6, 7, 8], texts, 7, 3) == [6, 7, 8]
    assert texts == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


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
    driver.prompts = driver.texts = [[number] * 4 for number in range(12)]
    driver.run(batch=3, prompts=list(range(12)), tokens=5, drain=True, context=8)
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
        "size; use a draft that shares the target's tokenizer"
    )
    activity = "starting with 3 speculative tokens"
    message = str(caught.value).split(" (its log: ")[0]
    assert message == f"the engine failed while {activity}: {cause}"
    assert has_ended(engine.process.pid)


def pool(target):
    return EnginePool(
        sys.executable, str(target), Workload(["ab", "abc"], 8, 0.0), {}, {}, max_engines=4
    )


def test_engines_that_disturb_each_other_are_started_once_more(tmp_path, monkeypatch):
    """Each fails the first time: the first engine alone, and the others together."""
    monkeypatch.setenv("PYTHONPATH", STAND_IN["PYTHONPATH"])
    folder = tmp_path / "starts"
    folder.mkdir()
    with pool(f"disturbed:{folder}") as engines:
        engines.ensure_running([0, 1, 3])
        assert engines.run(3, 1, [0]).tokens > 0
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys("013", "2")


def test_an_engine_that_fails_twice_leaves_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STAND_IN["PYTHONPATH"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "starts"
    folder.mkdir()
    with pool(f"broken:{folder}") as engines, pytest.raises(SequoiaPlanError) as caught:
        engines.ensure_running([0])
    [*_, log] = re.findall(r"\(its log: (.*\.log)\)$", str(caught.value))
    assert "the engine's own words" in Path(log).read_text()
    assert (folder / "0").read_text() == "2" and "\n" not in str(caught.value)


def test_a_failure_with_a_known_cause_is_not_tried_again(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STAND_IN["PYTHONPATH"])
    texts = []
    engines = replace(pool("wrong vocabulary"), report_status=texts.append)
    with engines, pytest.raises(SequoiaPlanError, match="same vocabulary size"):
        engines.ensure_running([0])
    assert len(texts) == 1


def test_an_engine_that_dies_is_one_line_and_its_child_dies_with_it():
    with start_engine("dies") as engine:
        engine.receive("starting")
        engine.ask("reading", "encode", prompts=["a"])
        message = r"the engine died by signal SIGSEGV while running: "
        with pytest.raises(SequoiaPlanError, match=message):
            engine.ask("running", "run", batch=1, prompts=[0], tokens=4)
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
        "from test_process import start_engine\n"
        "engine = start_engine(); engine.receive('starting')\n"
        "print(engine.process.pid, flush=True); engine.send('encode', prompts=['a'])\n"
        "engine.send('run', batch=1, prompts=[0], tokens=10**6); time.sleep(600)\n"
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
