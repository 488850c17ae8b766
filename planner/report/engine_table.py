"""The diagnosis of an engine as sentences and a table, for the terminal and the page."""

from collections.abc import Iterator

from sequoia_plan.engines.plan import NONE, Cell, ContextPlan, EnginePlan
from sequoia_plan.planner.report.tables import Table, print_table

COLUMNS = [
    "drafting", "context", "batch", "tokens/step", "step", "predicted tokens/s",
    "measured tokens/s", "over none",
]  # fmt: skip


def cost_lines(context_plan: ContextPlan) -> Iterator[str]:
    """Says what a token costs, what wider passes cost, and where a step's time goes."""
    for batch in context_plan.batches:
        first = context_plan.cells_at(batch)[0]
        token = f"{1000 / first.throughput:.2f} ms a token with {first.drafting}"
        yield f"{_request(context_plan, batch)}: {token} ({first.throughput:.1f} tokens/s)"
    if passes := context_plan.target_seconds:
        multiples = "  ".join(f"{n}: {passes[n] / passes[1]:.2f}" for n in sorted(passes))
        yield f"the target's pass over n tokens, over its time for one  {multiples}"
    whole = sum(context_plan.step.values())
    for name, seconds in context_plan.step.items():
        yield f"of a step of the best chain, {name}: {_ms(seconds)}, {seconds / whole:.0%}"


def verdict_lines(context_plan: ContextPlan) -> Iterator[str]:
    """Says what is best, what a tree would give, what no setting passes, and what would help."""
    if context_plan.break_even_seconds:
        longer = f"takes more than {_ms(context_plan.break_even_seconds)}"
        yield f"speculation pays if a step without it {longer}: start the server without to see"
        return
    for batch in context_plan.batches:
        first, *others = context_plan.cells_at(batch)
        best = context_plan.best_cell(batch)
        finding = f"{best.drafting}, {_over(best.throughput, first)}"
        if best.drafting == NONE:
            other = max(others, key=lambda cell: cell.throughput)
            finding = f"do not speculate; {other.drafting} has {_over(other.throughput, first)}"
        yield f"{_request(context_plan, batch)}: {finding}"
    for name, speed in {**context_plan.tree, **context_plan.bounds, **context_plan.changes}.items():
        yield f"{name}: {_over(speed, context_plan.cells[0])}"


def table(plan: EnginePlan) -> Table:
    """A row for each cell, the best of each kind of request marked."""
    rows, is_best = [], []
    for context_plan in plan.contexts:
        for cell in context_plan.cells:
            row = [
                str(cell.drafting),
                str(context_plan.context or ""),
                str(cell.batch),
                f"{cell.tokens_per_step:.2f}",
                _ms(cell.seconds),
                f"{cell.throughput:.1f} ({cell.low:.1f}-{cell.high:.1f})",
                f"{cell.measured.throughput:.1f}" if cell.measured else "",
                f"{cell.speedup:.2f}x",
            ]
            rows.append(row)
            is_best.append(cell == context_plan.best_cell(cell.batch))
    return Table(COLUMNS, rows, is_best)


def sentences(plan: EnginePlan) -> Iterator[str]:
    """The diagnosis of each context, with the options to paste."""
    yield f"{plan.engine} {plan.engine_version}: {plan.target} {plan.draft}, {plan.seconds:.0f} s"
    for context_plan in plan.contexts:
        yield "1. What a token costs"
        yield from cost_lines(context_plan)
        yield "2. What is accepted"
        if counted := context_plan.acceptance:
            survival = " ".join(f"{p:.3f}" for p in counted.survival)
            source = f"({counted.drafts} chains; {counted.source})"
            yield f"accepted of the first 1, 2, ... tokens  {survival}  {source}"
        yield "3. The verdict"
        yield from verdict_lines(context_plan)
        if not context_plan.break_even_seconds:
            yield "4. Options to paste"
            yield from context_plan.lines or ["start the engine without speculation"]


def print_plan(plan: EnginePlan) -> None:
    """Prints the diagnosis."""
    print_table(table(plan))
    print(*sentences(plan), sep="\n")


def _request(context_plan: ContextPlan, batch: int) -> str:
    """A batch size and a context, as "batch 4, context 512"."""
    return f"batch {batch}" + f", context {context_plan.context}" * bool(context_plan.context)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _over(throughput: float, first: Cell) -> str:
    """A throughput, and how many times that of the first cell it is."""
    return f"{throughput:.1f} tokens/s ({throughput / first.throughput:.2f}x)"
