"""A plan for another engine as sentences and as a table in the terminal."""

from collections.abc import Sequence

from sequoia_plan.engines.plan import Cell, ContextPlan, EnginePlan, MeasuredCell
from sequoia_plan.planner.report.tables import Table, print_table

COLUMNS_NOTE = (
    "K: speculative tokens; predicted, measured: generated tokens a second; "
    "~: on the line through two timed steps"
)


def parts_and_batches(plan: EnginePlan) -> list[tuple[ContextPlan, int]]:
    """The plan's part of each context with each of its batch sizes."""
    return [(part, batch) for part in plan.contexts for batch in part.batches]


def kind_of_request(part: ContextPlan, batch: int) -> str:
    """A batch size and a context, as "batch 4, context 512"."""
    return f"batch {batch}{f', context {part.context}' if part.context else ''}"


def findings(plan: EnginePlan) -> list[str]:
    """Describes the best number of speculative tokens and its gain, for each kind of request."""
    sentences = []
    for part, batch in parts_and_batches(plan):
        best = part.best_cell(batch)
        plain, *speculative = part.cells_at(batch)  # the first cell is of 0 speculative tokens
        if best.speculative_tokens:
            gain = f"{best.speedup:.2f} times the {plain.throughput:.1f} tokens/s without"
            if best.low <= plain.high:
                gain += "; the intervals overlap, so the gain is not certain"
            finding = f"{_name(best)} ({_speed(best)}, {gain})"
        else:
            next_best = max(speculative, key=lambda cell: cell.throughput)
            loss = f"{_name(next_best)} would be {next_best.speedup:.2f} times as fast"
            finding = f"do not speculate ({_speed(plain)}; {loss})"
        sentences.append(f"{kind_of_request(part, batch)}: {finding}")
    return sentences


def table(plan: EnginePlan) -> Table:
    """A row for each cell, the best of each kind of request marked; empty columns are left out."""
    rows, is_best = [], []
    for part, batch in parts_and_batches(plan):
        best = part.best_cell(batch)
        for cell in part.cells_at(batch):
            rows.append(
                {
                    "context": str(part.context or ""),
                    "batch": str(batch),
                    "K": str(cell.speculative_tokens),
                    "setting": cell.variant,
                    "tokens/step": f"{cell.tokens_per_step:.2f}",
                    "step": f"{'' if cell.is_timed else '~'}{cell.seconds * 1000:.1f} ms",
                    "predicted": _with_range(cell),
                    "measured": _with_range(cell.measured) if cell.measured else "",
                    "over K=0": f"{cell.speedup:.2f}x",
                }
            )
            is_best.append(cell == best)
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    return Table(columns, [[row[name] for name in columns] for row in rows], is_best)


def launch_groups(plan: EnginePlan) -> list[tuple[str, Sequence[str]]]:
    """What the options to start the engine with are for, and these options.

    Contexts with the same options are one group. A single group has an empty text.
    """
    contexts: dict[tuple[str, ...], list[int]] = {}
    for part in plan.contexts:
        contexts.setdefault(part.lines, []).append(part.context)
    return [
        (
            f"for a context of {' or '.join(map(str, group))} tokens:" if len(contexts) > 1 else "",
            lines or ["start the engine without speculation"],
        )
        for lines, group in contexts.items()
    ]


def _name(cell: Cell) -> str:
    """A cell's number of speculative tokens, and its further setting, as "2 with p-min 0.6"."""
    return f"{cell.speculative_tokens}{cell.variant and f' with {cell.variant}'}"


def _speed(cell: Cell) -> str:
    """A cell's throughput, predicted and, if there is one, measured."""
    measured = f", measured {cell.measured.throughput:.1f}" if cell.measured else ""
    return f"{cell.throughput:.1f} tokens/s{measured}"


def _with_range(cell: Cell | MeasuredCell) -> str:
    """A throughput and the range around it, as "81.2 (75.0-88.1)"."""
    return f"{cell.throughput:.1f} ({cell.low:.1f}-{cell.high:.1f})"


def acceptance_lines(plan: EnginePlan) -> list[str]:
    """Describes acceptance and expected tokens at each context."""
    lines = []
    for part in plan.contexts:
        acceptance, cells = part.acceptance, part.cells_at(part.batches[0])
        survival = " ".join(f"{p:.3f}" for p in acceptance.survival)
        mean = " ".join(f"{cell.tokens_per_step:.3f}" for cell in cells if not cell.variant)
        source = f"({acceptance.drafts} chains; {acceptance.source})"
        lines += [f"context {part.context}:"] if part.context else []
        lines += [
            f"acceptance of the first 1, 2, ... tokens  {survival}  {source}",
            f"expected tokens a step with 0, 1, ... speculative tokens  {mean}",
        ]
    return lines


def print_plan(plan: EnginePlan) -> None:
    """Prints the predictions, the findings and the options to start the engine with."""
    print_table(table(plan))
    lines = [COLUMNS_NOTE, *acceptance_lines(plan), *findings(plan)]
    if plan.engine == "sglang":
        lines.append("from logs and responses: no SGLang was run")
    for purpose, options in launch_groups(plan):
        lines += filter(None, [purpose, *options])
    print(*lines, sep="\n")
