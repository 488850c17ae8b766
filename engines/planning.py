"""Makes the plan of an engine from what was measured, and verifies it."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from sequoia_plan.engines.plan import (
    Cell,
    ContextPlan,
    Drafting,
    EnginePlan,
    ScheduleEntry,
    best_of,
)
from sequoia_plan.engines.pool import EnginePool, EngineRun, RunKind, measured_cell
from sequoia_plan.engines.prediction import StepModel, StepTimes, predict_cells

FREE = "no setting passes, with this draft and its tokens free"
VERIFY_REPEATS = 3
"""Parts of the prompts, each of which is a run of its own."""
Measurement = tuple[StepModel, StepTimes]
"""What every way of drafting is predicted from, at one context."""


def make_plan(
    measurements: Iterable[Measurement],
    batches: Sequence[int],
    launch_options: Callable[[ContextPlan], tuple[str, ...]],
    **metadata: Any,
) -> EnginePlan:
    """Computes the plan from measurements, one for each context. No engine is needed.

    A plan has predictions (cells) for all `batches`, and of many settings with drafts of one length
    the best. `launch_options` are `EnginePool.launch_options`; `metadata` fields of `EnginePlan`.
    """
    contexts = []
    for model, times in measurements:
        cells = [cell for batch in batches for cell in predict_cells(model, times, batch)]
        best = best_by(cells, lambda drafting: (drafting.length, *way_of_drafting(drafting)))
        context_plan = ContextPlan(
            context=times.context,
            acceptance=model.acceptance,
            steps=times.steps,
            cells=tuple(cell for cell in cells if cell in best),
            schedule=schedule_up_to(max(batches), model, times),
            target_seconds=dict(times.target_seconds),
            # a step without speculation, if it yielded the most tokens of any way of drafting
            bounds={FREE: cells[0].throughput * max(cell.tokens_per_step for cell in cells)},
        )
        contexts.append(replace(context_plan, lines=launch_options(context_plan)))
    return EnginePlan(contexts=tuple(contexts), **metadata)


def schedule_up_to(max_batch: int, model: StepModel, times: StepTimes) -> tuple[ScheduleEntry, ...]:
    """The best draft length of every batch size from 1 on, with equal neighbours as one entry."""
    lengths = {
        batch: best_of(predict_cells(model, times, batch)).drafting.length
        for batch in range(1, max_batch + 1)
    }
    schedule = []
    for length, batches in groupby(lengths, lengths.__getitem__):
        sizes = [*batches]
        schedule.append(ScheduleEntry(sizes[0], sizes[-1], length))
    return tuple(schedule)


def plan_of(pool: EnginePool, measurements: Iterable[Measurement]) -> EnginePlan:
    """The plan from what was measured with these engines."""
    return make_plan(
        measurements,
        pool.batches,
        pool.launch_options,
        target=pool.target,
        draft=pool.draft or "",
        seconds=time.perf_counter() - pool.start_time,
        engine=pool.name,
        engine_version=pool.version,
    )


def best_by(cells: Iterable[Cell], key: Callable[[Drafting], Any]) -> list[Cell]:
    """The cell of the highest throughput for each batch size and key; of equal ones the first."""
    ascending = sorted(reversed([*cells]), key=lambda cell: cell.throughput)
    return [*{(cell.batch, key(cell.drafting)): cell for cell in ascending}.values()]


def way_of_drafting(drafting: Drafting) -> tuple[bool, bool, str]:
    """The kind of drafting: whether a draft drafts, whether text is looked up, and other types."""
    return drafting.length > 0, drafting.lookup_size > 0, drafting.types


def verify_plan(pool: EnginePool, plan: EnginePlan) -> EnginePlan:
    """Measures the best cell of each way of drafting on other prompts."""

    def run(kind: RunKind, round_index: int) -> EngineRun:
        """Decodes every third held-out prompt, beginning with another one in each round."""
        pool.report_status(f"verifying, run {round_index + 1} of {VERIFY_REPEATS}")
        prompts = pool.workload.held_out
        return pool.run(kind, prompts[round_index::VERIFY_REPEATS] or prompts)

    kinds = [
        RunKind(cell.drafting, cell.batch, plan_of_context.context)
        for plan_of_context in plan.contexts
        for cell in best_by(plan_of_context.cells, way_of_drafting)
    ]
    runs = pool.run_in_rounds(kinds, run, VERIFY_REPEATS)

    def with_measured(cell: Cell, context: int) -> Cell:
        """A cell with the figures of its runs, if it was one of those that ran."""
        kind = RunKind(cell.drafting, cell.batch, context)
        measured = measured_cell(runs[kind], cell.batch) if kind in runs else None
        return replace(cell, measured=measured)

    contexts = (
        replace(old, cells=tuple(with_measured(cell, old.context) for cell in old.cells))
        for old in plan.contexts
    )
    return replace(plan, contexts=tuple(contexts))
