"""The diagnosis of an engine as sentences and a table, for the terminal and the page."""

from collections.abc import Iterator

from sequoia_plan.engines.plan import NONE, Cell, ContextPlan, EnginePlan
from sequoia_plan.planner.report.tables import Table, print_table

COLUMNS = [
    "drafting", "context", "batch", "tokens/step", "step", "predicted tokens/s",
    "measured tokens/s", "over none",
]  # fmt: skip


def cost_lines(part: ContextPlan) -> Iterator[str]:
    """Says what a token costs, what wider passes cost, and where a step's time goes."""
    for batch in part.batches:
        first = part.cells_at(batch)[0]
        token = f"{1000 / first.throughput:.2f} ms a token with {first.drafting}"
        yield f"{_request(part, batch)}: {token} ({first.throughput:.1f} tokens/s)"
    if passes := part.target_seconds:
        multiples = "  ".join(f"{n}: {passes[n] / passes[1]:.2f}" for n in sorted(passes))
        yield f"the target's pass over n tokens, over its time for one  {multiples}"
    whole = sum(part.step.values())
    for name, seconds in part.step.items():
        yield f"of a step of the best chain, {name}: {_ms(seconds)}, {seconds / whole:.0%}"


def verdict_lines(part: ContextPlan) -> Iterator[str]:
    """Says what is best, what a tree would give, what no setting passes, and what would help."""
    if part.break_even_seconds:
        longer = f"takes more than {_ms(part.break_even_seconds)}"
        yield f"speculation pays if a step without it {longer}: start the server without to see"
        return
    for batch in part.batches:
        first, *others = part.cells_at(batch)
        best = part.best_cell(batch)
        finding = f"{best.drafting}, {_over(best.throughput, first)}"
        if best.drafting == NONE:
            other = max(others, key=lambda cell: cell.throughput)
            finding = f"do not speculate; {other.drafting} has {_over(other.throughput, first)}"
        yield f"{_request(part, batch)}: {finding}"
    for name, speed in {**part.tree, **part.bounds, **part.changes}.items():
        yield f"{name}: {_over(speed, part.cells[0])}"


def table(plan: EnginePlan) -> Table:
    """A row for each cell, the best of each kind of request marked."""
    cells = [(part, cell) for part in plan.contexts for cell in part.cells]
    rows = [
        [
            str(cell.drafting),
            str(part.context or ""),
            str(cell.batch),
            f"{cell.tokens_per_step:.2f}",
            _ms(cell.seconds),
            f"{cell.throughput:.1f} ({cell.low:.1f}-{cell.high:.1f})",
            f"{cell.measured.throughput:.1f}" if cell.measured else "",
            f"{cell.speedup:.2f}x",
        ]
        for part, cell in cells
    ]
    return Table(COLUMNS, rows, [cell == part.best_cell(cell.batch) for part, cell in cells])


def sentences(plan: EnginePlan) -> Iterator[str]:
    """The diagnosis of each context, with the options to paste."""
    yield f"{plan.engine} {plan.engine_version}: {plan.target} {plan.draft}, {plan.seconds:.0f} s"
    for part in plan.contexts:
        yield "1. What a token costs"
        yield from cost_lines(part)
        yield "2. What is accepted"
        if counted := part.acceptance:
            survival = " ".join(f"{p:.3f}" for p in counted.survival)
            source = f"({counted.drafts} chains; {counted.source})"
            yield f"accepted of the first 1, 2, ... tokens  {survival}  {source}"
        yield "3. The verdict"
        yield from verdict_lines(part)
        if not part.break_even_seconds:
            yield "4. Options to paste"
            yield from part.lines or ["start the engine without speculation"]


def print_plan(plan: EnginePlan) -> None:
    """Prints the diagnosis."""
    print_table(table(plan))
    print(*sentences(plan), sep="\n")


def _request(part: ContextPlan, batch: int) -> str:
    """A batch size and a context, as "batch 4, context 512"."""
    return f"batch {batch}" + f", context {part.context}" * bool(part.context)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _over(throughput: float, first: Cell) -> str:
    """A throughput, and how many times that of the first cell it is."""
    return f"{throughput:.1f} tokens/s ({throughput / first.throughput:.2f}x)"
