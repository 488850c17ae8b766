"""How often each match class comes up: recorded texts, decoded again on paper.

Before each step, the match is the longest suffix of the committed tokens that occurs earlier in
them. Its length decides the class of the step, and the class decides the tree. How far a step goes
decides where the next one begins, so the shares of classes depend on the trees.

A profile records of each position of a text the length of the match and how many of the next tokens
are those of the lookup chain. So what a looked-up spine yields there is known. What drafted nodes
yield is not, but its probabilities are. The replay therefore follows all ways through a text at
once: it carries the probability that a step begins at each position.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.artifacts.expected_tokens import child_probabilities
from sequoia_plan.artifacts.lookup import class_of, read_positions
from sequoia_plan.planner.solving.compiled import compiled

MAX_RUN = 64
"""Longer runs need not be told apart: no looked-up spine is longer."""


class Replay(NamedTuple):
    """What decoding the recorded texts again comes to.

    `shares` float64 [match classes]: the steps of each class as a share of all;
    `transitions` float64 [match classes, match classes]: expected steps, by the class of the step
    before and by their own; `visits_by_run` float64 [match classes, runs]: expected steps, by their
    class and by how many of the next tokens are those of the lookup chain.
    """

    shares: Floats
    tokens_per_step: float
    transitions: Floats
    visits_by_run: Floats


class RecordedText(NamedTuple):
    """A text of a profile, position by position.

    `match_classes` int64 [positions]: the class of the match there; `runs` int64 [positions]: how
    many of the next tokens are those of the lookup chain, `MAX_RUN` at most.
    """

    match_classes: Ints
    runs: Ints


def recorded_texts(texts: Iterable[str], match_lengths: Sequence[int]) -> list[RecordedText]:
    """The texts that are not empty; `texts` are records of `LookupCounts.texts`."""
    recorded = []
    for positions in map(list, map(read_positions, texts)):
        if positions:
            match_classes = [class_of(pos.match_length, match_lengths) for pos in positions]
            runs = [min(pos.run, MAX_RUN) for pos in positions]
            recorded.append(RecordedText(np.array(match_classes), np.array(runs)))
    return recorded


def replay(
    texts: Sequence[RecordedText], trees: Sequence[TokenTree], rates: Sequence[Floats]
) -> Replay:
    """Decode recorded texts again with one tree for each match class.

        for each position of a text, from the first on:
            the match there decides the tree
            the lookup chain and p of the tree decide how probably the step is 1, 2, ... tokens long
            pass the probability that a step begins here on to the positions after it

    The last steps of a text are not counted: a text that was cut off would cut them short.

    Args:
        texts: the texts, at least one.
        trees: the tree of each class.
        rates: the acceptance of each class and its tree, float64 [levels, node classes, ranks].
    """
    num_classes, runs_of_table = len(trees), np.arange(MAX_RUN + 1)
    step_lengths = np.zeros((num_classes, MAX_RUN + 1, max(tree.depth for tree in trees)))
    for match_class, tree in enumerate(trees):
        table = step_length_table(tree, rates[match_class])
        # the last row of a table holds for all longer runs
        table = table[np.minimum(runs_of_table, len(table) - 1)]
        step_lengths[match_class, :, : tree.depth] = table
    # the last row of transitions is of first steps, which have none before them
    num_tokens, transitions = 0.0, np.zeros((num_classes + 1, num_classes))
    visits_by_run = np.zeros((num_classes, MAX_RUN + 1))
    for text in texts:
        num_tokens += _replay_text(*text, step_lengths, transitions, visits_by_run)
    num_steps = float(transitions.sum())
    shares = transitions.sum(0) / num_steps
    return Replay(shares, num_tokens / num_steps, transitions[:-1], visits_by_run)


@compiled
def _replay_text(match_classes, runs, step_lengths, transitions, visits_by_run):
    """Decode one text again, and return the expected tokens of all steps that count.

    The steps are added to `transitions` float64 [match classes + 1, match classes] and
    `visits_by_run` float64 [match classes, runs]. `match_classes`, `runs` as in `RecordedText`;
    `step_lengths` float64 [match classes, runs, lengths]: the probability that a step is 1, 2, ...
    tokens long.
    """
    num_positions = len(match_classes)
    num_classes, _, longest = step_lengths.shape
    # [position, class of the step before]: the probability that a step begins at the position
    begins = np.zeros((num_positions + longest, num_classes + 1))
    begins[0, num_classes] = 1.0
    num_tokens = 0.0
    for position in range(num_positions - min(longest, num_positions // 2)):
        step_class = match_classes[position]
        probability = 0.0
        for last_class in range(num_classes + 1):
            probability += begins[position, last_class]
            transitions[last_class, step_class] += begins[position, last_class]
        visits_by_run[step_class, runs[position]] += probability
        for length in range(1, longest + 1):
            p = probability * step_lengths[step_class, runs[position], length - 1]
            begins[position + length, step_class] += p
            num_tokens += p * length
    return num_tokens


def step_length_table(tree: TokenTree, rates: Floats) -> Floats:
    """The probability that a step is 1, 2, ... tokens long, float64 [runs, depth].

    Row r is for positions at which the next r tokens are those of the lookup chain, and the last
    row also for more. A tree that does not look up has one row. `rates` float64 [levels, node
    classes, ranks], the acceptance.
    """
    probabilities = np.append(1.0, child_probabilities(tree, rates))
    reached = probabilities[None].copy()
    if tree.looks_up:
        spine, siblings = tree.classes == 0, (tree.classes == 1) & (tree.classes[tree.parents] == 0)
        # In row r, the first r tokens of the spine are accepted for certain, and the next one is
        # rejected. So its siblings have their probabilities given that, and no others have a use.
        runs = np.arange(spine.sum())[:, None]
        rejected = 1 - np.append(probabilities[spine][1:], 1.0)
        levels = tree.position_ids[siblings] - 1
        given_rejected = probabilities[siblings] / np.maximum(rejected[levels], 1e-300)
        given_rejected = np.where(rejected[levels] > 0, np.minimum(1.0, given_rejected), 0.0)
        reached = np.tile(probabilities, (len(runs), 1))
        reached[:, spine] = runs >= runs.T
        reached[:, siblings] = (runs == levels) * given_rejected
    for start, stop in itertools.pairwise(tree.level_offsets[1:].tolist()):
        reached[:, start:stop] *= reached[:, tree.parents[start:stop]]
    # at most one node of a level is accepted, so a step has a token of the level that often
    at_least = np.add.reduceat(reached, tree.level_offsets[:-1], axis=1)
    lengths = np.maximum(0.0, -np.diff(at_least, append=0.0))
    return lengths / lengths.sum(1, keepdims=True)
