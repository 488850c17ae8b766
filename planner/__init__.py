"""Profile -> token tree: the solvers, their objectives and the command line. Never needs torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequoia_plan.planner.solving.solve import Solution, solve
    from sequoia_plan.planner.solving.tokens.frontier import frontier

__all__ = ["Solution", "frontier", "solve"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Importing numba takes longer than `sequoia-plan --help` may take.
    """
    if name in __all__:
        from sequoia_plan.planner.solving import solve

        return getattr(solve, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
