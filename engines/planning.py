"""Measures what a plan for an engine needs, makes the plan, and verifies it."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, product
from typing import Any

from msgspec.structs import replace

from sequoia_plan.engines.plan import (
    NONE,
    Cell,
    ContextPlan,
    Drafting,
    EnginePlan,
    ScheduleEntry,
    best_of,
)
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.prediction import StepModel, best_drafting, predict_cells
from sequoia_plan.engines.timing import StepTimes, step_times
from sequoia_plan.engines.vllm import VllmPool
from sequoia_plan.engines.workload import EngineRun, RunKind, measured_cell

TIMING_ROUNDS = 6
FREE = "no setting passes, with this draft and its tokens free"
VERIFY_REPEATS = 3
"""Parts of the prompts, each of which is a run of its own."""


Measurement = tuple[StepModel, StepTimes]
"""What every way of drafting is predicted from, at one context."""


def measure(
    pool: VllmPool,
    batches: Sequence[int],
    max_length: int,
    contexts: Sequence[int] = (0,),
) -> Sequence[Measurement]:
    """Measures acceptance, and the times of the steps that choosing the best drafting needs.

    Steps of a length that turns out to be the best at some batch size and context are timed, too,
    if they were not.

    Args:
        pool: the engines.
        batches: batch sizes.
        max_length: most tokens to draft.
        contexts: tokens of every prompt; 0 decodes prompts as they are.

    Returns:
        What was measured at each context.
    """
    models = {context: pool.record(max_length, max(batches), context) for context in contexts}
    rounds: dict[RunKind, list[EngineRun]] = {}
    untimed = [NONE, *map(Drafting, sorted({1, max_length}))]
    while untimed:
        kinds = [RunKind(*kind) for kind in product(untimed, batches, contexts)]
        rounds |= pool.run_in_rounds(kinds, pool.time_round, TIMING_ROUNDS)
        measurements = [(model, step_times(rounds, context)) for context, model in models.items()]
        best_lengths = {
            best_drafting(model, times, batch).length
            for model, times in measurements
            for batch in batches
        }
        timed_lengths = {kind.drafting.length for kind in rounds}
        untimed = [Drafting(length) for length in sorted(best_lengths - timed_lengths)]
    return measurements


def make_plan(
    measurements: Iterable[Measurement],
    batches: Sequence[int],
    launch_options: Callable[[ContextPlan], tuple[str, ...]],
    **metadata: Any,
) -> EnginePlan:
    """Computes the plan from acceptance and step times. No engine is needed.

    Of many settings at each length, the plan holds the best. `metadata` are fields of `EnginePlan`.
    """
    contexts = []
    for model, times in measurements:
        cells = [cell for batch in batches for cell in predict_cells(model, times, batch)]
        best = best_by(cells, lambda each: (each.length, each.lookup_size > 0, each.types))
        part = ContextPlan(
            context=times.context,
            acceptance=model.acceptance,
            steps=times.steps,
            cells=tuple(cell for cell in cells if cell in best),
            schedule=_make_schedule(model, times, max(batches)),
            target_seconds=dict(times.target_seconds),
            bounds={FREE: cells[0].throughput * max(cell.tokens_per_step for cell in cells)},
        )
        contexts.append(replace(part, lines=launch_options(part)))
    return EnginePlan(contexts=tuple(contexts), **metadata)


def plan_of(
    pool: EnginePool, measurements: Iterable[Measurement], batches: Sequence[int]
) -> EnginePlan:
    """The plan from what was measured with these engines."""
    return make_plan(
        measurements,
        batches,
        pool.launch_options,
        target=pool.target,
        draft=pool.draft or "",
        seconds=time.perf_counter() - pool.start_time,
        engine=pool.name,
        engine_version=pool.version,
    )


def _make_schedule(model: StepModel, times: StepTimes, max_batch: int) -> tuple[ScheduleEntry, ...]:
    """The best number of speculative tokens for each batch size from 1 to `max_batch`."""
    every = range(1, max_batch + 1)
    best = (best_of(predict_cells(model, times, batch)) for batch in every)
    alike = ([*cells] for _, cells in groupby(best, lambda cell: cell.drafting.length))
    return tuple(ScheduleEntry(a[0].batch, a[-1].batch, a[0].drafting.length) for a in alike)


def best_by(cells: Iterable[Cell], key: Callable[[Drafting], Any]) -> list[Cell]:
    """The cell of the highest throughput for each batch size and key; of equal ones the first."""
    backwards = reversed([*cells])
    ascending = sorted(backwards, key=lambda cell: cell.throughput)
    return [*{(cell.batch, key(cell.drafting)): cell for cell in ascending}.values()]


def best_of_each(cells: Iterable[Cell]) -> list[Cell]:
    """The best of no speculation, chains of the draft, lookups, and one before the other."""
    return best_by(cells, lambda each: (each.length > 0, each.lookup_size > 0, each.types))


def verify_plan(pool: EnginePool, plan: EnginePlan) -> EnginePlan:
    """Measures the best cell of each way of drafting on other prompts."""

    def run(kind: RunKind, round_index: int) -> EngineRun:
        pool.report_status(f"verifying, run {round_index + 1} of {VERIFY_REPEATS}")
        prompts = pool.workload.held_out
        return pool.run(kind, prompts[round_index::VERIFY_REPEATS] or prompts)

    wanted = [
        RunKind(cell.drafting, cell.batch, part.context)
        for part in plan.contexts
        for cell in part.cells
        if cell in best_of_each(part.cells)
    ]
    runs = pool.run_in_rounds(wanted, run, VERIFY_REPEATS)
    contexts = []
    for part in plan.contexts:
        cells = []
        for cell in part.cells:
            found = runs.get(RunKind(cell.drafting, cell.batch, part.context))
            cells.append(replace(cell, measured=measured_cell(found, cell.batch)))
        contexts.append(replace(part, cells=tuple(cells)))
    return replace(plan, contexts=tuple(contexts))
