"""One decoding step with a token tree: draft the tree, verify it with the target, commit a path."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.constraints.path_logits import Path, paths_of
from sequoia_plan.runtime.decoding_models import DecodingModels
from sequoia_plan.runtime.draft.drafter import DraftedTree, Drafter, DraftPass, draw_children
from sequoia_plan.runtime.lookup import Lookup, look_up
from sequoia_plan.runtime.sampling.sampling import Sampling
from sequoia_plan.runtime.sequence import DRAFT_NOT_FINITE, TARGET_NOT_FINITE
from sequoia_plan.runtime.verify import AcceptedPath
from sequoia_plan.runtime.verify.tree_verifier import TreeVerifier


class TreeStep:
    """One decoding step with one token tree, on fixed shapes.

    Calling it drafts a tree, runs one target pass over it, verifies it and commits the accepted
    path. Each of the four parts is a method of its own, and nothing in them depends on values that
    the host must read, unless the text has logits processors. Steps with the same models share a
    sequence. `family`: if a step may take one of several trees, the plan's, to which all belong.
    """

    def __init__(
        self, models: DecodingModels, tree: TokenTree, family: TokenTree | None = None
    ) -> None:
        models.check_tree(tree)
        self.models, self.tree, self.device = models, tree, models.device
        self.target, self.drafter, self.sequence = models.target, models.drafter, models.sequence
        self.branching = tree.branching  # a plain int, which a trace of a step takes as constant
        self.tensors = TreeTensors.of(tree, self.device, self.target.dtype)
        drafter = self.drafter
        self.passes: tuple[DraftPass, ...] = ()
        if drafter and tree.num_drafted_levels:
            self.passes = drafter.passes(tree, self.tensors)
        self.num_parents = sum(draft_pass.num_parents for draft_pass in self.passes)
        self.rows_of_passes = [draft_pass.input_slots.numel() for draft_pass in self.passes]
        self.max_rows = max([tree.size, *self.rows_of_passes])
        self.alternates = family is not None  # steps before it may have had other trees
        self.lookup = Lookup.of(family or tree)  # long enough for every tree of the family
        self.verifier = TreeVerifier(tree, self.device, drafter.d2t if drafter else None)

    @torch.no_grad()
    def __call__(self, extent: int, sampling: Sampling) -> Tensor:
        """One decoding step; returns what `commit` returns."""
        self.target.prefetch()
        drafted = self.draft(extent, sampling)
        logits = self.process_target(self.forward_target(extent))
        return self.commit(self.verify(logits, drafted, sampling))

    def draft(self, extent: int, sampling: Sampling) -> DraftedTree:
        """Draft the tree; its tokens are then in the sequence.

        Where the target is split over several processes, all take the first one's tokens.
        """
        sequence, spine = self.sequence, self.verifier.spine
        if self.tree.looks_up:
            chain = sequence.lookup_chain[: spine.numel()]
            sequence.tokens.index_copy_(0, sequence.length + spine, chain)
        empty = sequence.tokens[:0]  # on the right device
        nothing_drawn = DraftedTree(empty, empty)
        if not self.drafter or not self.passes:
            return nothing_drawn
        probs, drawn = self.run_passes(self.drafter, extent, sampling)
        if self.target.traits.is_split:
            slots = sequence.length + self.tensors.nodes
            tokens = self.target.backend.from_first(sequence.tokens[slots])
            sequence.tokens.index_copy_(0, slots, tokens)
        return DraftedTree(torch.cat(probs), torch.cat(drawn)) if probs else nothing_drawn

    def run_passes(
        self, drafter: Drafter, extent: int, sampling: Sampling
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run each draft pass, and draw the children from its logits into the sequence.

        Passes attend to slots below `extent`. Returns the draft's probabilities and drawn tokens of
        each pass, as in `DraftedTree`; none if greedy. Looked-up tokens are in the sequence before.
        """
        sequence, passes = self.sequence, self.passes
        columns = self.tensors.columns(sequence.length, extent)
        bits_by_pass = self.random_bits(sampling).split([each.num_parents for each in passes])
        new_nodes = [draft_pass.new_nodes for draft_pass in passes]
        new_slots = (sequence.length + torch.cat(new_nodes)).split([*map(len, new_nodes)])
        probs, drawn, largest_logits, output = [], [], [], None
        for draft_pass, slots, bits in zip(passes, new_slots, bits_by_pass, strict=True):
            output = drafter.forward(draft_pass, sequence, columns, output)
            logits = output.logits
            if sequence.path_logits:  # the text's logits processors change them
                paths = self.paths(draft_pass.parents)
                logits = sequence.path_logits.of_draft(paths, logits, drafter.d2t)
            pass_probs, children = draw_children(
                drafter, draft_pass, logits, sequence, slots, sampling, bits
            )
            if not drafter.notes_finite:  # then its passes do not check their logits
                largest_logits.append(output.logits.amax(-1))
            if sampling.greedy:  # which verifies tokens alone
                continue
            probs.append(pass_probs)
            # so that all passes have as many columns
            padding = self.branching - draft_pass.max_children
            tokens_by_rank = torch.nn.functional.pad(children, (0, padding))
            if draft_pass.looked_up is not None:  # the draws are children from the second on
                rows = draft_pass.looked_up[0]
                tokens_by_rank[rows, 1:] = tokens_by_rank[rows, :-1]
            drawn.append(tokens_by_rank)
        if largest_logits:
            sequence.draft.finite.logical_and_(torch.cat(largest_logits).isfinite().all())
        return probs, drawn

    def process_target(self, logits: Tensor) -> Tensor:
        """The target's logits [size, vocabulary], as the text's logits processors change them."""
        if not self.sequence.path_logits:
            return logits
        return self.sequence.path_logits.of_target(self.paths(range(self.tree.size)), logits)

    def paths(self, nodes: Iterable[int]) -> list[Path]:
        """Of each node, the tokens from below the root to it; the host reads them."""
        tokens = self.sequence.tokens[self.sequence.length + self.tensors.nodes]
        return paths_of(tokens.tolist(), self.tree.parents.tolist(), nodes)

    def forward_target(self, extent: int) -> Tensor:
        """The target's pass over the tree: logits [size, vocabulary].

        If the draft reads hidden states of the target, the sequence has those of the tree's nodes
        afterwards.
        """
        sequence, tensors = self.sequence, self.tensors
        slots = sequence.length + tensors.nodes
        positions = sequence.length + tensors.offsets
        mask = tensors.mask.index_select(1, tensors.columns(sequence.length, extent))
        if self.tree.size > 1:
            sequence.target.save()
        tokens = sequence.tokens[slots]
        output = self.target(
            sequence.target, tokens, positions, slots, mask, 0, self.models.hidden_states
        )
        if output.hidden_states is not None:
            sequence.aux_hidden_states.index_copy_(0, tensors.nodes, output.hidden_states)
        return output.logits

    def verify(self, logits: Tensor, drafted: DraftedTree, sampling: Sampling) -> AcceptedPath:
        """The accepted path and the bonus token, from `logits` [size, vocabulary].

        Where the target is split over several processes, all use the first one's result.
        """
        accepted = self.verifier(sampling, self.sequence, logits, drafted)
        if not self.target.traits.is_split:
            return accepted
        # one tensor, so that one message carries all: the path, one count, one bonus token
        own_result = torch.cat([accepted.path, accepted.count, accepted.bonus])
        result = self.target.backend.from_first(own_result)
        return AcceptedPath(result[:-2], result[-2:-1], result[-1:])

    def commit(self, accepted: AcceptedPath) -> Tensor:
        """Commit the accepted path to caches, tokens and length.

        Entries of the path after the last accepted node are moved, too; the next step overwrites
        them. Returns int64 [1 + 2 * depth]: the number of accepted nodes, the path, and the tokens
        after its nodes; with lookup also the length of the text's match.
        """
        sequence, length = self.sequence, self.sequence.length
        slots = length + accepted.path
        levels = self.tensors.nodes[: self.tree.depth]  # 0, 1, ..., depth - 1
        # the root was committed before: the step adds the tokens after it, and the bonus token
        next_on_path = sequence.tokens[slots].roll(-1)
        added = torch.where(levels == accepted.count - 1, accepted.bonus, next_on_path)
        sequence.target.commit(slots, length)
        if self.tree.size > 1:
            sequence.target.roll_back(accepted.count)
        count = accepted.count
        if self.drafter and (self.passes or self.alternates):
            self.drafter.commit(sequence, accepted.path)
            count = count.where(sequence.draft.finite, DRAFT_NOT_FINITE)
        sequence.tokens.index_copy_(0, length + 1 + levels, added)
        length += accepted.count
        count = count.where(sequence.target.finite, TARGET_NOT_FINITE)
        match_length = [self.look_up()] if self.lookup else []
        return torch.cat([count, accepted.path, added, *match_length])

    def look_up(self) -> Tensor:
        """Find the next step's lookup chain; int64 [1], the length of the text's match."""
        assert self.lookup
        sequence = self.sequence
        match_length, chain = look_up(sequence.tokens, sequence.length, *self.lookup)
        sequence.lookup_chain[: chain.numel()] = chain
        return match_length

    def bits_per_parent(self, sampling: Sampling) -> int:
        """How many random numbers it takes to draw the children of one node; 0 if greedy."""
        if not self.drafter:
            return 0
        return sampling.drawing_on(self.device).columns(self.drafter.vocabulary, self.branching)

    def random_bits(self, sampling: Sampling) -> Tensor:
        """int32 [nodes with drafted children, numbers for each]: this step's random numbers."""
        columns = self.bits_per_parent(sampling)
        return self.sequence.bits[: self.num_parents * columns].view(self.num_parents, columns)
