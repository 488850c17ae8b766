"""What a compiled step reads and writes, and the constants of its parts."""

import numpy as np

from sequoia_plan.models.packed.records import Record, compiled
from sequoia_plan.models.packed.system import now

GREEDY, SEQUOIA, TRAVERSAL = range(3)
C, E, PROB, SCALE = range(4)
"""The columns of `Step.residuals`: c and e of R = max(p - c w - e, 0), a, and a / mass of R."""
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

    `inner`: the inner nodes, those with children, in order; `inner_index`: the index in it of an
    inner node; `looked_up`: 1 where a node's token is looked up; `passes` int64 [passes, 4]: where
    the nodes begin in `inner` of which the pass drafts children, how many they are, the draws of
    each, and the tokens that the pass reads.
    """


class Step(Record):
    """All that steps of a decoder read and write. Memory is as `SequenceState` has it.

    `own_tokens` int64 [nodes]: a drawn node's token in the draft's vocabulary; `masses` float64
    [nodes]: the weight of all tokens not drawn before the node; `sums` are each worker's own;
    `scratch`, `probs` float32 [nodes, vocabulary]; `t2d` int64 [vocabulary], -1 for tokens that the
    draft lacks, `d2t` int64 [draft vocabulary]: both [0] if the vocabularies are the same; `output`
    int64 [2 + 2 * nodes]: a step's numbers, as `TreeStep.commit` returns them.
    """


@compiled
def note_time(worker, step, number):
    """Let the first worker write the time, in seconds, to `step.times[number]`."""
    if worker == 0:
        step.times[number] = now()


@compiled
def largest_in(reader, row):
    """The largest logit of a row, from those that workers noted; NaN if one is NaN."""
    largest = reader.largest[0, row]
    for worker in range(1, reader.largest.shape[0]):
        other = reader.largest[worker, row]
        if other > largest or other != other:
            largest = other
    return largest


@compiled
def are_finite(reader, count):
    """Are the logits of the first `count` rows of the last pass finite?"""
    num_finite = 0
    for row in range(count):
        num_finite += np.isfinite(largest_in(reader, row))
    return num_finite == count
