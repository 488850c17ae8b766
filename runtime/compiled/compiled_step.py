"""The compiled step of a packed target, with a packed draft or none: its memory, and its calls."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.cache import TreeCache, round_up
from sequoia_plan.models.loaded_model import Backend
from sequoia_plan.models.packed.attention import BLOCK
from sequoia_plan.models.packed.backend import PackedBackend
from sequoia_plan.models.packed.forward import INPUTS, ROW_BYTES, UNIT, Reader
from sequoia_plan.models.packed.largest import BLOCK as SUM_BLOCK
from sequoia_plan.models.packed.packed_pass import NO_ROWS, NOTHING, PackedCache, PackedPass
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
from sequoia_plan.runtime.draft.packed_eagle import PackedEagle
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

    `contexts`: the most tokens that the target reads, then those of the draft. `hidden_states`: the
    layers whose outputs the draft reads. The parts of `step` that serve a draft are the target's or
    empty without one.
    """

    def __init__(
        self, target: PackedBackend, drafter: Drafter | None, sequence: SequenceState, rows: int,
        contexts: Sequence[int], hidden_states: Sequence[int],
    ) -> None:  # fmt: skip
        self.workers, self.rows, self.target = target.runner.workers, rows, target
        self.cache, workers = sequence.target, self.workers.count
        reader = draft_reader = new_reader(
            target.runner, target.embedding, target.vocabulary, sequence.target, workers, rows,
            contexts[0], hidden_states,
        )  # fmt: skip
        self.owners = [target.runner]  # of weights, whose addresses it has
        draft_embedding, eagle = target.embedding, None
        t2d = d2t = NOTHING  # if both vocabularies are the same
        if drafter:
            draft, draft_rows = drafter.backend, max(rows, CATCH_UP_TOKENS + 1)
            assert isinstance(draft, (PackedBackend, PackedEagle))
            if isinstance(draft, PackedEagle):
                eagle, draft_embedding = draft, draft.embedding(target)
            else:
                draft_embedding = draft.embedding
            draft_reader = new_reader(
                draft.runner, draft_embedding, drafter.vocabulary, sequence.draft, workers,
                draft_rows, contexts[-1], eagle.output_layers if eagle else (),
                2 * draft.runner.width if eagle else 0,
            )  # fmt: skip
            self.owners.append(draft.runner)
            if drafter.d2t is not None:
                t2d, d2t = np.full(target.vocabulary, -1), drafter.d2t.long().contiguous().numpy()
                t2d[d2t] = np.arange(d2t.size)
        vocabulary = max(reader.vocabulary, draft_reader.vocabulary)
        self.step = Step(
            target=reader, draft=draft_reader, eagle=eagle_of(eagle, sequence.draft, workers, rows),
            tokens=sequence.tokens.numpy(), length=sequence.length.numpy(),
            chain=sequence.lookup_chain.numpy(), embedding=embedding_of(target.embedding),
            draft_embedding=embedding_of(draft_embedding), bits=sequence.bits.numpy(),
            uniforms=sequence.uniforms.numpy(), path=np.zeros(rows, np.int64),
            own_tokens=np.zeros(rows, np.int64), masses=np.zeros(rows),
            residuals=np.zeros((rows, 4)), sums=np.zeros((workers, -(-vocabulary // SUM_BLOCK))),
            scratch=np.zeros((1, target.vocabulary), np.float32),
            probs=np.empty((rows, target.vocabulary), np.float32), t2d=t2d, d2t=d2t,
            output=np.zeros(2 + 2 * rows, np.int64), times=np.zeros(rows + 3),
        )  # fmt: skip

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a decoder gets None, and makes its own."""
        return type(None), ()

    def follows(self, sampling: Sampling) -> bool:
        """Has the compiled step the verifier of these settings?"""
        return sampling.greedy or sampling.verifier in RULES

    def __call__(
        self, tree: Tree, sampling: Sampling, max_match: int, num_unread: int, parts: int = ALL
    ) -> list[int]:
        """One step, or those of its `parts` (a sum of `DRAFT`, `TARGET` and `VERIFY`).

        `max_match`: tokens of the longest lookup match, 0 for none. The draft's first pass reads at
        least the last `num_unread` tokens before the root. Returns the number of accepted nodes,
        the path and the tokens after its nodes, `tree.depth` each, and the match's length.
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
    target: Backend, drafter: Drafter | None, sequence: SequenceState, rows: int,
    contexts: Sequence[int], hidden_states: Sequence[int],
) -> CompiledStep | None:  # fmt: skip
    """Steps of compiled models; None if a model cannot be a part of a compiled step.

    One with windowed layers cannot, and no EAGLE-3 draft if the host reads the target's embeddings.
    """
    assert isinstance(target, PackedBackend)
    has_windows = any(c.positions is not None for c in (sequence.target, sequence.draft))
    # only an EAGLE-3 draft reads hidden states
    if has_windows or (hidden_states and target.reads_embeddings):
        return None
    return CompiledStep(target, drafter, sequence, rows, contexts, hidden_states)


def new_reader(
    runner: PackedPass, embedding: Matrix, vocabulary: int, cache: TreeCache, workers: int,
    rows: int, context: int, hidden_states: Sequence[int], first_inputs: int = 0,
) -> Reader:  # fmt: skip
    """A model's weights, with memory for passes over `rows` tokens by so many threads.

    `context`: the most tokens that it reads. `hidden_states`: layers whose outputs are kept.
    `first_inputs`: inputs of the first layer's attention, if not the width.
    """
    assert isinstance(cache, PackedCache)
    slots = round_up(cache.capacity + rows, BLOCK)
    integers = partial(np.zeros, dtype=np.int64)
    return runner.new_reader(
        cache, workers, rows, hidden_states, vocabulary,
        **runner.new_scratch(workers, rows, slots),
        attended_first=np.zeros((rows, round_up(first_inputs, UNIT)), np.float32),
        positions=integers(rows), slots=integers(rows), tokens=integers(rows),
        read_slots=integers(rows), spans=integers((rows, 2)),
        visible=np.zeros((rows, slots), np.bool_),
        last=np.array([embedding.outputs - 1, context - 1]),  # token, position
    )  # fmt: skip


def eagle_of(eagle: PackedEagle | None, cache: TreeCache, workers: int, rows: int) -> Eagle:
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
        residual_is_normed=int(eagle is not None and eagle.residual_is_normed),
    )  # fmt: skip
