"""What every drafter does: it declares its passes, runs them, and learns what was accepted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import Drafting, TokenTree
from sequoia_plan.artifacts.tree import IntArray
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.loaded_model import Backend, ForwardOutput, LoadedModel
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft
from sequoia_plan.runtime.sampling.sampling import Sampling
from sequoia_plan.runtime.sequence import SequenceState

if TYPE_CHECKING:  # it needs numba
    from sequoia_plan.runtime.draft.packed_eagle import PackedEagle


@dataclass(frozen=True)
class DraftPass:
    """One forward pass of a draft, and the children that are drawn from its logits.

    Slots and positions are counted from the root's: `input_slots` and `offsets`, int64 [width], of
    the tokens that are read; `mask` [width, size + 2]: see `TreeTensors`. Logits belong to
    `parents`, for each of which `num_draws` are drawn, if the draft has so many tokens, and
    `max_children` used: `draw_index` int64 [new nodes] is the place of each of `new_nodes` among
    all of these. `parent_rows` int64 [width]: the rows of the tokens' parents in the pass before;
    `logit_rows` int64 [num_parents]: which row of a block's logits each parent takes; `looked_up`
    int64 [2, nodes]: the rows in `parents` of nodes whose first child is looked up, and these
    children; `later`: the passes after this one.
    """

    input_slots: Tensor
    offsets: Tensor
    mask: Tensor
    num_parents: int
    draw_index: Tensor
    new_nodes: Tensor
    max_children: int = 1
    num_draws: int = 1
    parents: tuple[int, ...] = ()
    parent_rows: Tensor | None = None
    logit_rows: Tensor | None = None
    looked_up: Tensor | None = None
    later: tuple[DraftPass, ...] = ()


class DraftedTree(NamedTuple):
    """What the children of a drafted tree were drawn from. Their tokens are in the sequence.

    Nodes below the last pass have no row; nothing has if greedy. `draft_probs` float32 [drafted
    parents, draft vocabulary]; `drawn` int64 [drafted parents, branching].
    """

    draft_probs: Tensor
    drawn: Tensor


class Drafter(Protocol):
    """Drafts the tokens of a tree.

    `vocabulary`: how many tokens it can draft; `d2t` int64 [vocabulary]: the target's token for
    each of these, None if they are the same.
    """

    model: LoadedModel | HiddenStateDraft
    drafting: Drafting
    vocabulary: int
    d2t: Tensor | None
    aux_hidden_state_layers: tuple[int, ...] = ()
    notes_finite: bool = True
    """Does each pass note in its cache whether its logits are finite?"""
    backend: Backend | HiddenStateDraft | PackedEagle
    """What runs its passes."""

    def passes(self, tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
        """The passes of a step with `tree`, which drafts, as wide as `drafting` declares."""

    def new_cache(self, capacity: int) -> TreeCache:
        """The cache for a sequence of up to `capacity` slots."""

    def prefill(self, cache: TreeCache, tokens: Tensor, start: int) -> None:
        """Read `tokens` (int64 [n]) from slot `start` on; those before were read already.

        A draft that reads the target's hidden states does so in `prefill_hidden_states`.
        """
        return None

    def prefill_hidden_states(
        self, sequence: SequenceState, slots: Tensor, extent: int, hidden_states: Tensor
    ) -> None:
        """Read a part of the prompt, once the target has, after `prefill`.

        `slots` int64 [tokens]; `hidden_states`: the target's, [tokens, width].
        """
        self.keep_hidden_states(sequence.draft, slots, hidden_states)
        self.catch_up(sequence, slots, extent)

    def keep_hidden_states(self, cache: TreeCache, slots: Tensor, hidden_states: Tensor) -> None:
        """Keep what is made of the target's hidden states [tokens, width] of committed tokens."""
        return None

    def forward(
        self,
        draft_pass: DraftPass,
        sequence: SequenceState,
        columns: Tensor,
        previous: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """Logits [num_parents, vocabulary] of a pass after `previous`; `columns` int64 [extent]."""

    def representative_pass(self, tensors: TreeTensors) -> tuple[DraftPass, ForwardOutput | None]:
        """A pass to time for all passes of its width, and the output of a pass before it, if any.

        It reads as many tokens as the tree has nodes, and draws one child of each into the slots
        after the tree.
        """
        nodes = tensors.nodes
        draft_pass = DraftPass(
            input_slots=nodes,
            offsets=tensors.offsets,  # positions relative to the root's
            mask=tensors.mask,
            num_parents=nodes.numel(),
            draw_index=nodes,
            new_nodes=nodes + nodes.numel(),
            parent_rows=torch.zeros_like(nodes),
        )
        return draft_pass, None

    def logits_over_text(
        self,
        sequence: SequenceState,
        slots: Tensor,
        levels: Sequence[int],
        aux_hidden_states: Tensor | None,
    ) -> Tensor:
        """The logits after tokens of a known text, as decoding steps would compute them.

        The level of a token matters to a draft that reads the target's hidden states: in a step, it
        has read those of tokens before the root only. So each step is drafted as a chain whose
        tokens are known. `slots` int64 [positions]; `levels`: of each position (see `steps_of`);
        `aux_hidden_states` [positions, width]. Returns float32 [positions, vocabulary].
        """
        max_depth = self.drafting.max_depth
        assert aux_hidden_states is not None and max_depth is not None
        chain = TokenTree.chain(min(max(0, *levels) + 2, max_depth))
        tensors = TreeTensors.of(chain, slots.device, self.model.dtype)
        # while a step is drafted, the sequence is as long as the text before its root
        length, passes = sequence.length.clone(), self.passes(chain, tensors)
        logits = torch.zeros(len(levels), self.vocabulary, device=slots.device)
        for start, end in steps_of(levels):
            if levels[start] == 0:
                sequence.length.copy_(slots[start : start + 1])
                columns = tensors.columns(sequence.length, sequence.tokens.numel())  # of all slots
                output, logits_by_pass = None, []
                for draft_pass in passes[: end - start]:
                    output = self.forward(draft_pass, sequence, columns, output)
                    logits_by_pass.append(output.logits.float())
                drafted = torch.cat(logits_by_pass)[: end - start]
                logits[start : start + len(drafted)] = drafted
            self.keep_hidden_states(sequence.draft, slots[start:end], aux_hidden_states[start:end])
        sequence.length.copy_(length)
        return logits

    def splits_keys(self, tokens: int) -> bool:
        """Do passes of up to so many tokens read no keys after their own, at any extent?"""
        return False

    def catch_up(self, sequence: SequenceState, slots: Tensor, extent: int) -> None:
        """Read the committed tokens in `slots` (int64 [tokens]), for the first time or again."""
        return None

    def commit(self, sequence: SequenceState, path: Tensor) -> None:
        """Keep what belongs to the nodes in `path` (int64 [depth]), before the length grows.

        By default, the hidden states that the target's pass has recorded of them.
        """
        slots = sequence.length + torch.arange(path.numel(), device=path.device)
        hidden_states = sequence.aux_hidden_states.index_select(0, path)
        self.keep_hidden_states(sequence.draft, slots, hidden_states)


class HiddenStateDrafter(Drafter):
    """What drafters with models of `HiddenStateDraft` have in common."""

    model: HiddenStateDraft
    backend: HiddenStateDraft | PackedEagle

    def __init__(self, model: HiddenStateDraft, vocabulary: int, d2t: Tensor | None) -> None:
        self.model, self.vocabulary, self.d2t = model, vocabulary, d2t
        self.backend, self.drafting = model.backend, model.drafting
        self.notes_finite = self.backend.notes_finite
        self.aux_hidden_state_layers = model.aux_hidden_state_layers


def steps_of(levels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut positions into the ranges (start, end) that one step drafts: levels 0, 1, 2, ...

    A position of level -1, which no step drafts, is a range of its own.
    """
    starts = (position for position, level in enumerate(levels) if level <= 0)
    return itertools.pairwise([*starts, len(levels)])


def passes_by_level(tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
    """One pass for each level that has drafted children, over its nodes with children.

    It gives logits for each; `parent_rows` are their parents' rows in the pass before. Where the
    spine (first children from the root on) is looked up, its node on a level is the first of them.
    """
    passes = []
    for level in range(tree.num_drafted_levels):
        parents = tree.nodes_with_children(level)
        nodes = torch.as_tensor(parents, dtype=torch.long, device=tensors.nodes.device)
        parent_rows = None
        if level:  # a draft that reads hidden states goes on from those of the parents
            rows = np.searchsorted(tree.nodes_with_children(level - 1), tree.parents[parents])
            parent_rows = torch.as_tensor(rows, device=nodes.device)
        passes.append(
            DraftPass(
                input_slots=nodes,
                offsets=tensors.offsets[nodes],
                mask=tensors.mask[nodes],
                parent_rows=parent_rows,
                **children_to_draw(tree, parents, nodes.device),
            )
        )
    return tuple(passes)


def distinct_slots(length: Tensor, slots: Tensor) -> Tensor:
    """int64 [tokens]: `slots` with others for those below 0, so that a pass writes each once.

    A pass may read more committed tokens than there are. Rows for tokens before the first one go to
    slots of nodes, which no row of this pass sees and which a later pass writes before it reads.
    """
    return slots.where(slots >= 0, length - slots)  # -1 becomes the slot after the root's


def children_to_draw(tree: TokenTree, parents: IntArray, device: torch.device) -> dict[str, Any]:
    """The fields of a `DraftPass` on the children that it draws: all but those that are looked up.

    `parents` int [parents]: the nodes whose children these are, in order.
    """
    nodes = np.flatnonzero(np.isin(tree.parents, parents))
    rows = np.searchsorted(parents, tree.parents[nodes])
    ranks, num_draws = tree.ranks[nodes] - 1, 0
    looked_up = None
    if tree.looks_up:
        is_on_spine = tree.classes[nodes] == 0  # a first child, which is not drawn
        if is_on_spine.any():
            looked_up = torch.as_tensor(np.stack([rows, nodes])[:, is_on_spine], device=device)
        # One draw more than needed: where the draft leaves too few tokens, the one that is looked
        # up may be among the draws.
        has_spine_parent = tree.classes[tree.parents[nodes]] == 0
        num_draws = int(ranks[has_spine_parent].max(initial=-1)) + 1
        ranks = ranks - has_spine_parent  # its siblings begin with rank 0
        nodes, rows, ranks = nodes[~is_on_spine], rows[~is_on_spine], ranks[~is_on_spine]
    max_children = int(ranks.max(initial=-1)) + 1
    return {
        "num_parents": len(parents),
        "parents": tuple(parents.tolist()),
        "max_children": max_children,
        "num_draws": max(num_draws, max_children),
        "draw_index": torch.as_tensor(rows * max_children + ranks, device=device),
        "new_nodes": torch.as_tensor(nodes, device=device),
        "looked_up": looked_up,
    }


def draw_children(
    drafter: Drafter,
    draft_pass: DraftPass,
    logits: Tensor,
    sequence: SequenceState,
    slots: Tensor,
    sampling: Sampling,
    bits: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw the children of one pass, and write their tokens into the sequence, in `slots`.

    The children of a node whose first child is looked up are drawn without that child's token.
    `slots` int64 [new nodes]; `logits` [num_parents, vocabulary]; `bits` int32 [num_parents,
    numbers for each]. Returns the draft's probabilities, float32 [num_parents, vocabulary], and its
    tokens in draw order, int64 [num_parents, max_children].
    """
    count = draft_pass.max_children
    if draft_pass.looked_up is None:
        probs, drawn = sampling.draw_children(logits, count, bits)
    else:
        rows, nodes = draft_pass.looked_up
        tokens, d2t = sequence.tokens[sequence.length + nodes, None], drafter.d2t
        own_tokens = torch.arange(drafter.vocabulary, device=rows.device) if d2t is None else d2t
        is_looked_up = torch.zeros_like(logits, dtype=torch.bool)
        is_looked_up[rows] = tokens == own_tokens
        logits = logits.masked_fill(is_looked_up, -torch.inf)
        num_draws = min(draft_pass.num_draws, drafter.vocabulary)
        probs, drawn = sampling.draw_children(logits, num_draws, bits)
        # a row that had that token alone is NaN now: its draws are uniform, as of probabilities 0
        probs = probs.nan_to_num(0.0)
        # the looked-up token goes to the end
        order = is_looked_up.gather(1, drawn).byte().argsort(dim=1, stable=True)
        drawn = drawn.gather(1, order)[:, :count]
    children = drawn.flatten()[draft_pass.draw_index]
    tokens = children if drafter.d2t is None else drafter.d2t[children]
    sequence.tokens.index_copy_(0, slots, tokens)
    return probs, drawn
