"""Prompt lookup, counted over texts that the target wrote."""

from collections.abc import Sequence
from typing import Any

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
    """Match and lookup chain at each position of a text from `first` on, and how far it holds.

    They are those that the decoder would find there. `token_ids` int64 [n]; returns the match
    lengths, int64 [positions], the chains, int64 [positions, CHAIN], and the runs, int64
    [positions].
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


class LookupTrials:
    """The trials of one text, and the looked-up tokens that must be verified for them.

    A trial is a row of a table of counts and the place of its probabilities. `token_positions`,
    `tokens` int64 [looked-up tokens].
    """

    def __init__(self, token_ids: Ints, levels: Ints, rows: Ints) -> None:
        """Find the trials; `levels` and `rows` are of the positions as in `ForcedAcceptance`."""
        count = len(levels)
        match_lengths, chains, run_lengths = look_up(token_ids, len(token_ids) - count)
        classes = np.searchsorted(MATCH_LENGTHS, match_lengths, side="right") - 1
        positions, is_trial = np.arange(count), rows >= 0
        roots = positions - levels
        drafted_rows = 2 * np.minimum(rows // 2, LEVELS - 1) + rows % 2
        self.drafted = ((classes[roots] * 2 * LEVELS + drafted_rows)[is_trial], positions[is_trial])
        # a token of a lookup chain on the spine, by the chain's first position and its level
        classes, runs, levels = classes[:, None], run_lengths[:, None], np.arange(CHAIN)
        has_match = classes > 0
        places = positions[:, None] + levels
        chosen = has_match & (runs >= levels) & is_trial[np.minimum(places, count - 1)]
        num_tokens = int(token_ids.max()) + 1
        tokens = (places * num_tokens + chains)[chosen]
        distinct, token_numbers = np.unique(tokens, return_inverse=True)
        self.token_positions, self.tokens = distinct // num_tokens, distinct % num_tokens
        self.on_spine = _rows(classes, levels, 0)[chosen], token_numbers
        # a run that is cut at `MAX_RUN` may go on, so what comes after it is not known to be off
        levels = runs + np.arange(1, LEVELS_AFTER_CHAIN + 1)
        places = positions[:, None] + levels
        chosen = has_match & (runs < MAX_RUN) & (places < count)
        chosen &= is_trial[np.minimum(places, count - 1)]
        self.off_spine = _rows(classes, levels, 1)[chosen], places[chosen]
        self.text = write_positions(map(Position, match_lengths.tolist(), run_lengths.tolist()))

    def tally(self, drafted_probs: Floats, looked_up_probs: Floats) -> dict[str, Any]:
        """Trials and accepted children by class of match, level and node class.

        `drafted_probs` float64 [positions, ranks]; `looked_up_probs` float64 [looked-up tokens,
        ranks]. Six digits are more than enough.
        """
        num_columns = 1 + drafted_probs.shape[1]
        drafted = np.zeros((len(MATCH_LENGTHS) * LEVELS * 2, num_columns))
        looked_up = np.zeros((len(MATCH_LENGTHS) * LOOKUP_LEVELS * 2, num_columns))
        for table, (rows, places), probs in (
            (drafted, self.drafted, drafted_probs),
            (looked_up, self.on_spine, looked_up_probs),
            (looked_up, self.off_spine, drafted_probs),
        ):
            np.add.at(table[:, 0], rows, 1)
            np.add.at(table[:, 1:], rows, probs[places])
        return {
            "drafted": drafted.round(6).tolist(),
            "looked_up": looked_up.round(6).tolist(),
            "text": self.text,
        }


def _rows(classes: Ints, levels: Ints, node_class: int) -> Ints:
    """Rows of the table `looked_up`."""
    rows = classes * LOOKUP_LEVELS + np.minimum(levels, LOOKUP_LEVELS - 1)
    return 2 * rows + node_class


def lookup_counts(
    tallies: Sequence[dict[str, Any] | None], kinds: Sequence[str]
) -> LookupCounts | None:
    """Combine the tallies of all prompts into what a profile holds; None if none were made."""
    if not tallies or not all(tallies):
        return None
    drafted, looked_up = (
        np.sum([tally[name] for tally in tallies if tally], axis=0)
        for name in ("drafted", "looked_up")
    )
    texts: dict[str, list[str]] = {}
    for kind, tally in zip(kinds, tallies, strict=False):
        texts.setdefault(kind, []).append(tally["text"] if tally else "")
    classes = zip(MATCH_LENGTHS, _counts(drafted), _counts(looked_up), strict=True)
    return LookupCounts(tuple(MatchClass(*values) for values in classes), limited_texts(texts))


def _counts(table: Floats) -> list[Counts | None]:
    """The counts of each class of match, down to the last level with trials."""
    by_class = table.reshape(len(MATCH_LENGTHS), -1, 2, table.shape[1])
    return [
        ObservedAcceptance(part[None, ..., 0].astype(np.int64), part[None, ..., 1:]).totals()
        if part[..., 0].any()
        else None
        for part in by_class
    ]
