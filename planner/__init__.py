"""Profile -> token tree: solvers, objective, and the command line that drives everything. Never needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequoia_plan.planner.solving.baselines import baseline
    from sequoia_plan.planner.solving.certificate import Certificate, check
    from sequoia_plan.planner.solving.frontier import Frontier, frontier
    from sequoia_plan.planner.solving.solve import Solution, solve

__all__ = ["Certificate", "Frontier", "Solution", "baseline", "check", "frontier", "solve"]

_HOME = {
    "baseline": "baselines",
    "Certificate": "certificate",
    "check": "certificate",
    "Frontier": "frontier",
    "frontier": "frontier",
    "Solution": "solve",
    "solve": "solve",
}


def __getattr__(name: str) -> Any:
    """Solvers are imported when used: numba takes longer to import than `sequoia-plan --help` may take."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"sequoia_plan.planner.solving.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
