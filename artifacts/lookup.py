"""Prompt lookup: what was counted where the text repeats itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from sequoia_plan.artifacts.counts import Counts, PromptKind
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import Artifact, Count

MATCH_LENGTHS = (0, 1, 2, 3, 5, 8, 16)
"""The shortest match of each class, in tokens; the first class is that of texts without a match."""
MAX_MATCH = MATCH_LENGTHS[-1]
"""Longer matches need not be told apart."""
MAX_TEXT_CHARACTERS = 1 << 17
"""Characters of `LookupCounts.texts` that a profile keeps: about 30 thousand positions."""

TextRecord = Annotated[str, Meta(pattern=r"^(\d+:\d+( |$))*$")]


class MatchClass(Artifact, frozen=True):
    """What was accepted in steps whose match has a length in one range."""

    match_length: Annotated[Count, "the shortest match of the class, in tokens; 0 for none"]
    drafted: Annotated[
        Counts | None, "counts by level of steps in this class: all children are drafted"
    ] = None
    looked_up: Annotated[
        Counts | None,
        "the same for trees whose spine is looked up: rank 1 of a node on the spine is the "
        "token of the lookup chain, rank k the draft's (k - 1)th other token. `off_spine` is "
        "for children that are all drafted. Missing for the class without a match",
    ] = None


class LookupCounts(Artifact, frozen=True):
    """Counts by match class, and the text that they come from."""

    classes: Annotated[
        tuple[MatchClass, ...], "one for each range of match lengths, the shortest first"
    ]
    texts: Annotated[
        dict[PromptKind, tuple[TextRecord, ...]],
        "by kind of prompts (`all` where prompts name none): for each text that the target "
        "wrote, one word for each token: `m:r` says that before this token the match had m "
        "tokens, and that the next r tokens were those of the lookup chain",
    ] = {}

    def __post_init__(self) -> None:
        """Refuse classes that are not in order."""
        lengths = list(self.match_lengths)
        if lengths[:1] != [0] or lengths != sorted(set(lengths)):
            raise SequoiaPlanError(
                f"lookup.classes: found match lengths {lengths}, expected 0 first, then larger ones"
            )

    def without_draft(self) -> LookupCounts:
        """The counts for trees that draft nothing: of looked-up tokens alone, on the spine."""
        match_classes = []
        for match_class in self.classes:
            looked_up = match_class.looked_up
            if looked_up:
                # node class 0, on the spine, and rank 1, the looked-up child
                looked_up = Counts(looked_up.trials[:, :1], looked_up.accepted[:, :1, :1])
            match_classes.append(MatchClass(match_class.match_length, None, looked_up))
        return LookupCounts(tuple(match_classes), self.texts)

    @property
    def match_lengths(self) -> tuple[int, ...]:
        """The shortest match of each class."""
        return tuple(match_class.match_length for match_class in self.classes)


class Position(NamedTuple):
    """A position of a text: the tokens of its match, and next tokens that the chain foretells."""

    match_length: int
    run: int


def read_positions(text: str) -> Iterator[Position]:
    """The positions of a text as `LookupCounts.texts` records it."""
    for word in text.split():
        yield Position(*map(int, word.split(":")))


def write_positions(positions: Iterable[Position]) -> str:
    """The record of a text for `LookupCounts.texts`."""
    return " ".join(f"{position.match_length}:{position.run}" for position in positions)


def share_with_match(counts: LookupCounts) -> float:
    """The share of recorded positions before which the end of the text occurs earlier in it."""
    texts = itertools.chain.from_iterable(counts.texts.values())
    matches = [position.match_length > 0 for text in texts for position in read_positions(text)]
    return sum(matches) / max(len(matches), 1)


def limited_texts(texts: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The texts of each kind, as many as a profile keeps.

    Texts are taken in turns, one of each kind, until they have `MAX_TEXT_CHARACTERS` together.
    """
    room = MAX_TEXT_CHARACTERS
    kept: dict[str, tuple[str, ...]] = dict.fromkeys(texts, ())
    for turn in itertools.zip_longest(*texts.values()):
        for kind, text in zip(texts, turn, strict=True):
            if text is not None and room > 0:
                kept[kind] += (text,)
                room -= len(text)
    return kept


def class_of(match_length: int, match_lengths: Sequence[int]) -> int:
    """The match class: the index of the last of the `match_lengths`, each a class's shortest match,
    that is not longer.
    """
    return sum(match_length >= shortest for shortest in match_lengths) - 1
