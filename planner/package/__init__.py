"""A compiler for speculation trees. The parts are `sequoia_plan.artifacts`, `.planner`, `.profiler` and `.runtime`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`__version__`, looked up when it is asked for: importlib.metadata takes longer to import than all of this."""
    if name == "__version__":
        from importlib.metadata import version

        return version("sequoia-plan")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
