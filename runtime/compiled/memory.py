"""What a compiled step reads and writes, and the constants of its parts."""

import numpy as np

from sequoia_plan.models.packed.records import Record, compiled
from sequoia_plan.models.packed.system import now

GREEDY, SEQUOIA, TRAVERSAL = range(3)
C, E, PROB, SCALE = range(4)
"""The columns of `Step.residuals`: of R = max(p - c w - e, 0), a, and a / mass of R."""
DRAFT, TARGET, VERIFY, ALL = 1, 2, 4, 7
"""The parts of a step that are run."""


class Eagle(Record):
    """What an EAGLE-3 draft has beside its layer; `fc` int64 [0] if the draft is none.

    `features` float32 [slots, width]: of the token before each slot; `norms` float32 [2, width]: of
    embeddings and features; `rows` float32 [workers, nodes of a path, inputs of `fc`], `encoded`
    and `products`: of `note_features`.
    """


class Tree(Record):
    """A tree's structure, int64 [nodes] each; `parents[0]` is -1.

    `looked_up`: 1 where a node's token is; `inner_index`: of an inner node, its place among these;
    `inner`: the inner nodes in order; `passes` int64 [passes, 4]: the first of the pass's parents
    in `inner`, how many, draws of each, and tokens that the pass reads.
    """


class Step(Record):
    """All that steps of a decoder read and write. Memory is as `SequenceState` has it.

    `own_tokens` int64 [nodes]: of drawn nodes, their number in the draft's vocabulary; `masses`
    float64 [nodes]: the weight of what was not drawn before a node; `sums` are each worker's own;
    `scratch`, `probs` float32 [nodes, vocabulary]; `t2d` int64 [vocabulary], -1 for tokens that the
    draft lacks, `d2t` int64 [draft vocabulary]: both [0] if the vocabularies are the same; `output`
    int64 [2 + 2 * nodes]: a step's numbers, as `TreeStep.commit` returns them.
    """


@compiled
def note_time(worker, step, place):
    """Note the time, in seconds."""
    if worker == 0:
        step.times[place] = now()


@compiled
def largest_in(reader, row):
    """A row's largest logit; NaN if one is NaN."""
    largest = reader.largest[0, row]
    for worker in range(1, reader.largest.shape[0]):
        other = reader.largest[worker, row]
        if other > largest or other != other:
            largest = other
    return largest


@compiled
def are_finite(reader, count):
    """Are the logits of so many rows of the last pass finite?"""
    num_finite = 0
    for row in range(count):
        num_finite += np.isfinite(largest_in(reader, row))
    return num_finite == count
