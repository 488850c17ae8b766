"""How llama.cpp may draft: the types, lengths and thresholds that a plan chooses from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

LOOKUP = "ngram-simple"
DRAFT_TYPES = ("draft-simple", "draft-eagle3", "draft-mtp")
TYPES = (*DRAFT_TYPES, LOOKUP)
"""Types of `--spec-type` that are planned."""
HIDDEN_STATE_TYPES = ("draft-eagle3", "draft-mtp")
"""Types whose draft reads the target's hidden states."""
WITHOUT_DRAFT = ("draft-mtp", LOOKUP)
"""Types that need no draft model of their own."""
MIN_PROBS = tuple(tenth / 10 for tenth in range(10))
"""Thresholds (p-min) that are considered."""
LOOKUP_SIZES = (2, 3, 4, 6, 8, 12)
"""Numbers of tokens to look up that are considered."""
LOOKUP_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of looked-up tokens to draft that are considered."""
NEVER = 1.01
"""A threshold that no token reaches: the draft makes one pass and proposes nothing."""


@dataclass(frozen=True)
class Drafting:
    """How a server drafts. Without a type it does not.

    Args:
        spec_type: llama.cpp's name of the type.
        max_length: maximum number of drafted tokens (n-max; size-m of a lookup).
        min_prob: threshold of the draft's probability (p-min).
        lookup_size: tokens that are looked up (size-n); 0 if none are.
    """

    spec_type: str = ""
    max_length: int = 0
    min_prob: float = 0.0
    lookup_size: int = 0

    @property
    def variant(self) -> str:
        """What it sets besides the maximum length, as text for a table."""
        if self.lookup_size:
            return f"size-n {self.lookup_size}"
        return f"p-min {self.min_prob:g}" if self.min_prob else ""

    def flags(self, draft: str | None) -> list[str]:
        """The options of llama-server."""
        if not self.spec_type:
            return []
        if self.spec_type == LOOKUP:
            return [
                *("--spec-type", LOOKUP),
                *("--spec-ngram-simple-size-n", str(self.lookup_size)),
                *("--spec-ngram-simple-size-m", str(self.max_length)),
            ]
        model = ["--model-draft", draft] if draft else []
        return [
            *("--spec-type", self.spec_type, *model),
            *("--spec-draft-n-max", str(self.max_length)),
            *("--spec-draft-p-min", f"{self.min_prob:g}"),
        ]


NONE = Drafting()


def defaults(spec_type: str) -> Drafting:
    """What llama.cpp does if only the type is named (common.h, ggml 0.25.3)."""
    if spec_type == LOOKUP:
        return Drafting(LOOKUP, 48, lookup_size=12)
    return Drafting(spec_type, 3)


def timed_draftings(spec_type: str, max_length: int) -> list[Drafting]:
    """Ways of drafting whose steps are timed: none, and each length that a plan may have."""
    if spec_type == LOOKUP:
        longest = max(max_length, defaults(LOOKUP).max_length)
        lengths = [1, *(length for length in LOOKUP_LENGTHS if length <= longest)]
        # in a text that repeats, a pattern of three tokens is found one period before
        return [NONE, *(Drafting(LOOKUP, length, lookup_size=min(length, 3)) for length in lengths)]
    chains = [Drafting(spec_type, length) for length in range(1, max_length + 1)]
    return [NONE, Drafting(spec_type, 1, NEVER), *chains]


def candidates(spec_type: str, max_length: int) -> list[Drafting]:
    """Every way of drafting that a plan considers, none and llama.cpp's defaults included."""
    if spec_type == LOOKUP:
        chosen = [
            Drafting(LOOKUP, length, lookup_size=size)
            for size in LOOKUP_SIZES
            for length in LOOKUP_LENGTHS
            if size <= length <= max_length  # llama.cpp drafts nothing if length < size
        ]
    else:
        chosen = [
            Drafting(spec_type, length, min_prob)
            for length in range(1, max_length + 1)
            for min_prob in MIN_PROBS
        ]
    return list(dict.fromkeys([NONE, *chosen, defaults(spec_type)]))


def neighbours(best: Drafting, others: Iterable[Drafting]) -> list[Drafting]:
    """The ways of drafting next to the best: the next length or the next threshold or size."""
    same_variant = sorted(
        (other.max_length, other) for other in others
        if other.spec_type and other.variant == best.variant
    ) if best.spec_type else []  # fmt: skip
    same_length = sorted(
        (other.min_prob + other.lookup_size, other) for other in others
        if other.max_length == best.max_length
    ) if best.spec_type else []  # fmt: skip
    near = []
    for row in (same_variant, same_length):
        ordered = [other for _, other in row]
        index = ordered.index(best) if best in ordered else 0
        near += ordered[max(index - 1, 0) : index + 2]
    return [other for other in dict.fromkeys(near) if other != best]


def launch_options(drafting: Drafting, draft: str | None) -> tuple[str, ...]:
    """The options to start llama-server with, quoted for a shell; none without speculation."""
    flags = drafting.flags(draft)
    return (shlex.join(flags),) if flags else ()
