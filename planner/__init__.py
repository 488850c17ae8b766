"""Profile -> token tree: the solvers, their objectives and the command line. Never needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequoia_plan.planner.solving.certificate import Certificate, check
    from sequoia_plan.planner.solving.solve import Solution, solve
    from sequoia_plan.planner.solving.tokens.frontier import frontier

__all__ = ["Certificate", "Solution", "check", "frontier", "solve"]

_MODULES = {"Certificate": "certificate", "check": "certificate", "frontier": "tokens.frontier"}
"""The module of `planner.solving` that defines each public name, if it is not `solve`."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Importing numba takes longer than `sequoia-plan --help` may take.
    """
    if name in __all__:
        from importlib import import_module

        module = import_module(f"sequoia_plan.planner.solving.{_MODULES.get(name, 'solve')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
