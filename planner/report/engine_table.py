"""A plan for another engine as sentences and as a table in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sequoia_plan.artifacts.engine_plan import Cell, ChainAcceptance, EnginePlan

COLUMNS = ("batch", "K", "setting", "tokens/step", "step", "predicted", "measured", "over K=0")
COLUMNS_NOTE = "K: speculative tokens; predicted, measured: generated tokens a second"


def findings(plan: EnginePlan) -> list[str]:
    """Describes the best number of speculative tokens and its gain, for each batch size."""
    sentences = []
    for batch in plan.batches:
        best = plan.best_cell(batch)
        plain, *speculative = plan.cells_at(batch)  # the first cell is of 0 speculative tokens
        if best.speculative_tokens:
            gain = f"{best.speedup:.2f} times the {plain.throughput:.1f} tokens/s without"
            if best.low <= plain.high:
                gain += "; the intervals overlap, so the gain is not certain"
            finding = f"{_name(best)} ({best.throughput:.1f} tokens/s, {gain})"
        else:
            next_best = max(speculative, key=lambda cell: cell.throughput, default=None)
            loss = ""
            if next_best:
                loss = f"; {_name(next_best)} would be {next_best.speedup:.2f} times as fast"
            finding = f"do not speculate ({plain.throughput:.1f} tokens/s{loss})"
        sentences.append(f"batch {batch}: {finding}")
    return sentences


def prediction_errors(plan: EnginePlan, tolerance: float = 0.1) -> list[str]:
    """Describes each prediction whose throughput differs much from the measured one.

    The sentence also has the errors of the predicted tokens a step and of the step's time.

    Args:
        plan: the plan. Some of its cells, each for a batch size and a number of speculative
            tokens, have a measurement beside the prediction.
        tolerance: largest relative error of throughput that is not described.
    """
    sentences = []
    for cell in plan.cells:
        measured = cell.measured
        if not measured:
            continue
        error = cell.throughput / measured.throughput - 1
        if abs(error) > tolerance:
            tokens_error = cell.tokens_per_step / measured.tokens_per_step - 1
            step_error = cell.seconds / measured.seconds - 1
            sentences.append(
                f"batch {cell.batch} with {_name(cell)}: predicted {error:+.0%} off "
                f"(tokens a step {tokens_error:+.0%}, step {step_error:+.0%})"
            )
    return sentences


def table_rows(
    plan: EnginePlan, compares_parts: bool = True
) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """Yields each cell, which is of one batch size and one number of speculative tokens.

    With it come its texts, one for each of COLUMNS. A `~` before a step time says that it was
    interpolated, not measured.

    Args:
        plan: the plan.
        compares_parts: write tokens a step and step time as predicted / measured.
    """
    for batch in plan.batches:
        for cell in plan.cells_at(batch):
            measured = cell.measured
            tokens = f"{cell.tokens_per_step:.2f}"
            step = f"{'' if cell.is_timed else '~'}{cell.seconds * 1000:.1f}"
            if measured and compares_parts:
                tokens += f" / {measured.tokens_per_step:.2f}"
                step += f" / {measured.seconds * 1000:.1f}"
            texts = (
                f"{cell.batch}",
                f"{cell.speculative_tokens}",
                cell.variant,
                tokens,
                f"{step} ms",
                _with_range(cell.throughput, cell.low, cell.high),
                _with_range(measured.throughput, measured.low, measured.high) if measured else "",
                f"{cell.speedup:.2f}x",
            )
            yield cell, texts


def _name(cell: Cell) -> str:
    """A cell's number of speculative tokens, and its further setting, as "2 with p-min 0.6"."""
    return f"{cell.speculative_tokens}{cell.variant and f' with {cell.variant}'}"


def _with_range(value: float, low: float, high: float) -> str:
    """A value and the range around it, as "81.2 (75.0-88.1)"."""
    return f"{value:.1f} ({low:.1f}-{high:.1f})"


def acceptance_lines(acceptance: ChainAcceptance, mean_tokens: Sequence[float]) -> list[str]:
    """Describes acceptance and expected tokens in two lines.

    Args:
        acceptance: counts of how far drafted chains are accepted.
        mean_tokens: expected tokens a step with 0, 1, ... speculative tokens.
    """
    survival = " ".join(f"{p:.3f}" for p in acceptance.survival)
    mean = " ".join(f"{tokens:.3f}" for tokens in mean_tokens)
    source = f"({acceptance.drafts} chains; {acceptance.source})"
    return [
        f"acceptance of the first 1, 2, ... tokens  {survival}  {source}",
        f"expected tokens a step with 0, 1, ... speculative tokens  {mean}",
    ]


def plan_acceptance_lines(plan: EnginePlan) -> list[str]:
    """Describes a plan's acceptance and expected tokens, which are the same at all batch sizes."""
    cells = [cell for cell in plan.cells_at(plan.batches[0]) if not cell.variant]
    return acceptance_lines(plan.acceptance, [cell.tokens_per_step for cell in cells])


def print_plan(plan: EnginePlan) -> None:
    """Prints the acceptance, the table, the findings, and the options to start the engine with."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)

    def print_lines(lines: Sequence[str]) -> None:
        """Print each text as a line of its own, which the terminal wraps."""
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)

    print_lines(plan_acceptance_lines(plan))
    is_verified = any(cell.measured for cell in plan.cells)
    has_variants = any(cell.variant for cell in plan.cells)
    shown = {"measured": is_verified, "setting": has_variants}
    columns = [i for i, name in enumerate(COLUMNS) if shown.get(name, True)]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for i in columns:
        table.add_column(COLUMNS[i], no_wrap=True, justify="right", min_width=len(COLUMNS[i]))
    for cell, texts in table_rows(plan, compares_parts=False):
        is_best = cell == plan.best_cell(cell.batch)
        table.add_row(*(texts[i] for i in columns), style="bold" if is_best else None)
    console.print(table)
    note = COLUMNS_NOTE
    if any(not cell.is_timed for cell in plan.cells):
        note += "; ~: on the line through two measured times"
    console.print(note, markup=False)
    print_lines([*findings(plan), *prediction_errors(plan)])
    if plan.engine == "sglang":
        console.print("from logs and responses: no SGLang was run", markup=False)
    print_lines(plan.lines or ["start the engine without speculation"])
