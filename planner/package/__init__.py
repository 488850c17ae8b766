"""A compiler for speculation trees.

The parts are `sequoia_plan.artifacts`, `.planner`, `.profiler` and `.runtime`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Look up `__version__` when it is first used.

    Importing importlib.metadata takes longer than importing everything else here.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("sequoia-plan")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
