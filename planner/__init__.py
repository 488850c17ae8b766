"""Profile -> token tree: solvers, objective, and the command line that drives everything. Never needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequoia_plan.planner.solver import Solution, solve

__all__ = ["Solution", "solve"]


def __getattr__(name: str) -> Any:
    """Solvers are imported when used: numba takes longer to import than `sequoia-plan --help` may take."""
    if name in __all__:
        import importlib

        module = importlib.import_module("sequoia_plan.planner.solver")
        globals().update({each: getattr(module, each) for each in __all__})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
