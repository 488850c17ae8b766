"""Metadata: the JSON that the free sections of plans and profiles may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sequoia_plan.artifacts.errors import SequoiaPlanError

MAX_NESTING = 8
"""Levels of lists and mappings within each other."""


def check_metadata(value: Any, name: str, levels_left: int = MAX_NESTING) -> None:
    """Refuse a value that another reader could not print and write again.

    Printable text, 64-bit integers, finite floats, true, false and null are allowed, and lists and
    mappings of these. Text must be printable, so that a file can neither break nor steer a
    terminal.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or not key.isprintable():
                raise SequoiaPlanError(
                    f"{name}: found the key {key!r:.60}, expected printable text"
                )
            _check_item(item, f"{name}.{key}", levels_left)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_item(item, f"{name}[{index}]", levels_left)
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
        raise SequoiaPlanError(
            f"{name}: found a {type(value).__name__}, expected text, numbers, true, false, null, "
            "or lists and mappings of these"
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _check_item(item: Any, name: str, levels_left: int) -> None:
    """Check an item of a list or mapping that may have `levels_left` levels, its own included."""
    if levels_left == 0:
        section = name.split(".")[0]
        raise SequoiaPlanError(f"{section}: nested deeper than {MAX_NESTING} levels")
    check_metadata(item, name, levels_left - 1)


def is_same_model(first: Any, second: Any, all_keys: bool = False) -> bool:
    """Whether two descriptions of a model, as in profiles and plans, are of the same weights."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return bool(first == second)
    if "content" in first and "content" in second and first["content"] != second["content"]:
        return False
    if not all_keys:
        return bool(first.get("digest") == second.get("digest"))
    return {**first, "content": ""} == {**second, "content": ""}
