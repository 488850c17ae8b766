"""One plan as the settings of several engines."""

import json
import shlex

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.plan import (
    Cell,
    ChainAcceptance,
    ContextPlan,
    EnginePlan,
    ScheduleEntry,
    StepSeconds,
)
from sequoia_plan.engines.settings import settings_of, tensorrt_llm
from sequoia_plan.planner.cli import main

PART = ContextPlan(
    context=0,
    acceptance=ChainAcceptance(drafts=1000, accepted=(600, 300, 120)),
    steps=(StepSeconds(1, 0, 0.1),),
    cells=(Cell(1, 0, 1.0, 0.1, 10.0, 9.0, 11.0, 1.0, True),),
    schedule=(ScheduleEntry(1, 4, 3), ScheduleEntry(5, 16, 1), ScheduleEntry(17, 64, 0)),
)
PLAN = EnginePlan(engine="vllm", method="eagle3", draft="d", contexts=(PART,))


def texts(part):
    return {(s.engine, s.purpose): s.text for s in settings_of(PLAN, part)}


def test_every_engine_gets_its_own_form():
    settings = texts(PART)
    schedule = json.loads(shlex.split(settings["vLLM", "server"])[1])
    assert schedule["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 16, 1], [17, 64, 0]]
    adaptive = json.loads(settings["SGLang", "file of --speculative-adaptive-config"])
    assert adaptive == {
        "1": {"candidate_steps": [3]},
        "5": {"candidate_steps": [1]},
        "17": {"candidate_steps": [0]},
    }
    assert settings["TensorRT-LLM", "speculative_config"] == (
        "max_draft_len=3, draft_len_schedule={4: 3, 16: 1}"
    )


def test_synthetic_acceptance_is_that_of_the_plan():
    settings = texts(PART)
    config = json.loads(shlex.split(settings["vLLM", "load test"])[1])
    # the counts were made with the same length, so the model gives them back
    assert config["synthetic_acceptance_rates"] == pytest.approx([0.6, 0.3, 0.12], abs=1e-3)
    assert config["num_speculative_tokens"] == len(config["synthetic_acceptance_rates"])
    assert settings["AIConfigurator", "command"] == "--nextn 3 --nextn-accepted 1.02"
    assert settings["SGLang", "load test"] == "SGLANG_SIMULATE_ACC_LEN=2.02"
    rates = settings["llama.cpp", "load test"].split()[-1]
    assert list(map(float, rates.split(","))) == config["synthetic_acceptance_rates"]


def test_steps_that_draft_nothing_lower_the_synthetic_acceptance():
    rare = replace(PART, acceptance=replace(PART.acceptance, drafting_share=0.5))
    assert texts(rare)["AIConfigurator", "command"] == "--nextn 3 --nextn-accepted 0.51"


def test_tensorrt_llm_refuses_a_first_range_that_is_not_the_longest():
    assert tensorrt_llm((ScheduleEntry(1, 4, 0), ScheduleEntry(5, 8, 2))) == ()
    assert tensorrt_llm((ScheduleEntry(1, 8, 0),)) == ()
    (text,) = tensorrt_llm((ScheduleEntry(1, 4, 2), ScheduleEntry(5, 8, 1)))
    assert text == "max_draft_len=2, draft_len_schedule={4: 2, 65536: 1}"


def test_the_command_prints_them(tmp_path):
    plain = replace(PART, context=512, schedule=(ScheduleEntry(1, 8, 0),))
    replace(PLAN, contexts=(PART, plain)).save(tmp_path / "plan.yaml")
    result = CliRunner().invoke(main, ["engine", "settings", str(tmp_path / "plan.yaml")])
    assert all(setting.text in result.output for setting in settings_of(PLAN, PART))
    place = "at a context of 512 tokens"
    assert result.output.endswith(f"start the engine without speculation {place}\n")


def test_a_plan_for_llama_cpp_has_settings_that_no_other_engine_takes():
    with pytest.raises(SequoiaPlanError, match=r"a plan for llama.cpp"):
        settings_of(replace(PLAN, engine="llamacpp"), PART)
