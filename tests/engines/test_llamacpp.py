"""A plan with a real llama.cpp.

`make llamacpp` builds it and runs this. All tests are skipped without SEQUOIA_PLAN_LLAMACPP, the
folder of the build and of the embedded models as GGUF files.
"""

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

from sequoia_plan.engines.drafting import LOOKUP, NONE, Drafting
from sequoia_plan.engines.llamacpp import ServerPool, find_build
from sequoia_plan.engines.llamacpp_plan import record, replay
from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.engines.vllm import Workload
from sequoia_plan.planner.cli import main

FOLDER = Path(os.environ.get("SEQUOIA_PLAN_LLAMACPP", ""))
pytestmark = pytest.mark.skipif(
    not os.environ.get("SEQUOIA_PLAN_LLAMACPP"),
    reason="needs a real llama.cpp: run make llamacpp, "
    "or set SEQUOIA_PLAN_LLAMACPP to the folder that it made",
)

SERVER = str(FOLDER / "bin" / "llama-server")
TARGET, DRAFT, EAGLE3 = (str(FOLDER / f"{name}.gguf") for name in ("target", "draft", "eagle3"))
PROMPTS = [
    "Why is the sky blue?",
    "Name three birds, then name them again.",
    "Count from one to twenty.",
    "Write a haiku about rain.",
]


@pytest.fixture(autouse=True)
def logs_go_with_the_test(tmp_path, monkeypatch):
    """A server that fails leaves its log in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def engine(*words):
    words = ["--target", TARGET, "--server", SERVER, "--server-args", "-t 1", *words]
    return CliRunner().invoke(main, ["engine", "llamacpp", *words])


@pytest.fixture(scope="module")
def measured_plan(tmp_path_factory):
    """A plan of few steps, verified, and the output of the command."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "prompts.txt").write_text("\n\n".join(text for text in PROMPTS for _ in range(2)))
    words = [
        *("--draft", DRAFT),
        *("--most", "3"),
        *("--prompts", str(folder / "prompts.txt")),
        *("--tokens", "24"),
        "--verify",
        *("-o", str(folder / "plan.yaml")),
    ]
    result = engine(*words)
    assert result.exit_code == 0, result.output
    return EnginePlan.load(folder / "plan.yaml"), result.stdout


def test_the_plan(measured_plan):
    plan, output = measured_plan
    assert (plan.engine, plan.method) == ("llamacpp", "draft-simple") and plan.version
    assert 0.1 < plan.acceptance.survival[0] < 0.9
    assert [step.speculative_tokens for step in plan.steps] == [0, 1, 2, 3]
    plain, *speculative = plan.cells_at(1)
    assert plain.measured and plain.measured.tokens_per_step == 1
    default = next(c for c in speculative if (c.speculative_tokens, c.variant) == (3, ""))
    assert default.measured and 1 < default.measured.tokens_per_step < 4
    assert sum(cell.measured is not None for cell in plan.cells) >= 4
    assert all(line in output for line in plan.lines)


def pool(draft, tokens=32):
    build, _ = find_build(SERVER, "draft-simple")
    return ServerPool(build, TARGET, draft, Workload(PROMPTS, tokens), ["-t", "1"])


def test_a_replay_is_what_the_server_does():
    """Chains recorded at 12 give the steps that the server makes at other settings.

    Passes over batches of other sizes round otherwise, which may change a token of a text, so a
    few texts may differ.
    """
    prompts = range(len(PROMPTS))
    with pool(DRAFT) as servers:
        texts, _ = record(servers, "draft-simple", 8, prompts)
        same = total = 0
        for length, min_prob in ((1, 0.0), (3, 0.6), (8, 0.8)):
            drafting = Drafting("draft-simple", length, min_prob)
            servers.ensure_running([drafting])
            for text, steps in zip(texts, servers.run(drafting, prompts), strict=True):
                pairs = [(step.drafted, step.accepted) for step in steps]
                same += [(step.drafted, step.accepted) for step in replay(drafting, text)] == pairs
                total += 1
        assert same >= 0.7 * total, f"{same} of {total} texts"


def test_a_replay_of_eagle3_is_near_what_the_server_does():
    """Its proposals depend on where a chain begins, so the replay is an approximation."""
    prompts = range(len(PROMPTS))
    with pool(EAGLE3) as servers:
        texts, _ = record(servers, "draft-eagle3", 8, prompts)
        for length, min_prob in ((1, 0.0), (3, 0.6), (8, 0.8)):
            drafting = Drafting("draft-eagle3", length, min_prob)
            servers.ensure_running([drafting])
            num_steps = sum(map(len, servers.run(drafting, prompts)))
            num_replayed = sum(len(replay(drafting, text)) for text in texts)
            assert num_replayed == pytest.approx(num_steps, rel=0.15)


def test_a_lookup_on_the_text_is_what_the_server_does():
    prompts = range(len(PROMPTS))
    with pool(None, tokens=64) as servers:
        texts = servers.record_lookup(prompts)
        same = total = drafted = 0
        for size, length in ((1, 2), (2, 4), (3, 8)):
            drafting = Drafting(LOOKUP, length, lookup_size=size)
            servers.ensure_running([drafting])
            for text, steps in zip(texts, servers.run(drafting, prompts), strict=True):
                replayed = [(step.drafted, step.accepted) for step in replay(drafting, text)]
                same += replayed == [(step.drafted, step.accepted) for step in steps]
                drafted += sum(step.drafted for step in steps)
                total += 1
        assert same >= 0.7 * total and drafted > 0, f"{same} of {total} texts"


def test_llama_server_takes_the_line(measured_plan):
    plan, _ = measured_plan
    line = plan.lines or tuple(
        shlex.quote(flag) for flag in Drafting("draft-simple", 2, 0.4).flags(DRAFT)
    )
    with pool(DRAFT) as servers:
        servers.arguments = shlex.split(" ".join(line))
        servers.ensure_running([NONE])  # its own options name the draft
        steps = servers.run(NONE, [2])[0]
    assert sum(step.drafted for step in steps) > 0


def test_a_plan_by_context(tmp_path):
    """Each context has its own counts, times, choice and measurements."""
    (tmp_path / "prompts.txt").write_text("\n\n".join(text for text in PROMPTS for _ in range(2)))
    words = [
        *("--draft", DRAFT),
        *("--most", "2"),
        *("--context", "700,64"),
        *("--prompts", str(tmp_path / "prompts.txt")),
        *("--tokens", "16"),
        "--verify",
        *("-o", str(tmp_path / "plan.yaml")),
    ]
    result = engine(*words)
    assert result.exit_code == 0, result.output
    plan = EnginePlan.load(tmp_path / "plan.yaml")
    assert [choice.context for choice in plan.by_context] == [64, 700]
    for part, context in zip(plan.parts(), (64, 700), strict=True):
        assert f"4 prompts of {context} tokens" == part.acceptance.source
        assert [step.speculative_tokens for step in part.steps] == [0, 1, 2]
        assert sum(cell.measured is not None for cell in part.cells) >= 3
        assert f"batch 1, context {context}: " in result.stdout
        assert all(line in result.stdout for line in part.lines)


def test_a_prompt_in_the_cache_has_the_same_text():
    """Where prompts begin alike, a server computes only the rest, in batches of other sizes."""
    prompts = range(len(PROMPTS))
    with pool(DRAFT) as servers:
        servers.max_context = 300
        drafting = Drafting("draft-simple", 3)
        servers.ensure_running([drafting])
        cached = servers.run(drafting, prompts, 300)
        server = servers._servers[drafting, False]
        new = [server.generate(servers.prompt(i, 300), 32, 0.0) for i in prompts]
    counts = [[[(step.drafted, step.accepted) for step in text] for text in run]
              for run in (cached, new)]  # fmt: skip
    assert sum(text == other for text, other in zip(*counts, strict=True)) >= 0.7 * len(prompts)


def test_json(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS))
    words = ["--spec-type", LOOKUP, "--most", "4", "--prompts", str(tmp_path / "prompts.txt")]
    result = engine(*words, "--tokens", "48", "--json")
    assert result.exit_code == 0, result.output
    plan = EnginePlan.from_dict(json.loads(result.stdout), "plan")
    assert plan.method == LOOKUP and plan.cells_at(1)[0].throughput > 0


def test_the_server_ends_with_a_killed_program():
    script = (
        "import time; from sequoia_plan.engines.llamacpp import Server, find_build\n"
        f"build, _ = find_build({SERVER!r}, 'draft-simple')\n"
        f"server = Server(build, ['-m', {TARGET!r}, '-c', '512'])\n"
        "server.wait(); print(server._process.process.pid, flush=True); time.sleep(600)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(program.stdout.readline())
        listing = ["ps", "-o", "stat=", "-s", str(pid)]
        run = subprocess.run(listing, capture_output=True, text=True, check=False)
        assert len(run.stdout.split()) == 2  # the process that watches, and the server
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            run = subprocess.run(listing, capture_output=True, text=True, check=False)
            if all(state.startswith("Z") for state in run.stdout.split()):
                return
            time.sleep(0.1)
        pytest.fail("the server runs on")
    finally:
        program.kill()
        program.stdout.close()
