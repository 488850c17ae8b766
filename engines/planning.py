"""Measures what a plan for an engine needs, makes the plan, and verifies it."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.artifacts.plan import tool_version
from sequoia_plan.engines.chain import ChainModel
from sequoia_plan.engines.plan import (
    Cell,
    ChainAcceptance,
    ContextPlan,
    EnginePlan,
    ScheduleEntry,
)
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.prediction import StepModel, best_drafting, predict_cells
from sequoia_plan.engines.timing import StepTimes, step_times
from sequoia_plan.engines.workload import (
    NONE,
    Drafting,
    EngineRun,
    RunKind,
    measured_cell,
)

VERIFY_REPEATS = 3


Measurement = tuple[StepModel, StepTimes]
"""What every way of drafting is predicted from, at one context."""


def measure(
    pool: EnginePool,
    batches: Sequence[int],
    max_length: int,
    contexts: Sequence[int] = (0,),
    acceptance: ChainAcceptance | None = None,
) -> tuple[list[Measurement], float]:
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
        What was measured at each context, and the seconds that all of it took.
    """
    start_time = time.perf_counter()
    if acceptance is None:
        models = {context: pool.record(max_length, max(batches), context) for context in contexts}
    else:
        pool.ensure_running([NONE])  # it says whether several fit in memory
        models = dict.fromkeys(contexts, ChainModel(acceptance, max_length))
    rounds: dict[RunKind, list[EngineRun]] = {}
    untimed = pool.timed_draftings(max_length)
    while untimed:
        kinds = [RunKind(*kind) for kind in product(untimed, batches, contexts)]
        rounds |= pool.run_in_rounds(kinds, pool.time_round, pool.rounds)
        measurements = [(model, step_times(rounds, context)) for context, model in models.items()]
        best_lengths = {
            best_drafting(model, times, batch).length
            for model, times in measurements
            for batch in batches
        }
        timed_lengths = {kind.drafting.length for kind in rounds}
        untimed = [Drafting(length) for length in sorted(best_lengths - timed_lengths)]
    return measurements, time.perf_counter() - start_time


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
        _check_batches(batches, times)
        cells = chain.from_iterable(
            _worth_showing(predict_cells(model, times, batch), default) for batch in batches
        )
        part = ContextPlan(
            context=times.context,
            acceptance=model.acceptance,
            steps=times.steps,
            cells=tuple(cells),
            schedule=_make_schedule(model, times, max(batches)),
            draft_pass_seconds=times.pass_seconds,
        )
        contexts.append(replace(part, lines=launch_options(part)))
    return EnginePlan(contexts=tuple(contexts), tool=tool_version(), **metadata)


def plan_of(
    pool: EnginePool,
    measurements: Iterable[Measurement],
    batches: Sequence[int],
    seconds: float,
) -> EnginePlan:
    """The plan from what was measured with these engines."""
    workload, metadata = pool.workload, pool.metadata()
    settings = {
        "temperature": workload.temperature,
        "tokens": workload.tokens,
        "prompts": workload.num_measuring,
        **metadata.pop("settings"),
    }
    return make_plan(
        measurements,
        batches,
        pool.launch_options,
        pool.default_drafting,
        target=pool.target,
        draft=pool.draft or "",
        settings=settings,
        seconds=round(seconds, 1),
        **metadata,
    )


def _check_batches(batches: Iterable[int], times: StepTimes) -> None:
    """Raises if a batch size is not within those that were timed."""
    smallest, largest = min(times.by_batch), max(times.by_batch)
    for batch in batches:
        if not smallest <= batch <= largest:
            raise ArgumentError(
                f"--batch {batch}: steps were timed with {smallest} to {largest} requests; "
                "time such batches, or leave it out"
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


def _worth_showing(cells: Sequence[Cell], default: Drafting) -> list[Cell]:
    """Of one batch size the cells without a variant, the best of each length, those to verify."""
    by_throughput = sorted(reversed(cells), key=lambda cell: cell.throughput)
    best_by_length = {cell.speculative_tokens: cell for cell in by_throughput}  # of equals, first
    shown = {*best_by_length.values(), *cells_to_verify(cells, default)}
    return [cell for cell in cells if not cell.variant or cell in shown]


def cells_to_verify(cells: Sequence[Cell], default: Drafting) -> list[Cell]:
    """Of one batch size no speculation, the best speculation, its neighbours and the default."""
    speculative = {Drafting.of(cell): cell for cell in cells if cell.speculative_tokens}
    best = max(speculative, key=lambda drafting: speculative[drafting].throughput)
    wanted = {NONE, best, *neighbours(best, speculative), default}
    return [cell for cell in cells if Drafting.of(cell) in wanted]


def neighbours(best: Drafting, draftings: Iterable[Drafting]) -> list[Drafting]:
    """The next lengths at the same setting, and the next settings at the same length."""
    near = []
    for fixed in (lambda drafting: drafting[1:], lambda drafting: drafting[0]):
        row = sorted(drafting for drafting in draftings if fixed(drafting) == fixed(best))
        index = row.index(best)
        near += row[max(index - 1, 0) : index] + row[index + 1 : index + 2]
    return near


def verify_plan(pool: EnginePool, plan: EnginePlan) -> EnginePlan:
    """Measures the cells of `cells_to_verify` on other prompts."""

    def run(kind: RunKind, round_index: int) -> EngineRun:
        pool.report_status(f"verifying, run {round_index + 1} of {VERIFY_REPEATS}")
        return pool.run(kind, pool.workload.held_out)

    kinds = [
        RunKind.of(cell, part.context)
        for part in plan.contexts
        for batch in part.batches
        for cell in cells_to_verify(part.cells_at(batch), pool.default_drafting)
    ]
    runs = pool.run_in_rounds(kinds, run, VERIFY_REPEATS)

    def with_measurement(cell: Cell, context: int) -> Cell:
        cell_runs = runs.get(RunKind.of(cell, context))
        return replace(cell, measured=measured_cell(cell_runs, cell.batch)) if cell_runs else cell

    contexts = [
        replace(part, cells=tuple(with_measurement(cell, part.context) for cell in part.cells))
        for part in plan.contexts
    ]
    return replace(plan, contexts=tuple(contexts))
