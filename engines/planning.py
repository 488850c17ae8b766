"""Makes a plan for an engine from measurements, and verifies a plan by further measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.uncertainty import Z95
from sequoia_plan.engines import vllm
from sequoia_plan.engines.chain import (
    StepKind,
    best_length,
    effective_trials,
    make_schedule,
    median_step_seconds,
    predict_cells,
    times_by_context,
    tokens_by_length,
)
from sequoia_plan.engines.plan import (
    Cell,
    ChainAcceptance,
    ContextChoice,
    EnginePlan,
    ScheduleEntry,
    StepSeconds,
)

STEPS_PER_ROUND = 12
"""Full steps that are timed in one round."""
MAX_ERROR = 0.05
"""Rounds go on until the half width of every step's 95 % interval is below this fraction."""
MIN_ROUNDS, MAX_ROUNDS = 4, 8
VERIFY_REPEATS = 3
"""How often `verify_plan` runs each batch size and number of tokens."""
MIN_RUN_PROMPTS = 16
"""Prompts of a run, at small batch sizes."""
MAX_EXTRAPOLATION = 2
"""Batch sizes may be so many times as large as the largest timed one, or as small as the smallest
divided by it."""
LaunchLines = Callable[[Sequence[ScheduleEntry]], tuple[str, ...]]
"""Writes the options that an engine starts with, from the best numbers by batch size."""


def make_plan(
    acceptance: ChainAcceptance | Mapping[int, ChainAcceptance],
    steps: Sequence[StepSeconds],
    batches: Sequence[int],
    max_length: int,
    launch_lines: LaunchLines,
    **plan_fields: Any,
) -> EnginePlan:
    """Computes the plan from acceptance counts and step times. No engine is needed."""
    counts = acceptance if isinstance(acceptance, Mapping) else {0: acceptance}
    cells: list[Cell] = []
    choices: list[ContextChoice] = []
    schedule: tuple[ScheduleEntry, ...] = ()
    lines: tuple[str, ...] = ()
    for times in times_by_context(steps):
        low, high = min(times.batches), max(times.batches)
        for batch in batches:
            if not low <= batch * MAX_EXTRAPOLATION or not batch <= high * MAX_EXTRAPOLATION:
                raise ArgumentError(
                    f"--batch {batch}: steps were timed with {low} to {high} requests, expected "
                    f"{-(-low // MAX_EXTRAPOLATION)} to {high * MAX_EXTRAPOLATION}; "
                    "time such batches, or leave it out"
                )
        # the expected tokens a step and request with 0, 1, ... speculative tokens
        expected_tokens = tokens_by_length(counts.get(times.context) or counts[0], max_length)
        cells += predict_cells(expected_tokens, times, batches)
        # the best number for each range of batch sizes, from 1 to the largest
        best = make_schedule(expected_tokens, times, max(batches))
        if times.context:
            own_counts = counts.get(times.context)
            choices.append(ContextChoice(times.context, best, launch_lines(best), own_counts))
        else:
            schedule, lines = best, launch_lines(best)
    return EnginePlan(
        acceptance=counts[min(counts)],
        steps=tuple(steps),
        cells=tuple(cells),
        schedule=schedule,
        lines=lines,
        by_context=tuple(choices),
        **plan_fields,
    )


def measure(
    pool: vllm.EnginePool,
    batches: Sequence[int],
    max_length: int,
    prompts: Sequence[int],
    acceptance: ChainAcceptance | None = None,
    contexts: Sequence[int] = (0,),
) -> tuple[dict[int, ChainAcceptance], tuple[StepSeconds, ...], float]:
    """Measures acceptance, and the step times that choosing the best lengths needs.

    A length is a number of speculative tokens. Acceptance is counted with the largest one.

        count acceptance with max_length speculative tokens at each context
        time steps with 0, 1 and max_length tokens
        repeat: time the lengths that are best for some batch size and context and were not timed,
            until there are none

    Args:
        pool: the engines.
        batches: batch sizes.
        max_length: maximum number of speculative tokens.
        prompts: indices of the prompts whose acceptance is counted.
        acceptance: counts from elsewhere, such as a server's metrics, which hold for every
            context; None counts them here.
        contexts: contexts to measure at, as in `StepKind`.

    Returns:
        Acceptance by context, step times, and the seconds that all of it took.
    """
    start_time = time.perf_counter()
    if any(contexts):  # an engine that takes no such context ends this before anything is measured
        pool.ensure_running([max_length])
        pool.check_context(max(contexts))
    if acceptance is not None:
        acceptance_by_context = {0: acceptance}
    else:
        batch = min(max(batches), len(prompts))
        acceptance_by_context = {
            context: _count_acceptance(pool, max_length, batch, prompts, context)
            for context in contexts
        }
    tokens = {
        context: tokens_by_length(counts, max_length)
        for context, counts in acceptance_by_context.items()
    }
    lengths = sorted({0, 1, max_length})
    rounds = pool.time_steps(lengths, batches, STEPS_PER_ROUND, _is_precise, contexts)
    while True:
        steps = median_step_seconds(rounds)
        best_lengths = {
            best_length(tokens.get(times.context) or tokens[0], times, batch)
            for times in times_by_context(steps)
            for batch in batches
        }
        untimed = best_lengths - {step.speculative_tokens for step in steps}
        if not untimed:
            return acceptance_by_context, steps, time.perf_counter() - start_time
        rounds |= pool.time_steps(sorted(untimed), batches, STEPS_PER_ROUND, _is_precise, contexts)


def _count_acceptance(
    pool: vllm.EnginePool, length: int, batch: int, prompts: Sequence[int], context: int
) -> ChainAcceptance:
    """Counts how far drafted chains are accepted.

    The counts get their effective sample size, and the share of steps that drafted any token.
    """
    pool.ensure_running([length])
    acceptance, tokens_by_prompt = pool.measure_acceptance(length, batch, prompts, context)
    num_steps = sum(map(len, tokens_by_prompt))
    return replace(
        acceptance,
        trials=round(effective_trials(acceptance, tokens_by_prompt), 1),
        drafting_share=round(min(1.0, acceptance.drafts / max(num_steps, 1)), 4),
    )


def _is_precise(rounds: vllm.TimedRounds) -> bool:
    """True once every step time is precise enough, or MAX_ROUNDS were timed.

    A time is precise enough when half of its relative 95 % interval is at most MAX_ERROR. At least
    MIN_ROUNDS are timed.
    """
    num_rounds = min(map(len, rounds.values()))
    if num_rounds < MIN_ROUNDS:
        return False
    if num_rounds >= MAX_ROUNDS:
        return True
    return all(Z95 * step.error <= MAX_ERROR for step in median_step_seconds(rounds))


def verify_plan(pool: vllm.EnginePool, plan: EnginePlan, prompts: Sequence[int]) -> EnginePlan:
    """Measures throughput with the plan's best number of speculative tokens, on other prompts.

    For comparison, it is also measured with one token fewer, one more, and without speculation.
    """
    kinds = []
    for part in plan.parts():
        for batch in part.batches:
            best = part.best_cell(batch).speculative_tokens
            kinds += [
                StepKind(batch, cell.speculative_tokens, cell.context)
                for cell in part.cells_at(batch)
                if cell.speculative_tokens in (0, best - 1, best, best + 1)
            ]
    return add_measurements(plan, run_cells(pool, kinds, prompts, VERIFY_REPEATS))


def run_cells(
    pool: vllm.EnginePool,
    kinds: Sequence[StepKind],
    prompts: Sequence[int],
    repeats: int,
) -> dict[StepKind, list[vllm.EngineRun]]:
    """Runs engines with several kinds of steps, in turn.

    Each repeat runs all of them once, so that a drift of the machine's speed affects all.
    """
    runs: dict[StepKind, list[vllm.EngineRun]] = {kind: [] for kind in kinds}
    lengths = sorted({kind.length for kind in kinds})
    for group in pool.group_lengths(lengths):  # engines that fit in memory together
        pool.ensure_running(group)
        for i in range(repeats):
            for kind in kinds:
                if kind.length in group:
                    pool.report_status(f"verifying batch {kind.batch}, run {i + 1} of {repeats}")
                    run = pool.run(
                        kind.length,
                        kind.batch,
                        run_prompts(prompts, kind.batch),
                        context=kind.context,
                    )
                    runs[kind].append(run)
    return runs


def run_prompts(prompts: Sequence[int], batch: int) -> list[int]:
    """Selects prompts so that a run takes about as long at every batch size.

    At least MIN_RUN_PROMPTS are selected if there are as many, and at least twice as many as are
    decoded together, for which prompts repeat if necessary.
    """
    count = max(2 * batch, min(len(prompts), MIN_RUN_PROMPTS))
    return [prompts[i % len(prompts)] for i in range(count)]


def add_measurements(
    plan: EnginePlan, runs: Mapping[StepKind, Sequence[vllm.EngineRun]]
) -> EnginePlan:
    """Returns the plan with the measured runs summarized in its cells."""
    cells = []
    for cell in plan.cells:
        cell_runs = runs.get(StepKind(cell.batch, cell.speculative_tokens, cell.context))
        measured = vllm.measured_cell(cell_runs, cell.batch) if cell_runs else None
        cells.append(replace(cell, measured=measured))
    return replace(plan, cells=tuple(cells))


def steps_of_plan(plan: EnginePlan, path: str) -> tuple[StepSeconds, ...]:
    """Returns the step times of an earlier plan from the file `path`."""
    if not plan.steps:
        raise SequoiaPlanError(
            f"--times {path}: holds no step times; expected a plan that an engine was timed for"
        )
    return plan.steps
