"""A plan with a real vLLM.

`make engines` sets vLLM up and runs this. All tests are skipped without SEQUOIA_PLAN_VLLM, the
Python that has vLLM.
"""

import json
import os

import pytest
from commands import engine_plan, succeed
from sessions import check_that_it_ends_with

PYTHON = os.environ.get("SEQUOIA_PLAN_VLLM", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not PYTHON,
        reason="needs a real vLLM: run make engines, "
        "or set SEQUOIA_PLAN_VLLM to the Python that has one",
    ),
]

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
}
PROMPTS = [
    "Why is the sky blue?",
    "Name three birds.",
    "What is two plus two?",
    "Write a haiku about rain.",
    "Who wrote Hamlet?",
    "What is a prime number?",
]


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the embedded target and language model as vLLM loads them."""
    folder = tmp_path_factory.mktemp("models")
    for name, words in {"target": [], "draft": ["--draft", "smollm2-135m-draft"]}.items():
        succeed("export", "--format", name, *words, "-o", str(folder / name))
    return folder


def test_the_plan(folder):
    """A plan of few steps, verified."""
    (folder / "prompts.txt").write_text("\n\n".join(text for text in PROMPTS for _ in range(2)))
    words = f"--target {folder}/target --python {PYTHON} --batch 1,3 "
    words += f"--most 3 --prompts {folder}/prompts.txt --tokens 24 --verify --json"
    speculative = json.dumps({"method": "draft_model", "model": str(folder / "draft")})
    options = ("--engine-args", json.dumps(OPTIONS), "--speculative-config", speculative)
    result = succeed("diagnose", "vllm", *words.split(), *options)
    plan = engine_plan(result)
    (part,) = plan.contexts
    assert plan.engine_version and 0.1 < part.acceptance.survival[0] < 0.9
    assert len(part.acceptance.accepted) == 3
    for batch in (1, 3):
        plain, *speculative = cells = part.cells_at(batch)
        assert [cell.speculative_tokens for cell in cells] == [0, 1, 2, 3]
        assert part.best_cell(batch).measured and plain.measured.tokens_per_step == 1
        for cell in speculative:
            max_tokens = cell.speculative_tokens + 1
            assert cell.measured is None or 1 < cell.measured.tokens_per_step < max_tokens


def test_nothing_of_vllm_outlives_a_killed_program(folder):
    script = (
        "import time; from sequoia_plan.engines.engine_process import EngineProcess\n"
        f"engine = EngineProcess({PYTHON!r})\n"
        f"engine.ask('starting', 'start', model={str(folder / 'target')!r}, "
        f"speculative=None, options={OPTIONS!r})\n"
        "print(engine.process.pid, flush=True); time.sleep(600)\n"
    )
    check_that_it_ends_with(script)  # the process that watches, the engine, and vLLM's own
