"""A server that runs already: what its timings and counters say. Nothing is changed there."""

import time
from collections.abc import Callable, Mapping
from itertools import chain, product

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain_replay import NOTHING_DRAFTED, acceptance_of
from sequoia_plan.engines.counters import ACCEPT_LENGTH, NUM_DRAFTS, STEPS, chain_acceptance
from sequoia_plan.engines.llama_server import Server
from sequoia_plan.engines.llamacpp import timed_steps
from sequoia_plan.engines.plan import NONE, Cell, ContextPlan, Drafting, EnginePlan
from sequoia_plan.engines.planning import make_plan
from sequoia_plan.engines.pool import Workload
from sequoia_plan.engines.prediction import ChainModel, StepTimes

WATCH_SECONDS = 10


def diagnose_server(
    server: Server, workload: Workload, report_status: Callable[[str], None]
) -> EnginePlan:
    """Asks a llama-server for texts; reads the counters of any other, vLLM or SGLang, twice."""
    report_status(f"asking {server.address}")
    try:
        version = server.version()
    except SequoiaPlanError as refusal:
        cause = refusal.__cause__
        is_another_engine = isinstance(cause, ValueError) or getattr(cause, "code", 0) == 404
        if not is_another_engine:
            raise  # nothing answers, or a llama-server that refuses
        try:
            before, start_time = server.counters(), time.perf_counter()
        except SequoiaPlanError as error:
            raise SequoiaPlanError(f"{refusal}; no counters either: {error}") from error
        report_status(f"reading the counters of {server.address} for {WATCH_SECONDS} seconds")
        time.sleep(WATCH_SECONDS)
        after = server.counters()
        return plan_of_counters(before, after, time.perf_counter() - start_time, server.address)
    return diagnose_llama_server(server, version, workload, report_status)


def plan_of_counters(
    before: Mapping[str, float], after: Mapping[str, float], elapsed: float, url: str
) -> EnginePlan:
    """A plan of one cell: the mean step between two readings of counters, `elapsed` seconds apart.

    A step's time has whatever else the server did in it, such as prefills of others. No counter has
    the time of a step without speculation, so the plan says from which time on speculation pays.
    """
    risen = {name: value - before.get(name, 0.0) for name, value in after.items()}
    is_sglang = any(name.startswith("sglang:") for name in after)
    engine = "sglang" if is_sglang else "vllm"
    num_outputs = seconds = 0.0  # of all requests together: outputs, and the seconds between them
    for name in STEPS[: 1 if is_sglang else None]:  # SGLang's other one is of whole requests
        counted, total = (risen.get(f"{engine}:{name}_{end}", 0.0) for end in ("count", "sum"))
        if min(counted, total) > 0:
            num_outputs, seconds = counted, total
            break
    if not num_outputs:
        names = ", ".join(name for name, rise in risen.items() if rise > 0)
        raise SequoiaPlanError(
            f"{url}: in {elapsed:.0f} seconds found {names[:300] or 'no counter'} to rise, "
            f"expected {engine}:{STEPS[0]}_count; send the server your usual requests meanwhile"
        )
    acceptance = chain_acceptance(risen, url) if risen.get(NUM_DRAFTS) else None
    num_steps = num_outputs
    if is_sglang:  # it has an output for each token
        tokens = max(after.get(ACCEPT_LENGTH, 0.0), 1.0)
        num_steps /= tokens
        drafting = Drafting(types="speculation") if tokens > 1 else NONE
    else:
        first_tokens = risen.get("vllm:time_to_first_token_seconds_count", 0.0)
        tokens = max((risen.get("vllm:generation_tokens", 0.0) - first_tokens) / num_steps, 1.0)
        drafting = Drafting(len(acceptance.accepted)) if acceptance else NONE
    requests = seconds / elapsed  # that ran at a time, on average
    step_seconds = seconds / num_steps
    if drafting == NONE:
        raise SequoiaPlanError(
            f"{url}: nothing is drafted, and a step of {requests:.1f} requests takes "
            f"{step_seconds * 1000:.1f} ms; start the server with a draft to see what it gives"
        )
    speed = requests * tokens / step_seconds
    cell = Cell(
        batch=max(round(requests), 1),
        drafting=drafting,
        tokens_per_step=tokens,
        seconds=step_seconds,
        throughput=speed,
        low=speed,
        high=speed,
        speedup=1.0,
    )
    observed = ContextPlan(0, acceptance, (), (cell,), break_even_seconds=step_seconds / tokens)
    return EnginePlan(engine=engine, target=url, contexts=(observed,))


def diagnose_llama_server(
    server: Server, version: str, workload: Workload, report_status: Callable[[str], None]
) -> EnginePlan:
    """The plan from decoding prompts, and from requests with no room for more than short chains."""
    prompts = [server.encode(workload.prompts[index]) for index in workload.measuring]
    report_status(f"decoding {len(prompts)} prompts")
    recorded = [server.generate(prompt, workload.tokens) for prompt in prompts]
    acceptance = acceptance_of(recorded, f"{len(prompts)} prompts")
    length = len(acceptance.accepted)
    if not any(step.drafted for step in chain(*recorded)):
        raise SequoiaPlanError(f"{server.address}: {NOTHING_DRAFTED}")
    report_status("timing steps")
    rooms = product(prompts[:3], range(length + 1))
    short = (server.generate(prompt, room + 2, True) for prompt, room in rooms)
    timed = timed_steps(chain(*recorded, *short))
    if 0 not in timed:
        raise SequoiaPlanError(
            f"{server.address}: it drafts in every step, so none can be compared"
        )

    return make_plan(
        [(ChainModel(acceptance, length), StepTimes(tuple(timed.values())))],
        [1],
        lambda context_plan: tuple(
            f"--spec-draft-n-max {entry.speculative_tokens}"
            for entry in context_plan.schedule
            if entry.speculative_tokens
        ),
        engine="llamacpp",
        engine_version=version,
        target=server.address,
    )
