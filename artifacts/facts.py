"""Facts: what the free sections of plans and profiles may hold, which is JSON that any reader can print and write again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sequoia_plan.artifacts.errors import SequoiaPlanError

DEEPEST = 8
"""How deep lists and mappings may be nested."""


def check_facts(value: Any, name: str, levels: int = DEEPEST) -> None:
    """Refuse anything but printable text, int64, finite float64, true, false, null, and lists and mappings of these.

    Raises:
        SequoiaPlanError: naming the place; text must be printable, so that a file can neither break nor steer a terminal.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or not key.isprintable():
                raise SequoiaPlanError(f"{name}: found the key {key!r:.60}, expected printable text")
            check_facts(item, _within(f"{name}.{key}", levels), levels - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_facts(item, _within(f"{name}[{index}]", levels), levels - 1)
    elif isinstance(value, str):
        if not value.isprintable():
            raise SequoiaPlanError(f"{name}: found {value!r:.60}, expected printable text")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise SequoiaPlanError(f"{name}: found a whole number beyond 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SequoiaPlanError(f"{name}: found {value}, expected a finite number")
    elif value is not None:
        raise SequoiaPlanError(f"{name}: found a {type(value).__name__}, expected text, numbers, true, false, null, or lists and mappings of these")


def is_number(value: Any) -> bool:
    """A finite int or float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _within(name: str, levels: int) -> str:
    if levels == 0:
        raise SequoiaPlanError(f"{name.split('.')[0]}: nested deeper than {DEEPEST} levels")
    return name
