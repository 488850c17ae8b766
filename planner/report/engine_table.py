"""A plan for another engine, in words and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sequoia_plan.artifacts.engine_plan import Cell, ChainAcceptance, EnginePlan

COLUMNS = ("batch", "K", "tokens/step", "step", "predicted", "measured", "over K=0")
KEY = "K: speculative tokens; predicted, measured: generated tokens a second"


def findings(plan: EnginePlan) -> list[str]:
    """A sentence for each batch size: the best number, and what it gains over no speculation."""
    found = []
    for batch in plan.batches:
        best, plain = plan.best(batch), plan.at(batch)[0]
        size = f"batch {batch}"
        if best.speculative_tokens == 0:
            runner = max(plan.at(batch)[1:], key=lambda cell: cell.throughput, default=None)
            lost = f"; {runner.speculative_tokens} would be {runner.speedup:.2f} times as fast" if runner else ""
            found.append(f"{size}: do not speculate ({plain.throughput:.1f} tokens/s{lost})")
            continue
        certain = best.low > plain.high
        gain = f"{best.speedup:.2f} times the {plain.throughput:.1f} tokens/s without" + (
            "" if certain else "; the intervals overlap, so the gain is not certain"
        )
        found.append(f"{size}: {best.speculative_tokens} ({best.throughput:.1f} tokens/s, {gain})")
    return found


def misses(plan: EnginePlan, most: float = 0.1) -> list[str]:
    """A sentence for each cell that was measured to be further from the promise than `most`, and which part of it missed."""
    found = []
    for cell in plan.cells:
        if cell.measured and abs(off := cell.throughput / cell.measured.throughput - 1) > most:
            parts = f"tokens a step {cell.tokens_per_step / cell.measured.tokens_per_step - 1:+.0%}, step {cell.seconds / cell.measured.seconds - 1:+.0%}"
            found.append(f"batch {cell.batch} with {cell.speculative_tokens}: predicted {off:+.0%} off ({parts})")
    return found


def rows(plan: EnginePlan, measured: bool = True) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """Each cell and its texts; a time that was not measured has a ~. With `measured`, tokens and times say it as predicted / measured."""
    for batch in plan.batches:
        for cell in plan.at(batch):
            seen, both = cell.measured, cell.measured if measured else None
            yield (
                cell,
                (
                    f"{cell.batch}",
                    f"{cell.speculative_tokens}",
                    f"{cell.tokens_per_step:.2f}" + (f" / {both.tokens_per_step:.2f}" if both else ""),
                    f"{'' if cell.timed else '~'}{cell.seconds * 1000:.1f}" + (f" / {both.seconds * 1000:.1f}" if both else "") + " ms",
                    f"{cell.throughput:.1f} ({cell.low:.1f}-{cell.high:.1f})",
                    f"{seen.throughput:.1f} ({seen.low:.1f}-{seen.high:.1f})" if seen else "",
                    f"{cell.speedup:.2f}x",
                ),
            )


def acceptance_lines(acceptance: ChainAcceptance, mean: Sequence[float] | Any) -> list[str]:
    """What was counted, and what it gives."""
    return [
        f"acceptance of the first 1, 2, ... tokens  {' '.join(f'{p:.3f}' for p in acceptance.survival)}  ({acceptance.drafts} chains; {acceptance.source})",
        f"expected tokens a step with 0, 1, ... speculative tokens  {' '.join(f'{each:.3f}' for each in mean)}",
    ]


def print_plan(plan: EnginePlan) -> None:
    """The table, the findings, and what to paste."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    first = plan.at(plan.batches[0])
    for line in acceptance_lines(plan.acceptance, [cell.tokens_per_step for cell in first]):
        console.print(line, soft_wrap=True, markup=False)
    verified = any(cell.measured for cell in plan.cells)
    shown = [number for number, name in enumerate(COLUMNS) if verified or name != "measured"]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for number in shown:
        table.add_column(COLUMNS[number], no_wrap=True, justify="right", min_width=len(COLUMNS[number]))
    for cell, texts in rows(plan, measured=False):
        table.add_row(*(texts[number] for number in shown), style="bold" if cell == plan.best(cell.batch) else None)
    console.print(table)
    console.print(KEY + ("; ~: on the line between two measured times" if any(not cell.timed for cell in plan.cells) else ""), markup=False)
    for line in (*findings(plan), *misses(plan)):
        console.print(line, soft_wrap=True, markup=False)
    if plan.engine == "sglang":
        console.print("from logs and responses: no SGLang was run", markup=False)
    for line in plan.lines:
        console.print(line, soft_wrap=True, markup=False)
    if not plan.lines:
        console.print("start the engine without speculation", markup=False)
