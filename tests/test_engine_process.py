"""The engine's process: it answers, its errors are one line, and neither it nor what it started outlives this program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.planner.engines.process import Engine

STAND_IN = {"PYTHONPATH": str(Path(__file__).parent / "stand_in")}


def session(pid):
    """The processes of a session."""
    listed = subprocess.run(["ps", "-o", "pid=", "-s", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(each) for each in listed.split()]


def gone(pid, within=20.0):
    """Is the session empty, now or soon?"""
    until = time.monotonic() + within
    while session(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not session(pid)


def started(model="works", length=3):
    engine = Engine(sys.executable, environment=STAND_IN)
    speculative = {"num_speculative_tokens": length} if length else None
    engine.send("start", model=model, speculative=speculative, options={"max_num_seqs": 4})
    return engine


def test_it_answers_and_ends():
    with started() as engine:
        facts = engine.receive("starting")
        assert (facts["version"], facts["device"], facts["schedule"]) == ("0.0.stand-in", "cpu", True)
        assert engine.ask("reading", "encode", prompts=["ab", [{"role": "user", "content": "abc"}]])["lengths"] == [2, 3]
        assert len(session(engine.process.pid)) == 3  # the one that watches, the engine, and its own child
    assert gone(engine.process.pid)


def test_a_run_counts_only_full_steps():
    with started() as engine:
        engine.receive("starting")
        engine.ask("reading", "encode", prompts=["a", "b", "c"])
        run = engine.ask("running", "run", batch=2, prompts=[0, 1, 2, 0], tokens=20)
    steps = [step for prompt in run["gave"] for step in prompt]
    assert sum(steps) + 4 == run["whole"][1]  # each of the four requests' first token is apart
    assert 3 * 20 < run["whole"][1] < 4 * 20  # the last request is ended when it is alone
    assert len(run["seconds"]) == len(run["tokens"]) and min(run["seconds"]) > 0
    assert all(2 <= each <= 8 for each in run["tokens"])  # both requests, one to four tokens each
    grown = {name: run["after"][name] - run["before"][name] for name in run["after"]}
    assert grown["vllm:spec_decode_num_drafts"] == len(steps)
    assert grown["vllm:spec_decode_num_accepted_tokens"] >= sum(steps) - len(steps)  # the last step of a text may be cut
    assert grown["vllm:spec_decode_num_accepted_tokens_per_pos[0]"] > grown["vllm:spec_decode_num_accepted_tokens_per_pos[2]"] > 0


def test_an_error_of_the_engine_is_one_line():
    with started("wrong vocabulary") as engine, pytest.raises(SequoiaPlanError) as caught:
        engine.receive("starting with 3 speculative tokens")
    said = "ValidationError: Value error, Target and draft model should have the same vocabulary size; use a draft that shares the target's tokenizer"
    assert str(caught.value) == f"the engine failed while starting with 3 speculative tokens: {said}"
    assert gone(engine.process.pid)


def test_an_engine_that_dies_is_one_line_and_its_child_dies_with_it():
    with started("dies") as engine:
        engine.receive("starting")
        engine.ask("reading", "encode", prompts=["a"])
        with pytest.raises(SequoiaPlanError, match=r"the engine died by signal SIGSEGV while running: "):
            engine.ask("running", "run", batch=1, prompts=[0], tokens=4)
        assert gone(engine.process.pid)  # before we close it


def test_a_python_that_cannot_be_run():
    with pytest.raises(SequoiaPlanError, match=r"--python /none/python: cannot be run \(No such file or directory\); give the Python that has the engine"):
        Engine("/none/python")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_engine_never_outlives_the_program(how):
    """Whatever ends it: the engine and its child are gone, also while the engine works."""
    script = (
        "import signal, sys, time; sys.path.insert(0, 'tests')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it, and so would this one
        "from test_engine_process import started\n"
        "engine = started(); engine.receive('starting'); print(engine.process.pid, flush=True); engine.send('encode', prompts=['a'])\n"
        "engine.send('run', batch=1, prompts=[0], tokens=10**6); time.sleep(600)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    pid = int(program.stdout.readline())
    try:
        assert len(session(pid)) == 3
        os.kill(program.pid, how)
        program.wait()
        assert gone(pid)
    finally:
        program.kill()
        program.stdout.close()
        for each in session(pid):
            os.kill(each, signal.SIGKILL)
