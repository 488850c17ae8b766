"""Prompt lookup, counted over texts that the target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts.counts import MAX_KINDS, Counts
from sequoia_plan.artifacts.lookup import (
    MATCH_LENGTHS,
    MAX_MATCH,
    LookupCounts,
    MatchClass,
    Position,
    limited_texts,
    write_positions,
)
from sequoia_plan.profiler.observed import LEVELS, ObservedAcceptance

CHAIN = 24
"""Tokens of a lookup chain that are verified."""
MAX_RUN = 64
"""Longer runs are recorded as this long."""
LOOKUP_LEVELS = 12
"""Levels of trees that look up which are counted separately, the last with all below it."""
LEVELS_AFTER_CHAIN = 3
"""Positions after the end of a run that are trials off the spine."""
NO_TOKEN = -1
"""In place of the tokens of a chain, where the text has no match."""


@dataclass(frozen=True)
class Lookups:
    """What lookup gives at consecutive positions of a text.

    `match_lengths` int64 [positions]; `chains` int64 [positions, CHAIN]; `runs` int64 [positions].
    """

    match_lengths: NDArray[np.int64]
    chains: NDArray[np.int64]
    runs: NDArray[np.int64]


def look_up(token_ids: NDArray[np.int64], first: int) -> Lookups:
    """Match and lookup chain at each position of a text from `first` on, and how far it holds.

    The match at position t is the longest suffix of tokens 0 to t that also ends at an earlier
    position, at most `MAX_MATCH` tokens. Among the earlier positions with the longest one, the last
    counts. The chain is what follows it, and where that reaches beyond t it goes on in itself.
    `token_ids` int64 [n].
    """
    count = len(token_ids)
    match_lengths, sources = np.zeros(count, np.int64), np.full(count, -1)
    # number the suffixes of 1, 2, ... tokens at each position: equal suffixes, equal numbers
    _, suffixes = np.unique(token_ids, return_inverse=True)
    tokens = suffixes
    for length in range(1, MAX_MATCH + 1):
        if length > 1:
            # a longer suffix is the shorter one of the position before and the position's token
            pairs = suffixes[:-1].astype(np.int64) * count + tokens[length - 1 :]
            _, suffixes = np.unique(pairs, return_inverse=True)
        if not len(suffixes):
            break
        # in a stable order by suffix, the entry before is the last earlier one with this suffix
        order = np.argsort(suffixes, kind="stable")
        is_repeated = suffixes[order[1:]] == suffixes[order[:-1]]
        ends = order[1:][is_repeated] + length - 1  # suffix k ends at position k + length - 1
        match_lengths[ends] = length
        sources[ends] = order[:-1][is_repeated] + length - 1
    positions = np.arange(first, count)
    match_lengths, sources = match_lengths[first:], sources[first:]
    has_match = (match_lengths > 0)[:, None]
    offsets = np.arange(MAX_RUN)
    distances = np.where(has_match, (positions - sources)[:, None], 1)
    chains = np.where(has_match, token_ids[sources[:, None] + 1 + offsets % distances], NO_TOKEN)
    targets = positions[:, None] + 1 + offsets  # what the tokens of the chain guess
    is_in_text = targets < count
    is_equal = is_in_text & (chains == token_ids[np.where(is_in_text, targets, 0)])
    runs = np.cumprod(is_equal & has_match, axis=1).sum(1)
    return Lookups(match_lengths, chains[:, :CHAIN], runs)


@dataclass(frozen=True)
class Trials:
    """Which trial adds to which row of a table of counts.

    `rows` int64 [trials]; `sources` int64 [trials].
    """

    rows: NDArray[np.int64]
    sources: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Trials:
        """Put rows and sources of several parts together."""
        nothing = np.zeros(0, np.int64)
        rows, sources = zip((nothing, nothing), *parts, strict=True)
        return cls(np.concatenate(rows), np.concatenate(sources))


class LookupTrials:
    """The trials of one text, and the looked-up tokens that must be verified for them.

    `token_ids` int64 [n]; `token_positions` int64 [looked-up tokens]; `tokens` int64 [looked-up
    tokens].
    """

    def __init__(
        self, token_ids: NDArray[np.int64], levels: Sequence[int], rows: Sequence[int]
    ) -> None:
        count = len(levels)
        lookups = look_up(token_ids, len(token_ids) - count)
        classes = np.searchsorted(MATCH_LENGTHS, lookups.match_lengths, side="right") - 1
        positions, level_rows = np.arange(count), np.asarray(rows, np.int64)
        is_trial = level_rows >= 0
        roots = positions - np.asarray(levels)
        drafted_rows = 2 * np.minimum(level_rows // 2, LEVELS - 1) + level_rows % 2
        self.drafted = Trials(
            (classes[roots] * 2 * LEVELS + drafted_rows)[is_trial], positions[is_trial]
        )
        on_spine: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        off_spine: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        num_tokens = int(token_ids.max()) + 1
        has_match, runs = classes > 0, lookups.runs
        for level in range(CHAIN):
            chosen = np.flatnonzero(has_match & (runs >= level))
            chosen = chosen[is_trial[chosen + level]]
            tokens_after_position = (chosen + level) * num_tokens + lookups.chains[chosen, level]
            on_spine.append((_rows(classes[chosen], level, 0), tokens_after_position))
        # a run that is cut at `MAX_RUN` may go on, so what comes after it is not known to be off
        has_ended = has_match & (runs < MAX_RUN)
        for level in range(1, LEVELS_AFTER_CHAIN + 1):
            chosen = np.flatnonzero(has_ended & (positions + runs + level < count))
            chosen = chosen[is_trial[(positions + runs + level)[chosen]]]
            trial_rows = _rows(classes[chosen], runs[chosen] + level, 1)
            off_spine.append((trial_rows, (positions + runs + level)[chosen]))
        spine = Trials.join(on_spine)
        distinct, sources = np.unique(spine.sources, return_inverse=True)
        self.token_positions, self.tokens = distinct // num_tokens, distinct % num_tokens
        self.on_spine = Trials(spine.rows, sources)
        self.off_spine = Trials.join(off_spine)
        self.text = write_positions(
            list(map(Position, lookups.match_lengths.tolist(), lookups.runs.tolist()))
        )

    def tally(
        self, drafted_probs: NDArray[np.float64], looked_up_probs: NDArray[np.float64]
    ) -> dict[str, Any]:
        """Add up the trials of each row.

        `drafted_probs` float64 [positions, ranks]; `looked_up_probs` float64 [looked-up tokens,
        ranks].
        """
        shape = (len(MATCH_LENGTHS) * LOOKUP_LEVELS * 2, 1 + drafted_probs.shape[1])
        drafted, looked_up = np.zeros(shape), np.zeros(shape)
        _add(drafted, self.drafted, drafted_probs)
        _add(looked_up, self.on_spine, looked_up_probs)
        _add(looked_up, self.off_spine, drafted_probs)
        return {
            "drafted": _sparse(drafted),
            "looked_up": _sparse(looked_up),
            "text": self.text,
        }


def _rows(
    classes: NDArray[np.int64], levels: NDArray[np.int64] | int, parent_class: int
) -> NDArray[np.int64]:
    """Rows of the table `looked_up`, by class of match, level and class of parent."""
    rows: NDArray[np.int64] = classes * LOOKUP_LEVELS + np.minimum(levels, LOOKUP_LEVELS - 1)
    return 2 * rows + parent_class


def _add(table: NDArray[np.float64], trials: Trials, probs: NDArray[np.float64]) -> None:
    """Add trials (the first column) and probabilities (the others) to their rows."""
    np.add.at(table[:, 0], trials.rows, 1)
    np.add.at(table[:, 1:], trials.rows, probs[trials.sources])


def _sparse(table: NDArray[np.float64]) -> list[list[float]]:
    """The rows with trials, each with its number before it; six digits are more than enough."""
    numbers = np.flatnonzero(table[:, 0])
    rows = table[numbers].round(6).tolist()
    return [[number, *row] for number, row in zip(numbers.tolist(), rows, strict=True)]


def lookup_counts(
    tallies: Sequence[dict[str, Any] | None], kinds: Sequence[str | None]
) -> LookupCounts | None:
    """Combine the tallies of all prompts into what a profile holds."""
    if not tallies or not all(tallies):
        return None
    drafted_rows = [row for tally in tallies if tally for row in tally["drafted"]]
    if not drafted_rows:
        return None
    num_ranks = len(drafted_rows[0]) - 2  # after the row's number and its trials
    drafted = _tables([tally["drafted"] for tally in tallies if tally], LEVELS, num_ranks)
    looked_up = _tables(
        [tally["looked_up"] for tally in tallies if tally], LOOKUP_LEVELS, num_ranks
    )
    are_kinds_named = all(kinds) and len(set(kinds)) <= MAX_KINDS
    texts: dict[str, list[str]] = {}
    for number, tally in enumerate(tallies):
        kind = str(kinds[number % len(kinds)]) if are_kinds_named else "all"
        texts.setdefault(kind, []).append(tally["text"] if tally else "")
    return LookupCounts(
        classes=tuple(
            MatchClass(match_length, drafted[number], looked_up[number])
            for number, match_length in enumerate(MATCH_LENGTHS)
        ),
        texts=limited_texts(texts),
    )


def _tables(
    tables: Sequence[Sequence[Sequence[float]]], num_levels: int, num_ranks: int
) -> list[Counts | None]:
    """The sum of tables of trials, for each class of match its counts by level."""
    total = np.zeros((len(MATCH_LENGTHS) * num_levels * 2, 1 + num_ranks))
    for table in tables:
        for number, *row in table:
            total[int(number)] += row
    by_class = total.reshape(len(MATCH_LENGTHS), num_levels, 2, 1 + num_ranks)
    return [_counts(class_table) for class_table in by_class]


def _counts(table: NDArray[np.float64]) -> Counts | None:
    """The counts of one class of match, down to the last level with trials.

    `table` float64 [levels, 2, 1 + ranks].
    """
    trials, counts = table[..., 0].astype(np.int64), table[..., 1:]
    if not trials.any():
        return None
    off_spine = ObservedAcceptance(trials[None, :, 1], counts[None, :, 1])
    return ObservedAcceptance(trials.sum(1)[None], counts.sum(1)[None], off_spine).totals()
