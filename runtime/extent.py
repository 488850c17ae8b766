"""How many slots of the KV cache attention looks at in a pass."""

from __future__ import annotations

from collections.abc import Callable

from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.models import split_keys

EXTENT_MULTIPLE = {"cpu": 64, "cuda": 512}
"""The extent is a multiple of so many slots: few shapes, little waste."""


def attention_extent(
    needed: int, capacity: int, device: str, captures: bool, splits_keys: Callable[[], bool]
) -> int:
    """`needed` rounded up, so that passes have few shapes.

    Each shape is a CUDA graph of its own where passes are captured. So there are two extents for
    each doubling of the text, and only one, the whole cache, where attention finds the end of the
    text on the device (`splits_keys`).
    """
    multiple = EXTENT_MULTIPLE["cuda" if captures else device]
    if captures:
        if needed <= capacity >= split_keys.MIN_EXTENT and splits_keys():
            return capacity
        # a quarter of a power of two in (needed, 2 * needed]
        multiple = max(multiple, (1 << needed.bit_length()) // 4)
    return round_up(needed, multiple)
