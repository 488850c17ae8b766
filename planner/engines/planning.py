"""From measurements to a plan for an engine, and from a plan to what it then measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import ChainAcceptance, EnginePlan, Range, StepSeconds
from sequoia_plan.artifacts.uncertainty import Z95
from sequoia_plan.planner.engines import vllm
from sequoia_plan.planner.engines.chain import Times, best_length, cells, effective_trials, schedule, step_seconds, tokens

STEPS, REPEATS = 12, 3
"""Over how many steps a step is timed in one round, and how often `verify` runs a cell."""
PRECISION, FEWEST, MOST = 0.05, 4, 8
"""Rounds go on until every step's time is known to this relative error with 95 % confidence; how many there are at least and at most."""
Lines = Callable[[Sequence[Range]], tuple[str, ...]]


def decide(acceptance: ChainAcceptance, steps: Sequence[StepSeconds], batches: Sequence[int], most: int, lines: Lines, **known: Any) -> EnginePlan:
    """The plan that follows from counts and times; no engine is needed.

    Args:
        batches: sizes to promise for; they may lie between those that were timed.
        most: speculative tokens, at most.
        lines: what to start the engine with, from the schedule.
        known: further fields of the plan.
    """
    found, times = tokens(acceptance, most), Times(tuple(steps))
    ranges = schedule(found, times, max(batches))
    return EnginePlan(acceptance=acceptance, steps=tuple(steps), cells=cells(found, times, batches), schedule=ranges, lines=lines(ranges), **known)


def measure(
    engines: vllm.Engines, batches: Sequence[int], most: int, prompts: Sequence[int], acceptance: ChainAcceptance | None = None
) -> tuple[ChainAcceptance, tuple[StepSeconds, ...], float]:
    """Counts at the largest length, and step times for 0, 1, the largest, and every length that is then best for some batch size.

    Args:
        prompts: numbers of the prompts whose acceptance is counted.
        acceptance: counts from elsewhere, as of a server's metrics.

    Returns:
        Counts, times, and the seconds that it took.
    """
    began = time.perf_counter()
    if acceptance is None:
        engines.use([most])
        acceptance, gave = engines.acceptance(most, min(max(batches), len(prompts)), prompts)
        share = min(1.0, acceptance.drafts / max(sum(map(len, gave)), 1))
        acceptance = replace(acceptance, trials=round(effective_trials(acceptance, gave), 1), share=round(share, 4))
    found = tokens(acceptance, most)
    rounds = engines.time(sorted({0, 1, most}), batches, STEPS, _enough)
    while True:
        steps = step_seconds(rounds)
        wanted = {best_length(found, Times(steps), batch) for batch in batches} - {step.speculative_tokens for step in steps}
        if not wanted:
            return acceptance, steps, time.perf_counter() - began
        rounds |= engines.time(sorted(wanted), batches, STEPS, _enough)


def _enough(rounds: vllm.Rounds) -> bool:
    """Are the times of steps known well enough, or is one more round of little use?"""
    done = min(map(len, rounds.values()))
    return done >= MOST or (done >= FEWEST and all(Z95 * step.error <= PRECISION for step in step_seconds(rounds)))


def verify(engines: vllm.Engines, plan: EnginePlan, prompts: Sequence[int]) -> EnginePlan:
    """The plan with what the best length, its neighbours and none measured on other prompts, for each batch size; they take turns."""
    chosen = {batch: plan.best(batch).speculative_tokens for batch in plan.batches}
    lengths = {batch: [cell.speculative_tokens for cell in plan.at(batch) if cell.speculative_tokens in _near(chosen[batch])] for batch in chosen}
    return with_measured(plan, run_cells(engines, lengths, prompts, REPEATS))


def run_cells(engines: vllm.Engines, lengths: Mapping[int, Sequence[int]], prompts: Sequence[int], repeats: int) -> dict[tuple[int, int], list[vllm.Run]]:
    """Runs by (batch, length); engines that are kept together take turns in every repeat."""
    found: dict[tuple[int, int], list[vllm.Run]] = {}
    every = sorted({length for each in lengths.values() for length in each})
    for group in engines.groups(every):
        engines.use(group)
        for number in range(repeats):
            for batch, wanted in lengths.items():
                engines.say(f"verifying batch {batch}, run {number + 1} of {repeats}")
                for length in (each for each in wanted if each in group):
                    found.setdefault((batch, length), []).append(engines.run(length, batch, share(prompts, batch)))
    return found


def share(prompts: Sequence[int], batch: int) -> list[int]:
    """So many of the prompts that decoding takes about as long at every batch size; at least twice the batch size, from the start again if need be."""
    wanted = max(2 * batch, min(len(prompts), 16))
    return [prompts[number % len(prompts)] for number in range(wanted)]


def with_measured(plan: EnginePlan, runs: Mapping[tuple[int, int], Sequence[vllm.Run]]) -> EnginePlan:
    """The plan with what was measured in its cells."""

    def measured(batch: int, length: int) -> Any:
        found = runs.get((batch, length))
        return vllm.measured_cell(found, batch) if found else None

    return replace(plan, cells=tuple(replace(cell, measured=measured(cell.batch, cell.speculative_tokens)) for cell in plan.cells))


def steps_of(plan: EnginePlan, path: str) -> tuple[StepSeconds, ...]:
    """The step times of an earlier plan.

    Raises:
        SequoiaPlanError: if it has none.
    """
    if not plan.steps:
        raise SequoiaPlanError(f"--times {path}: holds no step times; expected a plan that an engine was timed for")
    return plan.steps


def _near(length: int) -> set[int]:
    return {0, length - 1, length, length + 1}
