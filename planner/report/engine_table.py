"""A plan for another engine as sentences and as a table in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sequoia_plan.engines.plan import Cell, ChainAcceptance, EnginePlan

COLUMNS = (
    "context",
    "batch",
    "K",
    "setting",
    "tokens/step",
    "step",
    "predicted",
    "measured",
    "over K=0",
)
MAX_TABLE_WIDTH = 200
"""Columns of the terminal that a table may take: a wider one is wrapped by it, not cut off."""
COLUMNS_NOTE = "K: speculative tokens; predicted, measured: generated tokens a second"


def findings(plan: EnginePlan) -> list[str]:
    """Describes the best number of speculative tokens and its gain, for each kind of request.

    If the plan has several contexts, the last sentences say where the best number changes.
    """
    sentences = []
    for part, batch in _parts_and_batches(plan):
        best = part.best_cell(batch)
        plain, *speculative = part.cells_at(batch)  # the first cell is of 0 speculative tokens
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
        sentences.append(f"{kind_of_request(best)}: {finding}")
    if len(plan.by_context) > 1:
        sentences += [_change_with_context(plan, batch) for batch in plan.batches]
    return sentences


def _change_with_context(plan: EnginePlan, batch: int) -> str:
    """Describes how the best number of speculative tokens depends on the context."""
    best = {part.context: _name(part.best_cell(batch)) for part in plan.parts()}
    if len(set(best.values())) == 1:
        return f"batch {batch}: the best number is the same at every context"
    changes = ", ".join(f"{name} at {context}" for context, name in best.items())
    return f"batch {batch}: the best number changes with the context: {changes}"


def _parts_and_batches(plan: EnginePlan) -> list[tuple[EnginePlan, int]]:
    """The plan's part of each context with each of its batch sizes."""
    return [(part, batch) for part in plan.parts() for batch in part.batches]


def kind_of_request(cell: Cell) -> str:
    """A cell's batch size and context, as "batch 4, context 512"."""
    return f"batch {cell.batch}{f', context {cell.context}' if cell.context else ''}"


def prediction_errors(plan: EnginePlan, tolerance: float = 0.1) -> list[str]:
    """Describes each prediction whose throughput differs much from the measured one.

    The sentence also has the errors of the predicted tokens a step and of the step's time.
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
                f"{kind_of_request(cell)} with {_name(cell)}: predicted {error:+.0%} off "
                f"(tokens a step {tokens_error:+.0%}, step {step_error:+.0%})"
            )
    return sentences


def table_columns(plan: EnginePlan) -> list[str]:
    """The names of COLUMNS that the plan has values for."""
    shown = {
        "context": any(cell.context for cell in plan.cells),
        "setting": any(cell.variant for cell in plan.cells),
        "measured": any(cell.measured for cell in plan.cells),
    }
    return [name for name in COLUMNS if shown.get(name, True)]


def table_rows(plan: EnginePlan, compares_parts: bool = True) -> Iterator[tuple[bool, list[str]]]:
    """Yields for each cell whether it is the best of its batch size and context, and its texts.

    There is a text for each of `table_columns`. A `~` before a step time says that it was
    interpolated, not measured.
    """
    columns = table_columns(plan)
    for part, batch in _parts_and_batches(plan):
        best = part.best_cell(batch)
        for cell in part.cells_at(batch):
            measured = cell.measured
            tokens = f"{cell.tokens_per_step:.2f}"
            step = f"{'' if cell.is_timed else '~'}{cell.seconds * 1000:.1f}"
            if measured and compares_parts:
                tokens += f" / {measured.tokens_per_step:.2f}"
                step += f" / {measured.seconds * 1000:.1f}"
            texts = (
                f"{cell.context}",
                f"{cell.batch}",
                f"{cell.speculative_tokens}",
                cell.variant,
                tokens,
                f"{step} ms",
                _with_range(cell.throughput, cell.low, cell.high),
                _with_range(measured.throughput, measured.low, measured.high) if measured else "",
                f"{cell.speedup:.2f}x",
            )
            by_column = dict(zip(COLUMNS, texts, strict=True))
            yield cell == best, [by_column[name] for name in columns]


def launch_groups(plan: EnginePlan) -> list[tuple[str, tuple[str, ...]]]:
    """What the options to start the engine with are for, and these options.

    Contexts with the same options are one group. A single group has an empty text.
    """
    contexts: dict[tuple[str, ...], list[int]] = {}
    for choice in plan.by_context:
        contexts.setdefault(choice.lines, []).append(choice.context)
    if len(contexts) < 2:
        return [("", plan.parts()[0].lines)]
    return [
        (f"for a context of {' or '.join(map(str, group))} tokens:", lines)
        for lines, group in contexts.items()
    ]


def _name(cell: Cell) -> str:
    """A cell's number of speculative tokens, and its further setting, as "2 with p-min 0.6"."""
    return f"{cell.speculative_tokens}{cell.variant and f' with {cell.variant}'}"


def _with_range(value: float, low: float, high: float) -> str:
    """A value and the range around it, as "81.2 (75.0-88.1)"."""
    return f"{value:.1f} ({low:.1f}-{high:.1f})"


def acceptance_lines(acceptance: ChainAcceptance, mean_tokens: Sequence[float]) -> list[str]:
    """Describes acceptance and expected tokens in two lines."""
    survival = " ".join(f"{p:.3f}" for p in acceptance.survival)
    mean = " ".join(f"{tokens:.3f}" for tokens in mean_tokens)
    source = f"({acceptance.drafts} chains; {acceptance.source})"
    return [
        f"acceptance of the first 1, 2, ... tokens  {survival}  {source}",
        f"expected tokens a step with 0, 1, ... speculative tokens  {mean}",
    ]


def plan_acceptance_lines(plan: EnginePlan) -> list[str]:
    """Describes a plan's acceptance and expected tokens, at each context that has its own."""
    lines = []
    for part in plan.parts():
        cells = [cell for cell in part.cells_at(plan.batches[0]) if not cell.variant]
        has_own = any(choice.acceptance for choice in part.by_context)
        lines += [f"context {part.context}:"] if has_own else []
        lines += acceptance_lines(part.acceptance, [cell.tokens_per_step for cell in cells])
        if not has_own:  # all parts share it
            break
    return lines


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
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in table_columns(plan):
        table.add_column(name, no_wrap=True, justify="right", min_width=len(name))
    for is_best, texts in table_rows(plan, compares_parts=False):
        table.add_row(*texts, style="bold" if is_best else None)
    full_width = console.measure(table, options=console.options.update(width=MAX_TABLE_WIDTH))
    Console(highlight=False, width=max(console.width, full_width.maximum)).print(table)
    note = COLUMNS_NOTE
    if any(not cell.is_timed for cell in plan.cells):
        note += "; ~: on the line through two measured times"
    console.print(note, markup=False)
    print_lines([*findings(plan), *prediction_errors(plan)])
    if plan.engine == "sglang":
        console.print("from logs and responses: no SGLang was run", markup=False)
    for purpose, lines in launch_groups(plan):
        print_lines([purpose] if purpose else [])
        print_lines(lines or ["start the engine without speculation"])
