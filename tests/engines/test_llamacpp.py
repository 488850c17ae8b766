"""A plan with a real llama.cpp.

`make llamacpp` builds it and runs this. All tests are skipped without SEQUOIA_PLAN_LLAMACPP, the
folder of the build and of the embedded models as GGUF files.
"""

import os
from pathlib import Path

import pytest
from commands import engine_plan, succeed
from refusals import refusal

from sequoia_plan.engines.llama_server import find_build
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import NONE, Drafting
from sequoia_plan.engines.pool import Workload
from sequoia_plan.engines.spec_types import flags

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
def diagnosis(tmp_path_factory):
    """A diagnosis of few steps at two contexts, verified."""
    path = tmp_path_factory.mktemp("plan") / "prompts.txt"
    path.write_text("\n\n".join(text for text in PROMPTS for _ in range(2)))
    words = f"-m {TARGET} -md {DRAFT} --server {SERVER} --most 3 --context 700,64 --tokens 24 "
    words += f"--spec-type draft-simple,ngram-mod --verify --prompts {path} --json"
    result = succeed("diagnose", "llamacpp", *words.split(), "--server-args", "-t 1")
    return engine_plan(result)


def test_a_diagnosis(diagnosis):
    """Each context has its own counts, times, choice and measurements."""
    assert diagnosis.engine == "llamacpp" and diagnosis.engine_version
    assert [part.context for part in diagnosis.contexts] == [64, 700]
    for part in diagnosis.contexts:
        assert 0.1 < part.acceptance.survival[0] < 0.9
        assert f"4 prompts of {part.context} tokens" == part.acceptance.source
        plain, *speculative = part.cells_at(1)
        assert plain.measured and plain.measured.tokens_per_step == 1
        assert {cell.drafting.types for cell in speculative} == {"", "ngram-mod"}
        assert sum(part.step.values()) > 0 and part.bounds and part.tree["no tree passes"] > 0
        assert part.target_seconds[1] < part.target_seconds[17]


def pool(draft, draft_type="draft-simple", tokens=32, **fields):
    return LlamaCppPool(
        target=TARGET,
        draft=draft,
        workload=Workload(PROMPTS, len(PROMPTS), tokens),
        max_length=8,
        build=find_build(SERVER, draft_type),
        draft_type=draft_type,
        **{"arguments": ["-t", "1"], **fields},
    )


def counts(steps):
    return [(step.drafted, step.accepted) for step in steps]


@pytest.mark.parametrize(
    "settings",
    [
        [Drafting(1), Drafting(3, 0.6), Drafting(8, 0.8)],
        [Drafting(lookup_size=n, lookup_length=m) for n, m in ((2, 2), (2, 4), (3, 8))],
        [Drafting(2, 0.6, 2, 4), Drafting(3, 0.0, 3, 8)],
    ],
)
def test_a_replay_is_what_the_server_does(settings):
    """One recording gives the steps that the server makes at other settings.

    Passes over batches of other sizes round otherwise, which may change a token of a text, so a
    few texts may differ.
    """
    with pool(DRAFT, tokens=48) as servers:
        texts, _ = servers.record(0)
        same = []
        num_drafted = 0
        for drafting in settings:
            decoded = servers.decode(drafting, servers.workload.measuring)
            for text, steps in zip(texts, decoded, strict=True):
                replayed = counts(text.replay(drafting))
                # a text ends where the draft met another token
                same.append(replayed[:-1] == counts(steps)[: len(replayed) - 1])
                num_drafted += sum(step.drafted for step in steps)
    assert sum(same) >= 0.7 * len(same) and num_drafted > 0, same


def test_a_replay_of_eagle3_is_near_what_the_server_does():
    """Its proposals depend on where a chain begins, so the replay is an approximation."""
    with pool(EAGLE3, "draft-eagle3") as servers:
        texts, _ = servers.record(0)
        for drafting in (Drafting(1), Drafting(3, 0.6), Drafting(8, 0.8)):
            num_steps = sum(map(len, servers.decode(drafting, servers.workload.measuring)))
            num_replayed = sum(len(text.replay(drafting)) for text in texts)
            assert num_replayed == pytest.approx(num_steps, rel=0.15)


def test_llama_server_takes_the_line():
    with pool(DRAFT, arguments=flags(Drafting(2, 0.4, 3, 8), "draft-simple", DRAFT)) as servers:
        (steps,) = servers.decode(NONE, [2])  # its own options name the draft
    assert sum(step.drafted for step in steps) > 0


@pytest.mark.parametrize(
    ("types", "message"),
    [("draft-eagle3", "the draft does not pair with this target"), ("medusa", "unknown specul")],
)
def test_a_draft_that_does_not_pair_and_a_type_that_is_none_are_one_line(types, message):
    with refusal(message), pool(DRAFT, types) as servers:
        servers.ensure_running([Drafting(2)])
