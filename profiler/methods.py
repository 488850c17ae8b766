"""Two methods to observe acceptance on a prompt, with the decoder's own sampling and verifiers.

`decoding` counts, as Sequoia does (arXiv 2402.12374, App. F.1): it decodes with a one-level tree
and counts which of the root's children is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.children import POSITIONS_AT_ONCE, DrawnChildren
from sequoia_plan.profiler.draft_passes import logits_over_text
from sequoia_plan.profiler.lookup_counts import LookupTrials
from sequoia_plan.profiler.observed import LEVELS, TREE, num_counted_levels
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary
from sequoia_plan.runtime.verify import (
    LOOKUP_VERIFIERS,
    VERIFIERS,
    Acceptance,
    TargetProbs,
    TreeIndex,
    Verifier,
    traversal,
)

COMPARED = ("sequoia", "traversal")
"""The verifiers that `ComparedVerifiers` compares: both verify the same drawn trees."""


def expected_acceptance(
    target_logits: Tensor,
    draft_logits: Tensor,
    sampling: Sampling,
    ranks: int,
    generator: torch.Generator,
    d2t: Tensor | None = None,
) -> Tensor:
    """float64 [positions, ranks]: the probability that the child of each rank is the one accepted.

    Children are drawn once at each position; the probability is over the verifier's randomness.
    `target_logits` [positions, vocabulary]; `draft_logits` [positions, draft vocabulary]; `d2t`
    int64 [draft vocabulary].
    """
    children = DrawnChildren.draw(target_logits, draft_logits, sampling, ranks, generator, d2t)
    return children.expected_acceptance()


def counts_lookup(sampling: Sampling) -> bool:
    """True if lookup is counted with this sampling: its verifier is exact for looked-up tokens.

    At temperature 0 all verifiers accept alike.
    """
    return sampling.greedy or sampling.verifier in LOOKUP_VERIFIERS


class ForcedMethod:
    """Computes acceptance in one more pass over text that the target wrote."""

    def __init__(
        self, pair: Pair, ranks: int, compares: bool, tree: TokenTree | None = None
    ) -> None:
        captured = False if compares else None
        decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(2), captured=captured)
        drafter = decoder.step.drafter
        assert drafter is not None
        self.drafter = drafter
        self.tree = tree or limited_to_depth(TREE, drafter.drafting.max_depth)
        self.num_levels = num_counted_levels(self.tree)
        self.decoder = decoder.with_tree(self.tree)
        self.ranks = min(ranks, drafter.vocabulary)
        self.end_tokens = set(pair.end_tokens)

    @torch.inference_mode()
    def __call__(
        self, prompt: Tensor, samplings: Sequence[Sampling], max_new_tokens: int, seed: int
    ) -> list[dict[str, Any]]:
        """Measure one prompt with several samplings under which the target writes the same text.

        A position of the text is a node of the tree that decodes it. Its class is 0 on the spine
        (it and all its ancestors are first children) and 1 off it. `prompt` int64 [n].
        """
        compared = self._compare_verifiers(samplings)
        writing_sampling = samplings[0]
        if compared:  # only these verifiers are recorded while the text is written
            writing_sampling = next(s for s in samplings if s.verifier in COMPARED)
        text, levels, classes = self._write(prompt, writing_sampling, max_new_tokens, seed)
        max_depth = self.drafter.drafting.max_depth  # the most levels of a tree; None is no limit

        def row_of(level: int, node_class: int) -> int:
            """The row of the tables [levels * classes, ...] that a position adds to.

            Levels from `num_levels` - 1 on share a row. A position that the draft cannot give
            children, because the next level would be too deep, gets -1.
            """
            if max_depth and level > max_depth - 2:
                return -1
            return 2 * min(level, self.num_levels - 1) + node_class

        rows = list(map(row_of, levels, classes))
        counted_rows = torch.tensor([row for row in rows if row >= 0], dtype=torch.long)
        trials = torch.bincount(counted_rows, minlength=2 * self.num_levels).reshape(-1, 2).tolist()
        lookup_trials = LookupTrials(text.cpu().numpy(), levels, rows)
        counts, lookup_tallies = self._expected_counts(
            text, prompt.numel(), levels, rows, lookup_trials, samplings, seed
        )
        reached = compared.reached.tolist() if compared else None
        return [
            {
                "trials": trials,
                "counts": sampling_counts.reshape(self.num_levels, 2, -1).tolist(),
                "reached": reached if sampling.verifier == "traversal" else None,
                "lookup": lookup_tally,
            }
            for sampling, sampling_counts, lookup_tally in zip(
                samplings, counts, lookup_tallies, strict=True
            )
        ]

    def _compare_verifiers(self, samplings: Sequence[Sampling]) -> ComparedVerifiers | None:
        """Let the decoder verify with both verifiers of `COMPARED`, if `traversal` is asked for."""
        needed = any(sampling.verifier == "traversal" for sampling in samplings)
        if not needed or samplings[0].greedy:
            self.decoder.step.verifier.verifiers = VERIFIERS
            return None
        compared = ComparedVerifiers(self.tree.depth)
        self.decoder.step.verifier.verifiers = VERIFIERS | compared.verifiers()
        return compared

    def _write(
        self, prompt: Tensor, sampling: Sampling, max_new_tokens: int, seed: int
    ) -> tuple[Tensor, list[int], list[int]]:
        """Decode a text until a step has an end token, or there are `max_new_tokens`.

        Returns int64 [n].
        """
        tree, prompt_length = self.decoder.step.tree, prompt.numel()
        token_ids, levels, classes = prompt.tolist(), [0], [0]
        for step in self.decoder.steps(prompt, max_new_tokens, sampling, seed):
            # accepted nodes on levels 1, 2, ..., and the bonus token
            token_ids += step.tokens
            levels += [*range(1, len(step.tokens)), 0]
            classes += [*tree.classes[step.path[1:]].tolist(), 0]
            if len(token_ids) - prompt_length >= max_new_tokens:
                break
            if self.end_tokens.intersection(step.tokens):
                break
        new_tokens = token_ids[prompt_length:]
        ends = [at for at, token in enumerate(new_tokens) if token in self.end_tokens]
        if ends:
            token_ids = token_ids[: prompt_length + ends[0]]
        num_positions = len(token_ids) - prompt_length + 1
        text = torch.tensor(token_ids, device=self.decoder.step.device)
        return text, levels[:num_positions], classes[:num_positions]

    def _expected_counts(
        self,
        text: Tensor,
        prompt_length: int,
        levels: list[int],
        rows: list[int],
        lookup_trials: LookupTrials,
        samplings: Sequence[Sampling],
        seed: int,
    ) -> tuple[list[Tensor], list[dict[str, Any] | None]]:
        """Add up, over the positions of a text, the probability that each rank is accepted.

        Target and draft read the text once more, piece by piece; at each position children are
        drawn anew. `text` int64 [n].
        """
        step = self.decoder.step
        # `traversal` accepts a root's children as `sequoia` does
        node_samplings = [
            replace(s, verifier="sequoia") if s.verifier == "traversal" else s for s in samplings
        ]
        acceptances = {
            sampling: TextAcceptance(len(levels), self.num_levels, self.ranks, lookup_trials)
            for sampling in node_samplings
        }
        generator = torch.Generator(step.device).manual_seed(seed)
        all_slots = torch.arange(text.numel(), device=step.device)  # token i is in slot i
        first = prompt_length - 1
        # a draft that reads hidden states needs those of a few tokens before the first position,
        # so the target reads them again; they add to no row and have no level
        num_repeated = min(first, self.tree.depth) if self.drafter.aux_hidden_state_layers else 0
        levels, rows = [-1] * num_repeated + levels, [-1] * num_repeated + rows
        first -= num_repeated
        for start, end in pieces(levels, POSITIONS_AT_ONCE):
            slots = all_slots[first + start : first + end]
            piece_levels, piece_rows = levels[start:end], rows[start:end]
            mask = additive_mask(all_slots <= slots[:, None], step.target.model.dtype)
            # input tokens, their positions and the slots they are written to
            output = step.target(step.sequence.target, text[slots], slots, slots, mask)
            target_logits = output.logits
            draft_logits = logits_over_text(
                self.drafter, step.sequence, slots, piece_levels, output.hidden_states
            )
            counted = torch.tensor(
                [at for at, row in enumerate(piece_rows) if row >= 0], dtype=torch.long
            )
            if len(counted) < len(piece_rows):
                target_logits, draft_logits = target_logits[counted], draft_logits[counted]
            counted_rows = torch.tensor(piece_rows)[counted]
            # position 0 is the prompt's last token
            counted_positions = (counted + (start - num_repeated)).numpy()
            for sampling, acceptance in acceptances.items():
                children = DrawnChildren.draw(
                    target_logits,
                    draft_logits,
                    sampling,
                    self.ranks,
                    generator,
                    self.drafter.d2t,
                )
                acceptance.add(children, counted_positions, counted_rows)
        counts = [acceptances[sampling].counts for sampling in node_samplings]
        return counts, [acceptances[sampling].lookup_tally() for sampling in node_samplings]


class TextAcceptance:
    """The acceptance at the positions of one text with one sampling, added up piece by piece.

    `counts` float64 [2 * levels, ranks].
    """

    def __init__(
        self, num_positions: int, num_levels: int, ranks: int, lookup_trials: LookupTrials
    ) -> None:
        self.counts = torch.zeros(2 * num_levels, ranks, dtype=torch.float64)
        self.lookup_trials: LookupTrials | None = lookup_trials
        self.drafted_probs = np.zeros((num_positions, ranks))
        self.looked_up_probs = np.zeros((len(lookup_trials.tokens), ranks))

    def add(self, children: DrawnChildren, positions: NDArray[np.int64], rows: Tensor) -> None:
        """Add a piece of the text.

        `positions` int64 [positions of the piece]; `rows` int64 [positions of the piece].
        """
        probs = children.expected_acceptance().cpu()
        self.counts.index_add_(0, rows, probs)
        trials = self.lookup_trials
        if trials is None or not counts_lookup(children.sampling):
            self.lookup_trials = None
            return
        if not len(positions):
            return
        self.drafted_probs[positions] = probs.numpy()
        bounds = np.searchsorted(trials.token_positions, [positions[0], positions[-1] + 1])
        piece = slice(*bounds.tolist())
        if piece.start == piece.stop:
            return
        places = np.searchsorted(positions, trials.token_positions[piece])
        device = children.drawn.device
        looked_up_probs = children.looked_up_acceptance(
            torch.from_numpy(places).to(device), torch.from_numpy(trials.tokens[piece]).to(device)
        )
        self.looked_up_probs[piece] = looked_up_probs.cpu().numpy()

    def lookup_tally(self) -> dict[str, Any] | None:
        """The counts by class of match; None if the sampling is not one to count them with."""
        if self.lookup_trials is None:
            return None
        return self.lookup_trials.tally(self.drafted_probs, self.looked_up_probs)


class ComparedVerifiers:
    """`sequoia` and `traversal`, each of which also records how far both get.

    `reached` float64 [2, depth].
    """

    def __init__(self, depth: int) -> None:
        self.reached = torch.zeros(2, depth, dtype=torch.float64)

    def verifiers(self) -> dict[str, Verifier]:
        """Verifiers by name that accept as those of `VERIFIERS`, and add to `reached`."""

        def recording(name: str) -> Verifier:
            """The verifier called `name`, which also records."""

            def acceptance(
                target_probs: TargetProbs,
                draft_probs: Tensor,
                drawn: Tensor,
                index: TreeIndex,
                d2t: Tensor | None,
            ) -> Acceptance:
                return self._record(target_probs, draft_probs, drawn, index, d2t)[name]

            return Verifier(acceptance, VERIFIERS[name].drawing)

        return {name: recording(name) for name in COMPARED}

    def _record(
        self,
        target_probs: TargetProbs,
        draft_probs: Tensor,
        drawn: Tensor,
        index: TreeIndex,
        d2t: Tensor | None,
    ) -> dict[str, Acceptance]:
        """Verify a drawn tree with both verifiers, and add to `reached` how far each gets.

        `d2t` int64 [draft vocabulary].
        """
        inputs = (target_probs, draft_probs, drawn, index, d2t)
        acceptances = {name: VERIFIERS[name].acceptance(*inputs) for name in COMPARED}
        residual = traversal.residual_after_children(*inputs)
        subtree_probs = traversal.subtree_probs(residual, index).double().cpu()
        levels = index.offsets.cpu()  # of each node
        end_probs = torch.zeros_like(self.reached[0])  # that the path ends on each level
        end_probs.index_add_(0, levels, acceptances["sequoia"].end_probs.cpu())
        # the path gets to a level if it ends there or below
        self.reached[0] += end_probs.flip(0).cumsum(0).flip(0)
        self.reached[1].index_add_(0, levels, path_probs(subtree_probs, index))
        return acceptances


def path_probs(subtree_probs: Tensor, index: TreeIndex) -> Tensor:
    """float64 [size]: the probability that `traversal`'s accepted path goes through each node.

    It is averaged over what is drawn below the node. `subtree_probs` float64 [size].
    """
    # for each node, the probability that no earlier sibling's subtree holds the path's end
    passed_by = torch.ones_like(subtree_probs)
    parents = index.parents.tolist()
    # the parent of node n is parents[n - 1]; siblings have consecutive numbers
    for node in range(2, index.size):
        if parents[node - 1] == parents[node - 2]:
            passed_by[node] = passed_by[node - 1] * (1 - subtree_probs[node - 1])
    return subtree_probs * passed_by[index.paths.cpu()].prod(-1)


def limited_to_depth(tree: TokenTree, max_depth: int | None) -> TokenTree:
    """The tree without its levels beyond `max_depth`; None is no limit."""
    if max_depth is None or tree.depth <= max_depth:
        return tree
    return TokenTree(tree.parents[: int(tree.level_offsets[max_depth])])


def pieces(levels: Sequence[int], max_positions: int) -> Iterator[tuple[int, int]]:
    """Cut a text into ranges of at most `max_positions`, where a step begins if possible."""
    start = 0
    while start < len(levels):
        end = min(start + max_positions, len(levels))
        step_start = end
        while start < step_start < len(levels) and levels[step_start] > 0:
            step_start -= 1
        if step_start > start:
            end = step_start
        yield start, end
        start = end


class DecodingMethod:
    """Counts acceptance while decoding with a one-level tree."""

    def __init__(self, pair: Pair, ranks: int) -> None:
        vocabulary, _ = shared_vocabulary(pair.target, pair.draft)
        tree = TokenTree.star(min(ranks, vocabulary))
        self.decoder = SequoiaDecoder(pair.target, pair.draft, tree)
        self.end_tokens = set(pair.end_tokens)

    def __call__(
        self, prompt: Tensor, samplings: Sequence[Sampling], max_new_tokens: int, seed: int
    ) -> list[dict[str, Any]]:
        """Decode one prompt, and count which of the root's children is accepted.

        `prompt` int64 [n].
        """
        node_counts = [0.0] * self.decoder.step.tree.size  # [0]: no child was accepted
        num_steps = num_tokens = 0
        for step in self.decoder.steps(prompt, max_new_tokens, samplings[0], seed):
            node_counts[step.path[1] if len(step.path) > 1 else 0] += 1
            num_steps += 1
            num_tokens += len(step.tokens)
            if num_tokens >= max_new_tokens or self.end_tokens.intersection(step.tokens):
                break
        counts = node_counts[1:]  # by rank: node k is the root's child of rank k
        no_counts = [0.0] * len(counts)
        return [
            {
                "trials": [[num_steps, 0]] + [[0, 0]] * (LEVELS - 1),
                "counts": [[counts, no_counts]] + [[no_counts, no_counts]] * (LEVELS - 1),
                "reached": None,
                "lookup": None,
            }
        ]
