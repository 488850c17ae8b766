"""Prompt lookup, counted over texts that the target wrote."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sequoia_plan.artifacts import Counts
from sequoia_plan.artifacts.counts import Floats, Ints
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
from sequoia_plan.runtime.lookup import look_up as decoders_look_up

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


def look_up(token_ids: Ints, first: int) -> tuple[Ints, Ints, Ints]:
    """Match and lookup chain at each position of a text from `first` on, as the decoder finds them.

    `token_ids` int64 [n]. Returns the match lengths, int64 [positions], the chains, int64
    [positions, CHAIN], and the runs, int64 [positions]: how many of the next tokens of the text are
    those of the chain.
    """
    text, count = torch.from_numpy(np.append(token_ids, NO_TOKEN)), len(token_ids)
    lengths, chains = zip(
        *(
            decoders_look_up(text, torch.tensor([position]), MAX_MATCH, MAX_RUN)
            for position in range(first, count)
        ),
        strict=True,
    )
    match_lengths = torch.cat(lengths).numpy()
    chain_tokens = np.where(match_lengths[:, None] > 0, torch.stack(chains).numpy(), NO_TOKEN)
    guessed = np.arange(first, count)[:, None] + 1 + np.arange(MAX_RUN)  # positions in the text
    is_right = (guessed < count) & (chain_tokens == token_ids[np.minimum(guessed, count - 1)])
    return match_lengths, chain_tokens[:, :CHAIN], np.cumprod(is_right, axis=1).sum(1)


class Trials(NamedTuple):
    """Nodes whose children count: the table's row of each, and the index of its probabilities."""

    rows: Ints
    prob_indices: Ints


class LookupTrials:
    """The trials of one text, and the looked-up tokens that must be verified for them.

    `token_positions`, `tokens` int64 [looked-up tokens]: each token, and where it would stand.
    """

    def __init__(self, token_ids: Ints, levels: Ints, rows: Ints) -> None:
        """Find the trials of a text that one tree wrote and others might have.

        `levels`, `rows` int64 [positions]: the level in the tree that wrote, and the row of its
        counts, 2 * level + node class; -1 does not count (see `ForcedAcceptance`).
        """
        count = len(levels)
        match_lengths, chains, run_lengths = look_up(token_ids, len(token_ids) - count)
        match_classes = np.searchsorted(MATCH_LENGTHS, match_lengths, side="right") - 1
        positions, is_counted = np.arange(count), rows >= 0
        roots = positions - levels  # where the step of each position began: its match counts
        drafted_rows = 2 * np.minimum(rows // 2, LEVELS - 1) + rows % 2
        drafted_rows += match_classes[roots] * 2 * LEVELS
        self.drafted = Trials(drafted_rows[is_counted], positions[is_counted])
        # [positions, levels]: a tree that looks up might begin at each position, so each node of
        # its spine is a trial, as long as all looked-up tokens before it are right
        match_classes, runs = match_classes[:, None], run_lengths[:, None]
        has_match, spine_levels = match_classes > 0, np.arange(CHAIN)
        nodes = positions[:, None] + spine_levels
        is_trial = has_match & (runs >= spine_levels) & is_counted[np.minimum(nodes, count - 1)]
        # chains that overlap have tokens at positions in common, which are verified once
        num_tokens = int(token_ids.max()) + 1
        pairs = (nodes * num_tokens + chains)[is_trial]  # position and token as one number
        distinct_pairs, token_indices = np.unique(pairs, return_inverse=True)
        self.token_positions, self.tokens = np.divmod(distinct_pairs, num_tokens)
        rows_on_spine = _looked_up_rows(match_classes, spine_levels, 0)
        self.on_spine = Trials(rows_on_spine[is_trial], token_indices)
        # a run that is cut at `MAX_RUN` may go on, so what comes after it is not known to be off
        levels_after = runs + np.arange(1, LEVELS_AFTER_CHAIN + 1)
        nodes = positions[:, None] + levels_after
        is_trial = has_match & (runs < MAX_RUN) & (nodes < count)
        is_trial &= is_counted[np.minimum(nodes, count - 1)]
        rows_off_spine = _looked_up_rows(match_classes, levels_after, 1)
        self.off_spine = Trials(rows_off_spine[is_trial], nodes[is_trial])
        self.text = write_positions(map(Position, match_lengths.tolist(), run_lengths.tolist()))

    def tally(self, drafted_probs: Floats, looked_up_probs: Floats) -> dict[str, Any]:
        """Tables of trials and accepted children; a row is a match class, level and node class.

        A row has the trials, and then the accepted children by rank, as sums of probabilities with
        six digits: `drafted_probs` float64 [positions, ranks]; `looked_up_probs` float64 [looked-up
        tokens, ranks].
        """
        num_columns = 1 + drafted_probs.shape[1]
        drafted = np.zeros((len(MATCH_LENGTHS) * LEVELS * 2, num_columns))
        looked_up = np.zeros((len(MATCH_LENGTHS) * LOOKUP_LEVELS * 2, num_columns))
        for table, trials, probs in (
            (drafted, self.drafted, drafted_probs),
            (looked_up, self.on_spine, looked_up_probs),
            (looked_up, self.off_spine, drafted_probs),
        ):
            np.add.at(table[:, 0], trials.rows, 1)
            np.add.at(table[:, 1:], trials.rows, probs[trials.prob_indices])
        return {
            "drafted": drafted.round(6).tolist(),
            "looked_up": looked_up.round(6).tolist(),
            "text": self.text,
        }


def _looked_up_rows(match_classes: Ints, levels: Ints, node_class: int) -> Ints:
    """Rows of the table `looked_up` for nodes of these match classes and levels, broadcast."""
    rows = match_classes * LOOKUP_LEVELS + np.minimum(levels, LOOKUP_LEVELS - 1)
    return 2 * rows + node_class


def lookup_counts(
    tallies: Sequence[dict[str, Any] | None], kinds: Sequence[str]
) -> LookupCounts | None:
    """Add the prompts' `LookupTrials.tally` up for a profile; None if lookup was not counted."""
    if not tallies or not all(tallies):
        return None
    drafted, looked_up = (
        np.sum([tally[name] for tally in tallies if tally], axis=0)
        for name in ("drafted", "looked_up")
    )
    texts: dict[str, list[str]] = {}
    for kind, tally in zip(kinds, tallies, strict=False):
        texts.setdefault(kind, []).append(tally["text"] if tally else "")
    match_classes = map(
        MatchClass, MATCH_LENGTHS, _by_match_class(drafted), _by_match_class(looked_up)
    )
    return LookupCounts(tuple(match_classes), limited_texts(texts))


def _by_match_class(table: Floats) -> list[Counts | None]:
    """The counts of each match class, down to the last level with trials; None without any.

    `table` float64 [match classes * levels * 2, 1 + ranks], as `LookupTrials.tally` makes it.
    """
    counts: list[Counts | None] = []
    for of_class in table.reshape(len(MATCH_LENGTHS), 1, -1, 2, table.shape[1]):
        trials, accepted = of_class[..., 0], of_class[..., 1:]
        observed = ObservedAcceptance(trials.astype(np.int64), accepted)  # as of one prompt
        counts.append(observed.totals() if trials.any() else None)
    return counts
