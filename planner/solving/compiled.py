"""How the solvers' loops are compiled."""

import os
from typing import Any

import numba

from sequoia_plan.artifacts.files import follow_sources


def compiled(function: Any, **flags: Any) -> Any:
    """Compile a function, and keep the code while no source of the solvers changes."""
    return follow_sources(numba.njit(cache=True, **flags)(function), os.path.dirname(__file__))
