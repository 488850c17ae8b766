"""Profile -> token tree: solvers, objective, and the command line that drives everything. Never needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequoia_plan.planner.baselines import baseline
    from sequoia_plan.planner.certificate import Certificate, check
    from sequoia_plan.planner.solver import Solution, solve
    from sequoia_plan.planner.solvers import Frontier, frontier

__all__ = ["Certificate", "Frontier", "Solution", "baseline", "check", "frontier", "solve"]

_HOME = {
    "baseline": "baselines",
    "Certificate": "certificate",
    "check": "certificate",
    "Frontier": "solvers",
    "frontier": "solvers",
    "Solution": "solver",
    "solve": "solver",
}


def __getattr__(name: str) -> Any:
    """Solvers are imported when used: numba takes longer to import than `sequoia-plan --help` may take."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"sequoia_plan.planner.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
