"""Measures what a plan for an engine needs, makes the plan, and verifies it."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts.plan import tool_version
from sequoia_plan.engines.chain import ChainModel
from sequoia_plan.engines.plan import (
    NONE,
    Cell,
    ChainAcceptance,
    ContextPlan,
    Drafting,
    EnginePlan,
    ScheduleEntry,
)
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.prediction import StepModel, best_drafting, predict_cells
from sequoia_plan.engines.timing import StepTimes, step_times
from sequoia_plan.engines.vllm import VllmPool
from sequoia_plan.engines.workload import (
    EngineRun,
    RunKind,
    measured_cell,
)

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
    acceptance: ChainAcceptance | None = None,
) -> Sequence[Measurement]:
    """Measures acceptance, and the times of the steps that choosing the best drafting needs.

    Steps of a length that turns out to be the best at some batch size and context are timed, too,
    if they were not.

    Args:
        pool: the engines.
        batches: batch sizes.
        max_length: most tokens to draft.
        contexts: tokens of every prompt; 0 decodes prompts as they are.
        acceptance: counts from elsewhere, such as a server's metrics, which hold for every
            context; None counts them here.

    Returns:
        What was measured at each context.
    """
    if acceptance is None:
        models = {context: pool.record(max_length, max(batches), context) for context in contexts}
    else:
        pool.ensure_running([NONE])  # it says whether several fit in memory
        models = dict.fromkeys(contexts, ChainModel(acceptance, max_length))
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
    default: Drafting = NONE,
    **metadata: Any,
) -> EnginePlan:
    """Computes the plan from acceptance and step times. No engine is needed.

    Of many settings at each length, the plan holds the best and those that `verify_plan` measures.
    `default` is what the engine does if it is not told, and `metadata` are fields of `EnginePlan`.
    """
    contexts = []
    for model, times in measurements:
        by_batch = (_worth_showing(predict_cells(model, times, b), default) for b in batches)
        cells = tuple(chain.from_iterable(by_batch))
        most_tokens = max(cell.tokens_per_step for cell in cells)
        part = ContextPlan(
            context=times.context,
            acceptance=model.acceptance,
            steps=times.steps,
            cells=cells,
            schedule=_make_schedule(model, times, max(batches)),
            target_seconds=dict(times.target_seconds),
            bounds={FREE: cells[0].throughput * most_tokens},
        )
        contexts.append(replace(part, lines=launch_options(part)))
    return EnginePlan(contexts=tuple(contexts), tool=tool_version(), **metadata)


def plan_of(
    pool: EnginePool, measurements: Iterable[Measurement], batches: Sequence[int]
) -> EnginePlan:
    """The plan from what was measured with these engines."""
    return make_plan(
        measurements,
        batches,
        pool.launch_options,
        pool.default_drafting,
        target=pool.target,
        draft=pool.draft or "",
        seconds=time.perf_counter() - pool.start_time,
        **pool.metadata(),
    )


def _make_schedule(model: StepModel, times: StepTimes, max_batch: int) -> tuple[ScheduleEntry, ...]:
    """The best number of speculative tokens for each batch size from 1 to `max_batch`."""
    schedule: list[ScheduleEntry] = []
    for batch in range(1, max_batch + 1):
        length = best_drafting(model, times, batch).length
        if schedule and schedule[-1].speculative_tokens == length:
            schedule[-1] = replace(schedule[-1], last=batch)
        else:
            schedule.append(ScheduleEntry(batch, batch, length))
    return tuple(schedule)


def best_by(cells: Iterable[Cell], key: Callable[[Drafting], Any]) -> list[Cell]:
    """The cell of the highest throughput for each key; of equal ones the first."""
    descending = sorted(cells, key=lambda cell: cell.drafting, reverse=True)
    ascending = sorted(descending, key=lambda cell: cell.throughput)
    return [*{key(cell.drafting): cell for cell in ascending}.values()]


def best_of_each(cells: Iterable[Cell]) -> list[Cell]:
    """The best of no speculation, chains of the draft, lookups, and one before the other."""
    return best_by(cells, lambda each: (each.length > 0, each.lookup_size > 0, each.types))


def _worth_showing(cells: Sequence[Cell], default: Drafting) -> list[Cell]:
    """Of one batch size the best cell of each length, lookups alone and before it, the default."""
    best = best_by(cells, lambda each: (each.length, each.lookup_size > 0, each.types))
    return [cell for cell in cells if cell in best or cell.drafting == default]


def verify_plan(pool: EnginePool, plan: EnginePlan) -> EnginePlan:
    """Measures the best cell of each way of drafting, and the default, on other prompts."""

    def run(kind: RunKind, round_index: int) -> EngineRun:
        pool.report_status(f"verifying, run {round_index + 1} of {VERIFY_REPEATS}")
        prompts = pool.workload.held_out
        return pool.run(kind, prompts[round_index::VERIFY_REPEATS] or prompts)

    wanted = {
        RunKind.of(cell, part.context): cell
        for part in plan.contexts
        for batch in part.batches
        for cells in [part.cells_at(batch)]
        for cell in cells
        if cell.drafting == pool.default_drafting or cell in best_of_each(cells)
    }
    runs = pool.run_in_rounds([*wanted], run, VERIFY_REPEATS)

    def with_measurement(cell: Cell, context: int) -> Cell:
        cell_runs = runs.get(RunKind.of(cell, context))
        return replace(cell, measured=measured_cell(cell_runs, cell.batch)) if cell_runs else cell

    contexts = [
        replace(part, cells=tuple(with_measurement(cell, part.context) for cell in part.cells))
        for part in plan.contexts
    ]
    return replace(plan, contexts=tuple(contexts))
