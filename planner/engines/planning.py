"""Makes a plan for an engine from measurements, and verifies a plan by further measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import (
    ChainAcceptance,
    EnginePlan,
    ScheduleEntry,
    StepSeconds,
)
from sequoia_plan.artifacts.uncertainty import Z95
from sequoia_plan.planner.engines import vllm
from sequoia_plan.planner.engines.chain import (
    StepTimes,
    best_length,
    effective_trials,
    make_schedule,
    median_step_seconds,
    predict_cells,
    tokens_by_length,
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
    acceptance: ChainAcceptance,
    steps: Sequence[StepSeconds],
    batches: Sequence[int],
    max_length: int,
    launch_lines: LaunchLines,
    **plan_fields: Any,
) -> EnginePlan:
    """Computes the plan from acceptance counts and step times. No engine is needed.

    Args:
        acceptance: counts of how far drafted chains are accepted.
        steps: measured times of a step, by batch size and number of speculative tokens.
        batches: batch sizes to plan for. They may lie between those that were timed, and beyond
            them by a factor of `MAX_EXTRAPOLATION` at most.
        max_length: maximum number of speculative tokens.
        launch_lines: writes the options to start the engine with, from the best number of
            speculative tokens for each range of batch sizes.
        plan_fields: further fields of the plan, such as the engine's name and version.

    Raises:
        ArgumentError: if a batch size is too far from those that were timed.
    """
    # the expected tokens a step and request with 0, 1, ... speculative tokens
    expected_tokens = tokens_by_length(acceptance, max_length)
    times = StepTimes(tuple(steps))
    low, high = min(times.batches), max(times.batches)
    for batch in batches:
        if not low <= batch * MAX_EXTRAPOLATION or not batch <= high * MAX_EXTRAPOLATION:
            raise ArgumentError(
                f"--batch {batch}: steps were timed with {low} to {high} requests, expected "
                f"{-(-low // MAX_EXTRAPOLATION)} to {high * MAX_EXTRAPOLATION}; time such batches, "
                "or leave it out"
            )
    # the best number of speculative tokens for each range of batch sizes, from 1 to the largest
    schedule = make_schedule(expected_tokens, times, max(batches))
    return EnginePlan(
        acceptance=acceptance,
        steps=tuple(steps),
        cells=predict_cells(expected_tokens, times, batches),
        schedule=schedule,
        lines=launch_lines(schedule),
        **plan_fields,
    )


def measure(
    pool: vllm.EnginePool,
    batches: Sequence[int],
    max_length: int,
    prompts: Sequence[int],
    acceptance: ChainAcceptance | None = None,
) -> tuple[ChainAcceptance, tuple[StepSeconds, ...], float]:
    """Measures acceptance, and the step times that choosing the best lengths needs.

    A length is a number of speculative tokens. Acceptance is counted with the largest one.

        count acceptance with max_length speculative tokens
        time steps with 0, 1 and max_length tokens
        repeat: time the lengths that are best for some batch size and were not timed,
            until there are none

    Args:
        pool: the engines.
        batches: batch sizes.
        max_length: maximum number of speculative tokens.
        prompts: indices of the prompts whose acceptance is counted.
        acceptance: counts from elsewhere, such as a server's metrics; None counts them here.

    Returns:
        Acceptance, step times, and the seconds that all of it took.
    """
    start_time = time.perf_counter()
    if acceptance is None:
        acceptance = _count_acceptance(pool, max_length, min(max(batches), len(prompts)), prompts)
    tokens = tokens_by_length(acceptance, max_length)
    rounds = pool.time_steps(sorted({0, 1, max_length}), batches, STEPS_PER_ROUND, _is_precise)
    while True:
        steps = median_step_seconds(rounds)
        best_lengths = {best_length(tokens, StepTimes(steps), batch) for batch in batches}
        untimed = best_lengths - {step.speculative_tokens for step in steps}
        if not untimed:
            return acceptance, steps, time.perf_counter() - start_time
        rounds |= pool.time_steps(sorted(untimed), batches, STEPS_PER_ROUND, _is_precise)


def _count_acceptance(
    pool: vllm.EnginePool, length: int, batch: int, prompts: Sequence[int]
) -> ChainAcceptance:
    """Counts how far drafted chains are accepted.

    The counts get their effective sample size, and the share of steps that drafted any token.

    Args:
        pool: the engines.
        length: number of speculative tokens.
        batch: number of requests decoded together.
        prompts: indices of the prompts to decode.
    """
    pool.ensure_running([length])
    acceptance, tokens_by_prompt = pool.measure_acceptance(length, batch, prompts)
    num_steps = sum(map(len, tokens_by_prompt))
    return replace(
        acceptance,
        trials=round(effective_trials(acceptance, tokens_by_prompt), 1),
        drafting_share=round(min(1.0, acceptance.drafts / max(num_steps, 1)), 4),
    )


def _is_precise(rounds: vllm.TimedRounds) -> bool:
    """True once every step time is precise enough, or MAX_ROUNDS were timed.

    A time is precise enough when half of its relative 95 % interval is at most MAX_ERROR. At
    least MIN_ROUNDS are timed.

    Args:
        rounds: by (batch size, number of speculative tokens): seconds and number of steps of each
            round.
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

    Args:
        pool: the engines.
        plan: the plan to verify, for each of its batch sizes.
        prompts: indices of prompts that the plan was not measured on.

    Returns:
        The plan with the measurements in its cells.
    """
    lengths = {}  # numbers of speculative tokens to measure, by batch size
    for batch in plan.batches:
        best = plan.best_cell(batch).speculative_tokens
        candidates = {0, best - 1, best, best + 1}
        planned = [cell.speculative_tokens for cell in plan.cells_at(batch)]
        lengths[batch] = [length for length in planned if length in candidates]
    return add_measurements(plan, run_cells(pool, lengths, prompts, VERIFY_REPEATS))


def run_cells(
    pool: vllm.EnginePool,
    lengths: Mapping[int, Sequence[int]],
    prompts: Sequence[int],
    repeats: int,
) -> dict[tuple[int, int], list[vllm.EngineRun]]:
    """Runs several numbers of speculative tokens (lengths) at each batch size, in turn.

    Each repeat runs all of them once, so that a drift of the machine's speed affects all.

    Args:
        pool: the engines.
        lengths: numbers of speculative tokens by batch size.
        prompts: indices of the prompts.
        repeats: runs of each batch size and length.

    Returns:
        Runs by (batch, length).
    """
    runs: dict[tuple[int, int], list[vllm.EngineRun]] = {}
    all_lengths = {length for batch_lengths in lengths.values() for length in batch_lengths}
    for group in pool.group_lengths(sorted(all_lengths)):  # engines that fit in memory together
        pool.ensure_running(group)
        for i in range(repeats):
            for batch, batch_lengths in lengths.items():
                pool.report_status(f"verifying batch {batch}, run {i + 1} of {repeats}")
                for length in batch_lengths:
                    if length in group:
                        run = pool.run(length, batch, run_prompts(prompts, batch))
                        runs.setdefault((batch, length), []).append(run)
    return runs


def run_prompts(prompts: Sequence[int], batch: int) -> list[int]:
    """Selects prompts so that a run takes about as long at every batch size.

    At least MIN_RUN_PROMPTS are selected if there are as many, and at least twice as many as are
    decoded together, for which prompts repeat if necessary.

    Args:
        prompts: indices of all prompts.
        batch: number of requests decoded together.
    """
    count = max(2 * batch, min(len(prompts), MIN_RUN_PROMPTS))
    return [prompts[i % len(prompts)] for i in range(count)]


def add_measurements(
    plan: EnginePlan, runs: Mapping[tuple[int, int], Sequence[vllm.EngineRun]]
) -> EnginePlan:
    """Returns the plan with the measured runs summarized in its cells.

    Args:
        plan: the plan; a cell is its prediction for one batch size and one number of speculative
            tokens.
        runs: by (batch size, number of speculative tokens).
    """
    cells = []
    for cell in plan.cells:
        cell_runs = runs.get((cell.batch, cell.speculative_tokens))
        measured = vllm.measured_cell(cell_runs, cell.batch) if cell_runs else None
        cells.append(replace(cell, measured=measured))
    return replace(plan, cells=tuple(cells))


def steps_of_plan(plan: EnginePlan, path: str) -> tuple[StepSeconds, ...]:
    """Returns the step times of an earlier plan from the file `path`.

    Raises:
        SequoiaPlanError: if it has none.
    """
    if not plan.steps:
        raise SequoiaPlanError(
            f"--times {path}: holds no step times; expected a plan that an engine was timed for"
        )
    return plan.steps
