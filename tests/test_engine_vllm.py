"""A plan with a real vLLM. `make engines` sets it up and runs this; without SEQUOIA_PLAN_VLLM, the Python that has it, all is skipped."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from sequoia_plan.artifacts.engine_plan import EnginePlan
from sequoia_plan.planner.cli import main
from sequoia_plan.planner.engines import vllm
from sequoia_plan.planner.engines.process import Engine

PYTHON = os.environ.get("SEQUOIA_PLAN_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs a real vLLM: run make engines, or set SEQUOIA_PLAN_VLLM to the Python that has one")

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 512}
PROMPTS = ["Why is the sky blue?", "Name three birds.", "What is two plus two?", "Write a haiku about rain.", "Who wrote Hamlet?", "What is a prime number?"]


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The embedded target and language model as vLLM loads them."""
    folder = tmp_path_factory.mktemp("models")
    for model, words in (("target", ["--model", "target"]), ("draft", ["--draft", "smollm2-135m-draft"])):
        result = CliRunner().invoke(main, ["export", "--format", "hf", *words, "-o", str(folder / model)])
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def made(folders):
    """A plan of few steps, verified."""
    (folders / "prompts.txt").write_text("\n\n".join(each for each in PROMPTS for _ in range(2)))
    words = ["--target", str(folders / "target"), "--draft", str(folders / "draft"), "--python", PYTHON, "--engine-args", json.dumps(OPTIONS)]
    words += ["--batch", "1,3", "--most", "3", "--prompts", str(folders / "prompts.txt"), "--tokens", "24", "--together", "2", "--verify"]
    result = CliRunner().invoke(main, ["engine", "vllm", *words, "-o", str(folders / "plan.yaml"), "--report", str(folders / "page.html")])
    assert result.exit_code == 0, result.output
    return EnginePlan.load(folders / "plan.yaml"), result.stdout


def session(pid):
    return subprocess.run(["ps", "-o", "stat=", "-s", str(pid)], capture_output=True, text=True, check=False).stdout.split()


def gone(pid):
    """Does no process of the session run any more, now or soon?"""
    until = time.monotonic() + 30
    while any(not state.startswith("Z") for state in session(pid)) and time.monotonic() < until:
        time.sleep(0.1)
    return all(state.startswith("Z") for state in session(pid))


def test_the_plan(made):
    plan, said = made
    assert plan.version and 0.1 < plan.acceptance.survival[0] < 0.9 and len(plan.acceptance.accepted) == 3
    for batch in (1, 3):
        assert [cell.speculative_tokens for cell in plan.at(batch)] == [0, 1, 2, 3]
        assert plan.best(batch).timed and plan.best(batch).measured and plan.at(batch)[0].measured.tokens_per_step == 1
        for cell in plan.at(batch)[1:]:
            assert cell.measured is None or 1 < cell.measured.tokens_per_step < cell.speculative_tokens + 1
    assert all(line in said for line in plan.lines)


def test_vllm_takes_the_schedule(made):
    """Its own reader of schedules makes of ours what the plan says for each batch size."""
    speculative, ranges = vllm.config("draft_model", "d", {}), made[0].schedule
    ranges = ranges if len(ranges) > 1 else (vllm.Range(1, 2, 2), vllm.Range(3, 3, 0))
    found = json.loads(shlex.split(vllm.lines(speculative, ranges, True)[-1])[1])
    script = "import json, sys; from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as build; "
    script += "print(json.dumps(build(json.loads(sys.argv[1]), 5, int(sys.argv[2]))))"
    run = subprocess.run(
        [PYTHON, "-c", script, json.dumps(found[vllm.SCHEDULE]), str(found["num_speculative_tokens"])], capture_output=True, text=True, check=True
    )
    expected = [each.speculative_tokens for each in ranges for _ in range(each.first, each.last + 1)]
    assert json.loads(run.stdout.splitlines()[-1])[1:] == expected + [expected[-1]] * (5 - len(expected))


def test_counters_agree_with_the_tokens(folders):
    """What vLLM counts and what it yields: a text's last step may accept more than the text has room for, and no other."""
    with Engine(PYTHON) as engine:
        speculative = vllm.config("draft_model", str(folders / "draft"), {"num_speculative_tokens": 2})
        engine.ask("starting", "start", model=str(folders / "target"), speculative=speculative, options={**OPTIONS, "max_num_seqs": 3})
        engine.ask("reading", "encode", prompts=PROMPTS)
        run = engine.ask("running", "run", batch=3, prompts=list(range(6)), tokens=24, drain=True)
        gave = [step for text in run["gave"] for step in text]
        grown = {name: value - run["before"].get(name, 0) for name, value in run["after"].items()}
        assert grown["vllm:spec_decode_num_drafts"] == len(gave)
        lost = grown["vllm:spec_decode_num_accepted_tokens"] - (sum(gave) - len(gave))
        assert 0 <= lost <= 2 * 6 and max(gave) == 3


def test_a_draft_of_another_vocabulary_is_one_line(folders):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=8192)
    LlamaForCausalLM(config).save_pretrained(folders / "other")
    words = ["--target", str(folders / "target"), "--draft", str(folders / "other"), "--python", PYTHON, "--engine-args", json.dumps(OPTIONS), "--batch", "1"]
    result = CliRunner().invoke(main, ["engine", "vllm", *words])
    assert result.exit_code == 1 and "Traceback" not in result.output
    said = result.stderr.strip().splitlines()[-1]
    assert "same vocabulary" in said and said.endswith("; use a draft that shares the target's tokenizer")


def test_nothing_of_vllm_outlives_a_killed_program(folders):
    script = (
        "import sys, time; from sequoia_plan.planner.engines.process import Engine\n"
        f"engine = Engine({PYTHON!r}); print(engine.process.pid, flush=True)\n"
        f"print(engine.ask('starting', 'start', model={str(folders / 'target')!r}, speculative=None, options={OPTIONS!r}), flush=True); time.sleep(600)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(program.stdout.readline())
    try:
        assert "version" in program.stdout.readline()
        assert len(session(pid)) >= 3  # the one that watches, the engine, and vLLM's own
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        assert gone(pid)
    finally:
        program.kill()
        program.stdout.close()


def test_the_page(made, folders):
    assert (folders / "page.html").read_text().count("<svg") == 2 and Path(folders / "plan.yaml").exists()
