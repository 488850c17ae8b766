"""The compiled step of a packed target, with a packed draft or none: its memory, and its calls."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.packed.attention import BLOCK
from sequoia_plan.models.packed.forward import INPUTS, ROW_BYTES, UNIT, Reader
from sequoia_plan.models.packed.largest import BLOCK as SUM_BLOCK
from sequoia_plan.models.packed.packed_pass import NO_ROWS, NOTHING, PackedPass
from sequoia_plan.models.packed.system import now
from sequoia_plan.models.packed.tiles import Matrix, aligned_zeros, embedding_of
from sequoia_plan.models.packed.weights import describe
from sequoia_plan.runtime.compiled.draft import fill_node_rows
from sequoia_plan.runtime.compiled.memory import (
    ALL,
    DRAFT,
    GREEDY,
    SEQUOIA,
    TARGET,
    TRAVERSAL,
    VERIFY,
    Eagle,
    Step,
    Tree,
)
from sequoia_plan.runtime.compiled.step import decode
from sequoia_plan.runtime.draft.drafter import Drafter
from sequoia_plan.runtime.sampling.sampling import Sampling
from sequoia_plan.runtime.sequence import CATCH_UP_TOKENS, DRAFT_NOT_FINITE, SequenceState

RULES = {"sequoia": SEQUOIA, "traversal": TRAVERSAL}


def tree_of(tree: TokenTree, pass_rows: Sequence[int], pass_draws: Sequence[int]) -> Tree:
    """A tree as a `Tree`; of each draft pass, the tokens that it reads and the draws of a node."""
    inner = np.flatnonzero(tree.child_count)
    inner_index = np.zeros(tree.size, np.int64)
    inner_index[inner] = np.arange(inner.size)
    counts = tree.num_parents_by_level
    firsts = np.cumsum([0, *counts])[:-1]
    passes = np.array([*zip(firsts, counts, pass_draws, pass_rows, strict=True)], np.int64)
    looked_up = (tree.classes == 0) & bool(tree.looks_up)
    looked_up[0] = False
    integers = partial(np.ascontiguousarray, dtype=np.int64)
    return Tree(
        parents=integers(np.append(-1, tree.parents[1:])), levels=integers(tree.position_ids),
        first_child=integers(tree.first_child), num_children=integers(tree.child_count),
        looked_up=integers(looked_up), inner_index=inner_index, inner=integers(inner),
        passes=passes.reshape(-1, 4), depth=tree.depth, branching=max(tree.branching, 1),
    )  # fmt: skip


class CompiledStep:
    """Steps of a decoder in one call each. Passes read up to `rows` tokens.

    `target`: a `PackedBackend`; that of `drafter` is another, or a `PackedEagle`. `contexts`: the
    most tokens that the target reads, then those of the draft. `hidden_states`: the layers whose
    outputs the draft reads.
    """

    tree_of = staticmethod(tree_of)

    def __init__(
        self, target: Any, drafter: Drafter | None, sequence: SequenceState, rows: int,
        contexts: Sequence[int], hidden_states: Sequence[int],
    ) -> None:  # fmt: skip
        self.workers, self.rows, self.target = target.runner.workers, rows, target
        self.cache = sequence.target
        vocabulary, d2t = (drafter.vocabulary, drafter.d2t) if drafter else (0, None)  # the draft's
        draft, workers = drafter and drafter.backend, self.workers.count
        self.owners = target.runner, draft and draft.runner  # of weights, whose addresses it has
        reader = draft_reader = new_reader(
            target.runner, target.embedding, target.vocabulary, sequence.target, workers, rows,
            contexts[0], hidden_states,
        )  # fmt: skip
        draft_embedding = target.embedding
        eagle = draft if draft and draft.traits.reads_features else None
        if draft:
            layers, first_inputs = (), 0
            if eagle:
                layers, first_inputs = eagle.output_layers, round_up(2 * eagle.runner.width, UNIT)
            draft_embedding = eagle.embedding(target) if eagle else draft.embedding
            draft_reader = new_reader(
                draft.runner, draft_embedding, vocabulary, sequence.draft, workers,
                max(rows, CATCH_UP_TOKENS + 1), contexts[-1], layers, first_inputs,
            )  # fmt: skip
        largest_vocabulary = max(target.vocabulary, vocabulary)
        t2d = own_tokens = NOTHING  # both vocabularies are the same
        if d2t is not None:
            t2d, own_tokens = np.full(target.vocabulary, -1), d2t.long().contiguous().numpy()
            t2d[own_tokens] = np.arange(own_tokens.size)
        self.step = Step(
            target=reader, draft=draft_reader, eagle=eagle_of(eagle, sequence.draft, workers, rows),
            tokens=sequence.tokens.numpy(), length=sequence.length.numpy(),
            chain=sequence.lookup_chain.numpy(), embedding=embedding_of(target.embedding),
            draft_embedding=embedding_of(draft_embedding), bits=sequence.bits.numpy(),
            uniforms=sequence.uniforms.numpy(), path=np.zeros(rows, np.int64),
            own_tokens=np.zeros(rows, np.int64), masses=np.zeros(rows),
            residuals=np.zeros((rows, 4)),
            sums=np.zeros((workers, -(-largest_vocabulary // SUM_BLOCK))),
            scratch=np.zeros((1, target.vocabulary), np.float32),
            probs=np.empty((rows, target.vocabulary), np.float32), t2d=t2d, d2t=own_tokens,
            output=np.zeros(2 + 2 * rows, np.int64), times=np.zeros(rows + 3),
        )  # fmt: skip

    def __reduce__(self) -> Any:
        """A copy of a decoder gets None, and makes its own."""
        return type(None), ()

    def follows(self, sampling: Sampling) -> bool:
        """Has the compiled step the verifier of these settings?"""
        return sampling.greedy or sampling.verifier in RULES

    def __call__(
        self, tree: Tree, sampling: Sampling, max_match: int, num_unread: int, parts: int = ALL
    ) -> list[int]:
        """One step, or some of its parts; returns the numbers of `TreeStep.commit`.

        `max_match`: tokens of the longest lookup match, 0 for none. The draft's first pass reads at
        least the last `num_unread` tokens before the root. `parts`: a sum of `DRAFT`, `TARGET` and
        `VERIFY`.
        """
        temperatures = sampling.temperature, sampling.draft_temperature or sampling.temperature
        floats = map(np.float32, (*temperatures, sampling.top_p, sampling.min_p))
        settings = *floats, sampling.top_k
        rule = GREEDY if sampling.greedy else RULES[sampling.verifier]
        with self.workers.lock:
            arguments = decode, self.step, tree, settings, rule, max_match, num_unread
            if not self.target.reads_embeddings:
                self.workers.run(*arguments, parts)
            else:  # the host reads embeddings from a file, and waits for the target's weights
                self.step.times[0] = now()
                self.workers.run(*arguments, parts & DRAFT)
                is_finite = self.step.output[0]
                if parts & TARGET:
                    self._run_target(tree)
                if parts & VERIFY and is_finite:
                    self.workers.run(*arguments, VERIFY)
                elif parts & VERIFY:
                    self.step.output[0] = DRAFT_NOT_FINITE
        return self.step.output[: 2 + 2 * tree.depth].tolist()

    def _run_target(self, tree: Tree) -> None:
        """The target's pass over a drafted tree, layer by layer as weights arrive."""
        reader, size = self.step.target, len(tree.parents)
        fill_node_rows(self.step, tree, reader, np.arange(size), 0)
        embedded = self.target.embedded(reader.tokens[:size])
        reader.x[:, :size, : embedded.shape[1]] = embedded
        self.target.runner.run(self.cache, reader, size, 0, size)
        self.step.times[len(tree.passes) + 1] = now()

    def seconds(self, tree: Tree) -> list[float]:
        """The last step's seconds: of each draft pass with its draws, the target's, the rest."""
        return np.diff(self.step.times[: len(tree.passes) + 3]).tolist()

    def time_passes(self, tree: Tree, sampling: Sampling, *, of_target: bool) -> list[float]:
        """Run the draft's passes, or the target's one; returns the seconds of each.

        `step.times`: the start, the end of each draft pass, and that of the target's.
        """
        parts = TARGET if of_target else DRAFT
        self(tree, sampling, max_match=0, num_unread=0, parts=parts)
        if of_target:
            return [float(self.step.times[len(tree.passes) + 1] - self.step.times[0])]
        return self.seconds(tree)[: len(tree.passes)]


def new_step(
    target: Any, drafter: Drafter | None, sequence: SequenceState, **sizes: Any
) -> CompiledStep | None:
    """Steps of compiled models; None if a model cannot be a part of a compiled step.

    One with windowed layers cannot, and no EAGLE-3 draft if the host reads the target's embeddings.
    `sizes`: the other arguments of `CompiledStep`.
    """
    caches = sequence.target, sequence.draft
    reads_features = drafter is not None and drafter.backend.traits.reads_features
    has_windows = any(cache.positions is not None for cache in caches)
    if has_windows or (reads_features and target.reads_embeddings):
        return None
    return CompiledStep(target, drafter, sequence, **sizes)


def new_reader(
    runner: PackedPass, embedding: Matrix, vocabulary: int, cache: Any, workers: int, rows: int,
    context: int, hidden_states: Sequence[int], first_inputs: int = 0,
) -> Reader:  # fmt: skip
    """A model's weights, with memory for passes over `rows` tokens by so many threads.

    `context`: the most tokens that it reads. `hidden_states`: layers whose outputs are kept.
    `first_inputs`: inputs of the first layer's attention, if not the width.
    """
    slots = round_up(cache.capacity + rows, BLOCK)
    integers = partial(np.zeros, dtype=np.int64)
    return runner.new_reader(
        cache, workers, rows, hidden_states, vocabulary,
        **runner.new_scratch(workers, rows, slots),
        attended_first=np.zeros((rows, first_inputs), np.float32),
        positions=integers(rows), slots=integers(rows), tokens=integers(rows),
        read_slots=integers(rows), spans=integers((rows, 2)),
        visible=np.zeros((rows, slots), np.bool_),
        last=np.array([embedding.outputs - 1, context - 1]),  # token, position
    )  # fmt: skip


def eagle_of(eagle: Any, cache: Any, workers: int, rows: int) -> Eagle:
    """What a `PackedEagle` has beside its layer, with its cache's features; nothing of None."""
    fc, norms, features = NOTHING, NO_ROWS, NO_ROWS
    inputs = row_bytes = outputs = 0
    if eagle:
        fc, norms, features = describe(eagle.fc), np.stack(eagle.norms), cache.features.numpy()
        inputs, row_bytes, outputs = int(fc[INPUTS]), int(fc[ROW_BYTES]), eagle.fc.outputs
    return Eagle(
        fc=fc, norms=norms, features=features,
        rows=aligned_zeros((workers, rows, round_up(inputs, UNIT)), np.float32),
        encoded=aligned_zeros((workers, rows * row_bytes)),
        products=np.zeros((rows, round_up(outputs, UNIT)), np.float32),
        residual_is_normed=int(bool(eagle) and eagle.residual_is_normed),
    )  # fmt: skip
