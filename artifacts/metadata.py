"""What the free sections of plans and profiles say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_same_model(first: Any, second: Any, all_keys: bool = False) -> bool:
    """Whether two descriptions of a model, as in profiles and plans, are of the same weights."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return bool(first == second)
    if "content" in first and "content" in second and first["content"] != second["content"]:
        return False
    if not all_keys:
        return bool(first.get("digest") == second.get("digest"))
    return {**first, "content": ""} == {**second, "content": ""}
