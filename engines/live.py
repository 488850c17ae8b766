"""A server that runs already: what its timings and counters say. Nothing is changed there."""

from collections.abc import Callable, Mapping
from itertools import chain, product
from typing import Any

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines import counters
from sequoia_plan.engines.chain import ChainModel
from sequoia_plan.engines.chain_replay import NOTHING_DRAFTED, acceptance_of
from sequoia_plan.engines.llama_server import Server
from sequoia_plan.engines.llamacpp import timed_steps
from sequoia_plan.engines.plan import Cell, ContextPlan, Drafting, EnginePlan, StepSeconds
from sequoia_plan.engines.planning import make_plan
from sequoia_plan.engines.timing import StepTimes
from sequoia_plan.engines.workload import Workload

WATCH_SECONDS = 10


def diagnose_server(
    url: str, key: str, workload: Workload, report_status: Callable[[str], None]
) -> EnginePlan:
    """Asks a llama-server for texts, or reads the counters of a vLLM."""
    server = Server(url, key)
    report_status(f"asking {url}")
    try:
        properties = server.ask("/props")
    except SequoiaPlanError as error:
        if " 404" not in str(error):
            raise
        report_status(f"reading the counters of {url} for {WATCH_SECONDS} seconds")
        return diagnose_steps(counters.watch(url, WATCH_SECONDS), url)
    return diagnose_llama_server(server, properties, workload, report_status)


def diagnose_steps(steps: counters.ServedSteps, url: str) -> EnginePlan:
    """What a vLLM's own steps say; whether to speculate takes the time of a step without it."""
    if not steps.acceptance:
        raise SequoiaPlanError(
            f"{url}: nothing is drafted, and a step of {steps.requests:.1f} requests takes "
            f"{steps.seconds * 1000:.1f} ms; diagnose vllm says whether to speculate"
        )
    length, batch = len(steps.acceptance.accepted), max(round(steps.requests), 1)
    speed = steps.requests * steps.tokens / steps.seconds
    cell = Cell(batch, Drafting(length), steps.tokens, steps.seconds, speed, speed, speed, 1.0)
    timed = StepSeconds(batch, length, steps.seconds)
    break_even = steps.seconds / steps.tokens
    part = ContextPlan(0, steps.acceptance, (timed,), (cell,), break_even_seconds=break_even)
    return EnginePlan(engine="vllm", target=url, contexts=(part,))


def diagnose_llama_server(
    server: Server,
    properties: Mapping[str, Any],
    workload: Workload,
    report_status: Callable[[str], None],
) -> EnginePlan:
    """Decodes prompts, and times the steps of shorter chains in requests without room for more."""
    prompts = [server.encode(workload.prompts[i]) for i in workload.measuring]
    report_status(f"decoding {len(prompts)} prompts")
    recorded = [server.generate(prompt, workload.tokens) for prompt in prompts]
    if not any(step.drafted for step in chain(*recorded)):
        raise SequoiaPlanError(f"{server.address}: {NOTHING_DRAFTED}")
    acceptance = acceptance_of(recorded, f"{len(prompts)} prompts")
    length = len(acceptance.accepted)
    report_status("timing steps")
    rooms = product(prompts[:3], range(length + 1))
    short = (server.generate(prompt, room + 2, True) for prompt, room in rooms)
    times = StepTimes(tuple(timed_steps(chain(*recorded, *short))))
    return make_plan(
        [(ChainModel(acceptance, length), times)],
        [1],
        lambda part: tuple(
            f"--spec-draft-n-max {entry.speculative_tokens}"
            for entry in part.schedule
            if entry.speculative_tokens
        ),
        engine="llamacpp",
        engine_version=properties.get("build_info", ""),
        target=server.address,
    )
