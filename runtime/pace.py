"""Whether the machine keeps to the times of a tree's plan."""

import logging
from statistics import median

STEPS = 100
"""Steps whose median counts."""
TOLERANCE = 1.15
"""Steps that take longer than planned by this factor are worth a warning."""
MAX_CONTEXTS = 4
"""Steps in a text longer than the measured context by more than this factor do not count."""


def note_pace(ratios: list[float], ratio: float) -> None:
    """Note how many times as long as planned a step took, and warn once if most take too long.

    `ratios` are those since the last hundred; after a warning it stays full.
    """
    if len(ratios) == STEPS:
        return
    ratios.append(ratio)
    if len(ratios) < STEPS:
        return
    middle = median(ratios)
    if middle <= TOLERANCE:
        ratios.clear()
        return
    logging.getLogger("sequoia_plan").warning(  # which says the sentence alone
        f"steps take {middle:.2f} times as long as the tree's plan says (median of {STEPS}): this "
        "machine is slower than the profiled one, or busy; for a tree that suits it: sequoia-plan "
        "profile, then sequoia-plan solve"
    )
