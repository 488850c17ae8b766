"""llama.cpp's types of speculation: their options, and the ways of drafting to choose from."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.engines.plan import NONE, Drafting

LOOKUP = "ngram-simple"
BLOCK_TYPES = ("draft-dflash", "draft-dspark")
"""Types whose draft proposes all tokens in one pass."""
HIDDEN_STATE_TYPES = ("draft-eagle3", "draft-mtp", *BLOCK_TYPES)
"""Types whose draft reads the target's hidden states."""
MIN_PROBS = tuple(tenth / 10 for tenth in range(10))
LOOKUP_SIZES = (2, 3, 4, 6, 8, 12)
LOOKUP_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
HEADER_BYTES = 1 << 20
"""The begin of a GGUF file, in which its architecture is named."""


def flags(drafting: Drafting, draft_type: str, draft: str | None) -> list[str]:
    """The options of llama-server for a way of drafting; none without speculation."""
    looks_up, drafts = drafting.lookup_size > 0, drafting.length > 0
    types = ",".join(filter(None, (drafting.types, LOOKUP * looks_up, draft_type * drafts)))
    words = ["--spec-type", types] if types else []
    if looks_up:
        words += ["--spec-ngram-simple-size-n", str(drafting.lookup_size)]
        words += ["--spec-ngram-simple-size-m", str(drafting.lookup_length)]
    if drafts:
        words += ["-md", draft] if draft else []
        words += ["--spec-draft-n-max", str(drafting.length)]
        words += ["--spec-draft-p-min", f"{drafting.min_prob:g}"]
    return words


def lookups() -> list[Drafting]:
    """Every size and length of ngram-simple to choose from, llama.cpp's default 12 and 48 included.

    llama.cpp drafts nothing if the length is below the size.
    """
    pairs = product(LOOKUP_SIZES, LOOKUP_LENGTHS)
    return [Drafting(lookup_size=n, lookup_length=m) for n, m in pairs if n <= m]


def candidates(max_length: int) -> list[Drafting]:
    """None, every chain of a draft up to a length, and every lookup."""
    chains = product(range(1, max_length + 1), MIN_PROBS)
    return [NONE, *(Drafting(length, min_prob) for length, min_prob in chains), *lookups()]


def split_types(
    named: str | None, known: Sequence[str], target: str, draft: str | None
) -> tuple[str, list[str]]:
    """The draft's type, and types of n-gram besides ngram-simple, from a list of llama.cpp's types.

    Without a list the draft's file says the type.
    """
    types = (named or type_of_files(target, draft) or "none").split(",")
    drafts = [name for name in types if name.startswith("draft-")]
    needs_file = bool(drafts) and drafts != ["draft-mtp"]
    if {*types} - {*known} or len(drafts) > 1 or needs_file != bool(draft):
        raise ArgumentError(
            f"--spec-type {','.join(types)}: expected types that this llama-server knows "
            f"({', '.join(known)}), one of a draft at most, which goes with its file (-md), except "
            "for draft-mtp"
        )
    return "".join(drafts), [name for name in types if name not in (*drafts, LOOKUP, "none")]


def is_recurrent(target: str) -> bool:
    """Whether a target has layers with a state, which a tree would need once for each node."""
    return bool(re.search(rb"\.(ssm|shortconv)\.", header_of(target)))


def header_of(path: str) -> bytes:
    """The begin of a GGUF file."""
    with Path(path).open("rb") as file:
        return file.read(HEADER_BYTES)


def type_of_files(target: str, draft: str | None) -> str:
    """The type of the draft, as its GGUF file says; empty if there is none.

    A target may hold a multi-token-prediction head.
    """
    header = header_of(draft or target)
    if not draft:
        return "draft-mtp" if b".nextn_predict_layers" in header else ""
    named = re.search(rb"general\.architecture\x08\0\0\0.{8}(eagle3|dflash)", header, re.DOTALL)
    return f"draft-{named[1].decode()}" if named else "draft-simple"
