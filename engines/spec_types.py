"""llama.cpp's types of speculation: their options, and the ways of drafting to choose from."""

import struct
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
GGUF_TEXT = 8
"""The type of a value that is text."""
HEADER_BYTES = 1 << 20
"""The begin of a GGUF file, which has the keys of the model, before those of the tokenizer."""


def flags(drafting: Drafting, draft_type: str, draft: str | None) -> list[str]:
    """The options of llama-server for a way of drafting; none without speculation."""
    looks_up, drafts = drafting.lookup_size > 0, drafting.length > 0
    types = ",".join(filter(None, (drafting.types, LOOKUP * looks_up, draft_type * drafts)))
    text = f"--spec-type {types}" * bool(types)
    if looks_up:
        text += f" --spec-ngram-simple-size-n {drafting.lookup_size}"
        text += f" --spec-ngram-simple-size-m {drafting.lookup_length}"
    if drafts:
        text += f" --spec-draft-n-max {drafting.length} --spec-draft-p-min {drafting.min_prob:g}"
    return [*text.split(), *(["-md", draft] if drafts and draft else [])]


def candidates(max_length: int) -> list[Drafting]:
    """None, every chain of a draft up to a length, and every lookup.

    The lookups include llama.cpp's default, 12 and 48. It drafts nothing if the length is below
    the size.
    """
    chains = product(range(1, max_length + 1), MIN_PROBS)
    lookups = product(LOOKUP_SIZES, LOOKUP_LENGTHS)
    return [
        NONE,
        *(Drafting(length, min_prob) for length, min_prob in chains),
        *(Drafting(lookup_size=n, lookup_length=m) for n, m in lookups if n <= m),
    ]


def split_types(named: str | None, target: str, draft: str | None) -> tuple[str, list[str]]:
    """The draft's type, "" without one, and other types of lookup, from --spec-type's list.

    Without a list the draft's file says the type.
    """
    types = (named or type_of_files(target, draft)).split(",")
    drafts = [name for name in types if name.startswith("draft-")]
    needs_file = bool(drafts) and drafts != ["draft-mtp"]
    if len(drafts) > 1 or needs_file != bool(draft):
        raise ArgumentError(
            f"--spec-type {','.join(types)}: expected one type of a draft at most, which goes with "
            "its file (-md), except for draft-mtp"
        )
    return "".join(drafts), [name for name in types if name not in (*drafts, LOOKUP, "none")]


def type_of_files(target: str, draft: str | None) -> str:
    """The type of the draft, as its GGUF file says; "none" if there is none.

    A target may hold a multi-token-prediction head.
    """
    header = header_of(draft or target)
    if not draft:
        return "draft-mtp" if b".nextn_predict_layers" in header else "none"
    for name in ("eagle3", "dflash"):
        # a key is followed by the type of its value, text, which is its length and its bytes
        entry = b"general.architecture" + struct.pack("<IQ", GGUF_TEXT, len(name)) + name.encode()
        if entry in header:
            return f"draft-{name}"
    return "draft-simple"


def is_recurrent(target: str) -> bool:
    """Whether a target has layers with a state, which a tree would need once for each node."""
    header = header_of(target)
    return b".ssm." in header or b".shortconv." in header


def header_of(path: str) -> bytes:
    """The begin of a GGUF file."""
    with Path(path).open("rb") as file:
        return file.read(HEADER_BYTES)
