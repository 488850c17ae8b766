"""llama.cpp's types of speculation: their options, and the ways of drafting to choose from."""

from itertools import product

from sequoia_plan.engines.timing import NEVER
from sequoia_plan.engines.workload import NONE, Drafting

LOOKUP = "ngram-simple"
HIDDEN_STATE_TYPES = ("draft-eagle3", "draft-mtp")
"""Types whose draft reads the target's hidden states."""
MIN_PROBS = tuple(tenth / 10 for tenth in range(10))
LOOKUP_SIZES = (2, 3, 4, 6, 8, 12)
LOOKUP_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def flags(drafting: Drafting, spec_type: str, draft: str | None) -> list[str]:
    """The options of llama-server for a way of drafting; none without speculation."""
    if not drafting.length:
        return []
    if spec_type == LOOKUP:
        return [
            *("--spec-type", LOOKUP),
            *("--spec-ngram-simple-size-n", str(drafting.lookup_size)),
            *("--spec-ngram-simple-size-m", str(drafting.length)),
        ]
    return [
        *("--spec-type", spec_type, *(["--model-draft", draft] if draft else [])),
        *("--spec-draft-n-max", str(drafting.length)),
        *("--spec-draft-p-min", f"{drafting.min_prob:g}"),
    ]


def default_drafting(spec_type: str) -> Drafting:
    """What llama.cpp does if only the type is named (common.h, ggml 0.25.3)."""
    return Drafting(48, lookup_size=12) if spec_type == LOOKUP else Drafting(3)


def timed_draftings(spec_type: str, max_length: int) -> list[Drafting]:
    """Ways of drafting whose steps are timed: none, and each length that a plan may have."""
    if spec_type == LOOKUP:
        longest = max(max_length, default_drafting(LOOKUP).length)
        lengths = [1, *(length for length in LOOKUP_LENGTHS if length <= longest)]
        # in a text that repeats, a pattern of three tokens is found one period before
        return [NONE, *(Drafting(length, lookup_size=min(length, 3)) for length in lengths)]
    return [NONE, Drafting(1, NEVER), *map(Drafting, range(1, max_length + 1))]


def candidates(spec_type: str, max_length: int) -> list[Drafting]:
    """Every way of drafting that a plan considers, none and llama.cpp's default included."""
    if spec_type == LOOKUP:
        # llama.cpp drafts nothing if the length is below the size
        pairs = product(LOOKUP_SIZES, LOOKUP_LENGTHS)
        chosen = [Drafting(m, lookup_size=n) for n, m in pairs if n <= m <= max_length]
    else:
        chosen = [Drafting(*each) for each in product(range(1, max_length + 1), MIN_PROBS)]
    return list(dict.fromkeys([NONE, *chosen, default_drafting(spec_type)]))
