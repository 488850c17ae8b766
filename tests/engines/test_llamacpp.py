"""A plan with a real llama.cpp.

`make llamacpp` builds it and runs this. All tests are skipped without SEQUOIA_PLAN_LLAMACPP, the
folder of the build and of the embedded models as GGUF files.
"""

import os
import shlex
from pathlib import Path

import pytest
from commands import succeed
from sessions import check_that_it_ends_with

from sequoia_plan.engines.llama_server import find_build
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.engines.spec_types import LOOKUP, flags
from sequoia_plan.engines.workload import NONE, Drafting, Workload

FOLDER = Path(os.environ.get("SEQUOIA_PLAN_LLAMACPP", ""))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.environ.get("SEQUOIA_PLAN_LLAMACPP"),
        reason="needs a real llama.cpp: run make llamacpp, "
        "or set SEQUOIA_PLAN_LLAMACPP to the folder that it made",
    ),
]

SERVER = str(FOLDER / "bin" / "llama-server")
TARGET, DRAFT, EAGLE3 = (str(FOLDER / f"{name}.gguf") for name in ("target", "draft", "eagle3"))
PROMPTS = [
    "Why is the sky blue?",
    "Name three birds, then name them again.",
    "Count from one to twenty.",
    "Write a haiku about rain.",
]


@pytest.fixture(scope="module")
def measured_plan(tmp_path_factory):
    """A plan of few steps at two contexts, verified, and the output of the command."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "prompts.txt").write_text("\n\n".join(text for text in PROMPTS for _ in range(2)))
    words = f"--target {TARGET} --draft {DRAFT} --server {SERVER} --most 3 --context 700,64 "
    words += f"--tokens 24 --verify --prompts {folder}/prompts.txt -o {folder}/plan.yaml"
    result = succeed("engine", "llamacpp", *words.split(), "--server-args", "-t 1")
    return EnginePlan.load(folder / "plan.yaml"), result.stdout


def test_the_plan(measured_plan):
    """Each context has its own counts, times, choice and measurements."""
    plan, output = measured_plan
    assert (plan.engine, plan.method) == ("llamacpp", "draft-simple") and plan.engine_version
    assert [part.context for part in plan.contexts] == [64, 700]
    for part in plan.contexts:
        assert 0.1 < part.acceptance.survival[0] < 0.9
        assert f"4 prompts of {part.context} tokens" == part.acceptance.source
        assert [step.speculative_tokens for step in part.steps] == [0, 1, 2, 3]
        plain, *speculative = part.cells_at(1)
        assert plain.measured and plain.measured.tokens_per_step == 1
        default = next(c for c in speculative if (c.speculative_tokens, c.variant) == (3, ""))
        assert default.measured and 1 < default.measured.tokens_per_step < 4
        assert sum(cell.measured is not None for cell in part.cells) >= 4
        assert all(line in output for line in part.lines)


def pool(draft, spec_type="draft-simple", tokens=32, **fields):
    return LlamaCppPool(
        target=TARGET,
        draft=draft,
        workload=Workload(PROMPTS, len(PROMPTS), tokens),
        build=find_build(SERVER),
        spec_type=spec_type,
        arguments=["-t", "1"],
        **fields,
    )


def counts(steps):
    return [(step.drafted, step.accepted) for step in steps]


@pytest.mark.parametrize(
    ("spec_type", "draft", "tokens", "settings"),
    [
        ("draft-simple", DRAFT, 32, [Drafting(1), Drafting(3, 0.6), Drafting(8, 0.8)]),
        (
            LOOKUP,
            None,
            64,
            [Drafting(length, lookup_size=size) for size, length in ((2, 2), (2, 4), (3, 8))],
        ),
    ],
)
def test_a_replay_is_what_the_server_does(spec_type, draft, tokens, settings):
    """One recording gives the steps that the server makes at other settings.

    Passes over batches of other sizes round otherwise, which may change a token of a text, so a
    few texts may differ.
    """
    with pool(draft, spec_type, tokens) as servers:
        replays = servers.record(8, 1, 0).replays
        same = []
        num_drafted = 0
        for drafting in settings:
            decoded = servers.decode(drafting, servers.workload.measuring)
            for replayed, steps in zip(replays[drafting], decoded, strict=True):
                same.append(counts(replayed) == counts(steps))
                num_drafted += sum(step.drafted for step in steps)
    assert sum(same) >= 0.7 * len(same) and num_drafted > 0, same


def test_a_replay_of_eagle3_is_near_what_the_server_does():
    """Its proposals depend on where a chain begins, so the replay is an approximation."""
    with pool(EAGLE3, "draft-eagle3") as servers:
        replays = servers.record(8, 1, 0).replays
        for drafting in (Drafting(1), Drafting(3, 0.6), Drafting(8, 0.8)):
            num_steps = sum(map(len, servers.decode(drafting, servers.workload.measuring)))
            num_replayed = sum(map(len, replays[drafting]))
            assert num_replayed == pytest.approx(num_steps, rel=0.15)


def test_llama_server_takes_the_line(measured_plan):
    line = measured_plan[0].contexts[0].lines
    words = shlex.split(" ".join(line)) or flags(Drafting(2, 0.4), "draft-simple", DRAFT)
    with pool(DRAFT) as servers:
        servers.arguments = words
        (steps,) = servers.decode(NONE, [2])  # its own options name the draft
    assert sum(step.drafted for step in steps) > 0


def test_the_server_ends_with_a_killed_program():
    script = (
        "import time; from sequoia_plan.engines.llama_server import Server, find_build\n"
        f"build = find_build({SERVER!r})\n"
        f"server = Server(build, ['-m', {TARGET!r}, '-c', '512'])\n"
        "server.wait(); print(server._engine.process.pid, flush=True); time.sleep(600)\n"
    )
    check_that_it_ends_with(script, 2)  # the process that watches, and the server
