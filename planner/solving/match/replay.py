"""How often each class of match comes up: recorded texts, decoded again on paper.

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

    `shares` float64 [classes]; `transitions` float64 [classes, classes].
    """

    shares: Floats
    tokens_per_step: float
    transitions: Floats
    visits_by_run: Floats


class RecordedText(NamedTuple):
    """A text of a profile, position by position.

    `classes` int64 [positions]; `runs` int64 [positions].
    """

    classes: Ints
    runs: Ints


def recorded_texts(texts: Iterable[str], match_lengths: Sequence[int]) -> list[RecordedText]:
    """The texts that are not empty, as `LookupCounts` records them, with classes of match."""
    recorded = []
    for positions in map(list, map(read_positions, texts)):
        if positions:
            classes = [class_of(position.match_length, match_lengths) for position in positions]
            runs = [min(position.run, MAX_RUN) for position in positions]
            recorded.append(RecordedText(np.array(classes), np.array(runs)))
    return recorded


def replay(
    texts: Sequence[RecordedText], trees: Sequence[TokenTree], rows: Sequence[Floats]
) -> Replay:
    """Decode recorded texts again with one tree for each class of match.

        for each position of a text, from the first on:
            the match there decides the tree
            the lookup chain and p of the tree decide how probably the step is 1, 2, ... tokens long
            pass the probability that a step begins here on to the positions after it

    The last steps of a text are not counted: a text that was cut off would cut them short.

    Args:
        texts: the texts, at least one.
        trees: the tree of each class.
        rows: the acceptance of each class and its tree, float64 [levels, classes, ranks].
    """
    tables = list(map(advance_table, trees, rows))
    advances = np.zeros((len(trees), MAX_RUN + 1, max(tree.depth for tree in trees)))
    for table, of_class in zip(tables, advances, strict=True):
        of_class[:, : table.shape[1]] = table[np.minimum(np.arange(MAX_RUN + 1), len(table) - 1)]
    num_tokens, transitions = 0.0, np.zeros((len(trees) + 1, len(trees)))
    visits_by_run = np.zeros((len(trees), MAX_RUN + 1))
    for classes, runs in texts:
        num_tokens += _replay_text(classes, runs, advances, transitions, visits_by_run)
    num_steps = float(transitions.sum())
    shares = transitions.sum(0) / num_steps
    return Replay(shares, num_tokens / num_steps, transitions[:-1], visits_by_run)


@compiled
def _replay_text(classes, runs, advances, transitions, visits_by_run):
    """Decode one text again, and return the expected tokens of all steps that count.

    `classes` int64 [positions]; `runs` int64 [positions]; `advances` float64 [classes, runs,
    lengths]; `transitions` float64 [classes + 1, classes]; `visits_by_run` float64 [classes, runs].
    """
    num_positions = len(classes)
    num_classes, _, longest = advances.shape
    # probability that a step begins at each position, by the class of the step before it
    begins = np.zeros((num_positions + longest, num_classes + 1))
    begins[0, num_classes] = 1.0
    num_tokens = 0.0
    for position in range(num_positions - min(longest, num_positions // 2)):
        step_class = classes[position]
        probability = 0.0
        for last_class in range(num_classes + 1):
            probability += begins[position, last_class]
            transitions[last_class, step_class] += begins[position, last_class]
        visits_by_run[step_class, runs[position]] += probability
        for length in range(1, longest + 1):
            p = probability * advances[step_class, runs[position], length - 1]
            begins[position + length, step_class] += p
            num_tokens += p * length
    return num_tokens


def advance_table(tree: TokenTree, rows: Floats) -> Floats:
    """The probability that a step is 1, 2, ... tokens long, float64 [runs, depth].

    Row r is for positions at which the next r tokens are those of the lookup chain, and the last
    row also for more. A tree that does not look up has one row. `rows` float64 [levels, classes,
    ranks], the acceptance.
    """
    probabilities = np.append(1.0, child_probabilities(tree, rows))
    reached = probabilities[None].copy()
    if tree.looks_up:
        spine, siblings = tree.classes == 0, (tree.classes == 1) & (tree.classes[tree.parents] == 0)
        # In each row, the looked-up tokens of the run are accepted, and the next one is rejected.
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
