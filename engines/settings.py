"""One plan as the settings of every engine, in the form that its source reads."""

import json
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain import agreement_by_age, survival_probs
from sequoia_plan.engines.plan import ChainAcceptance, ContextPlan, EnginePlan, ScheduleEntry
from sequoia_plan.engines.vllm import launch_options, speculative_config

MAX_BATCH = 1 << 16
"""Stands for all larger batches where an engine wants a last batch size."""


class Setting(NamedTuple):
    """A setting of one engine."""

    engine: str
    purpose: str
    text: str


def settings_of(plan: EnginePlan, part: ContextPlan) -> list[Setting]:
    """Writes the best numbers of speculative tokens at a context, and acceptance, for every engine.

    The best numbers are those of the engine that the plan was measured with. Another engine takes
    other times, so for it they are a start.
    """
    if plan.engine == "llamacpp":
        raise SequoiaPlanError(
            "a plan for llama.cpp is for one request and has settings that no other engine takes; "
            "expected one of sequoia-plan engine vllm or sglang"
        )
    schedule = part.schedule
    length = max(entry.speculative_tokens for entry in schedule)
    if not length:
        return []
    config = speculative_config(plan.method or "draft_model", plan.draft or None, {})
    rates = synthetic_rates(part.acceptance, length)
    synthetic = {
        "num_speculative_tokens": length,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    accepted = sum(rates)
    load_test = "load test"
    return [
        *(Setting("vLLM", "server", option) for option in launch_options(config, schedule)),
        Setting("SGLang", "file of --speculative-adaptive-config", sglang_adaptive(schedule)),
        *(Setting("TensorRT-LLM", "speculative_config", text) for text in tensorrt_llm(schedule)),
        Setting("AIConfigurator", "command", f"--nextn {length} --nextn-accepted {accepted:.4g}"),
        Setting("vLLM", load_test, f"--speculative-config {shlex.quote(json.dumps(synthetic))}"),
        Setting("SGLang", load_test, f"SGLANG_SIMULATE_ACC_LEN={1 + accepted:.4g}"),
        Setting(
            "llama.cpp",
            load_test,
            f"--spec-draft-n-max {length} --spec-synth-rates {','.join(map(str, rates))}",
        ),
    ]


def synthetic_rates(acceptance: ChainAcceptance, length: int) -> list[float]:
    """Probabilities that the first 1, 2, ... tokens of a chain of `length` are accepted.

    They include steps that draft nothing, where `drafting_share` is below 1.
    """
    survival = survival_probs(agreement_by_age(acceptance), length)
    return [round(float(p) * acceptance.drafting_share, 4) for p in survival]


def sglang_adaptive(schedule: Sequence[ScheduleEntry]) -> str:
    """A file of SGLang's adaptive speculation with one candidate for each range of batch sizes.

    SGLang routes a batch size to the nearest key that is not larger.
    """
    slots = {
        str(entry.first): {"candidate_steps": [entry.speculative_tokens]} for entry in schedule
    }
    return json.dumps(slots)


def tensorrt_llm(schedule: Sequence[ScheduleEntry]) -> tuple[str, ...]:
    """TensorRT-LLM's draft_len_schedule: the last batch size of each range and its length.

    TensorRT-LLM does not speculate for batches larger than the last key. The plan's last range
    holds beyond its end, so its key is `MAX_BATCH`, and a last length of 0 has none. Nothing is
    written if the first range does not have the longest chains, since TensorRT-LLM refuses that.
    """
    lengths = {entry.last: entry.speculative_tokens for entry in schedule[:-1]}
    if schedule[-1].speculative_tokens:
        lengths[MAX_BATCH] = schedule[-1].speculative_tokens
    longest = max(lengths.values(), default=0)
    if not longest or schedule[0].speculative_tokens != longest:
        return ()
    pairs = ", ".join(f"{last}: {length}" for last, length in lengths.items())
    return (f"max_draft_len={longest}, draft_len_schedule={{{pairs}}}",)
