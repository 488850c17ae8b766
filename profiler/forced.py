"""Acceptance on a prompt: the target writes a text with a tree, and one more pass reads it.

At each position of the text, children are drawn from the draft, and the verifier's probability of
accepting each is computed: less noisy than counting which one is accepted.
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
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.profiler.children import POSITIONS_AT_ONCE, DrawnChildren
from sequoia_plan.profiler.draft_passes import logits_over_text
from sequoia_plan.profiler.lookup_counts import LookupTrials
from sequoia_plan.profiler.observed import TREE, num_counted_levels
from sequoia_plan.profiler.traversal_paths import TraversalPaths
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.verify import LOOKUP_VERIFIERS, VERIFIERS

Ints = NDArray[np.int64]


def uses_traversal(sampling: Sampling) -> bool:
    """Whether the acceptance is traversal's; if greedy, all verifiers accept alike."""
    return sampling.verifier == "traversal" and not sampling.greedy


def counts_lookup(sampling: Sampling) -> bool:
    """Whether lookup is counted: the verifier must be exact for looked-up tokens."""
    return sampling.greedy or sampling.verifier in LOOKUP_VERIFIERS


class ForcedAcceptance:
    """Measures the acceptance on one prompt after the other."""

    def __init__(
        self, pair: Pair, ranks: int, records_paths: bool, tree: TokenTree | None = None
    ) -> None:
        captured = False if records_paths else None
        decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(2), captured=captured)
        drafter = decoder.step.drafter
        assert drafter is not None
        self.drafter, self.max_depth = drafter, drafter.drafting.max_depth
        self.tree = tree or limited_to_depth(TREE, self.max_depth)
        self.num_levels = num_counted_levels(self.tree)
        self.decoder = decoder.with_tree(self.tree)
        self.ranks = min(ranks, drafter.vocabulary)
        self.end_tokens = set(pair.end_tokens)

    @torch.inference_mode()
    def __call__(
        self, prompt: Tensor, sampling: Sampling, max_new_tokens: int, seed: int
    ) -> dict[str, Any]:
        """Count trials and acceptance by level and node class; see `Acceptance`.

        Each position of the text is a node of the tree that decodes it. The counts of `traversal`
        are those of `sequoia`, with how far both get in the tree. `prompt` int64 [n].
        """
        tree_verifier, paths = self.decoder.step.verifier, None
        tree_verifier.verifiers = VERIFIERS
        if uses_traversal(sampling):
            paths = TraversalPaths(self.tree.depth)
            tree_verifier.verifiers = VERIFIERS | {"traversal": paths.accept}
        text, levels, node_classes = self._write(prompt, sampling, max_new_tokens, seed)
        # the row of the tables [levels * node classes, ...] that each position adds to
        rows = 2 * np.minimum(levels, self.num_levels - 1) + node_classes
        if self.max_depth:
            rows[levels > self.max_depth - 2] = -1  # the draft gives these no children
        lookup = LookupTrials(text.cpu().numpy(), levels, rows) if counts_lookup(sampling) else None
        drafted_probs, looked_up_probs = self._acceptance_probs(
            text, levels, rows >= 0, lookup, sampling, seed
        )
        trials = np.zeros(2 * self.num_levels, np.int64)
        counts = np.zeros((2 * self.num_levels, self.ranks))
        np.add.at(trials, rows[rows >= 0], 1)
        np.add.at(counts, rows[rows >= 0], drafted_probs[rows >= 0])
        return {
            "trials": trials.reshape(-1, 2).tolist(),
            "counts": counts.reshape(self.num_levels, 2, -1).tolist(),
            "reached": paths and paths.reached.tolist(),
            "lookup": lookup and lookup.tally(drafted_probs, looked_up_probs),
        }

    def _write(
        self, prompt: Tensor, sampling: Sampling, max_new_tokens: int, seed: int
    ) -> tuple[Tensor, Ints, Ints]:
        """Decode a text until a step has an end token, or there are `max_new_tokens`.

        Returns int64 [n], and the level and the node class of the positions from the prompt's last
        token on. The end token is left out.
        """
        tree, prompt_length = self.decoder.step.tree, prompt.numel()
        token_ids, levels, node_classes = prompt.tolist(), [0], [0]
        for step in self.decoder.steps(prompt, max_new_tokens, sampling, seed):
            # accepted nodes on levels 1, 2, ..., and the bonus token
            token_ids += step.tokens
            levels += [*range(1, len(step.tokens)), 0]
            node_classes += [*tree.classes[step.path[1:]].tolist(), 0]
            is_ended = self.end_tokens.intersection(step.tokens)
            if is_ended or len(token_ids) - prompt_length >= max_new_tokens:
                break
        new_tokens = token_ids[prompt_length:]
        num_tokens = next(
            (i for i, token in enumerate(new_tokens) if token in self.end_tokens), len(new_tokens)
        )
        text = torch.tensor(
            token_ids[: prompt_length + num_tokens], device=self.decoder.step.device
        )
        count = num_tokens + 1
        return text, np.array(levels[:count]), np.array(node_classes[:count])

    def _acceptance_probs(
        self,
        text: Tensor,
        levels: Ints,
        is_counted: NDArray[np.bool_],
        lookup: LookupTrials | None,
        sampling: Sampling,
        seed: int,
    ) -> tuple[Floats, Floats]:
        """The probability that the child of each rank is accepted, at each position of a text.

        Returns float64 [positions, ranks], and float64 [looked-up tokens, ranks] for a looked-up
        token with drafted children after it. Target and draft read the text piece by piece.
        """
        step, count = self.decoder.step, len(levels)
        # `traversal` accepts a root's children as `sequoia` does
        verifier = "sequoia" if sampling.verifier == "traversal" else sampling.verifier
        sampling = replace(sampling, verifier=verifier)
        drafted_probs = np.zeros((count, self.ranks))
        looked_up_probs = np.zeros((len(lookup.tokens) if lookup else 0, self.ranks))
        generator = torch.Generator(step.device).manual_seed(seed)
        all_slots = torch.arange(text.numel(), device=step.device)  # token i is in slot i
        first = text.numel() - count
        # a draft that reads hidden states needs those of a few tokens before the first position,
        # so the target reads them again; they are not counted and have no level
        num_repeated = min(first, self.tree.depth) if self.drafter.aux_hidden_state_layers else 0
        levels_read = [-1] * num_repeated + levels.tolist()
        for start, end in pieces(levels_read, POSITIONS_AT_ONCE):
            positions = np.arange(start, end) - num_repeated  # 0 is the prompt's last token
            slots = all_slots[first + positions]
            mask = additive_mask(all_slots <= slots[:, None], step.target.model.dtype)
            output = step.target(step.sequence.target, text[slots], slots, slots, mask)
            draft_logits = logits_over_text(
                self.drafter, step.sequence, slots, levels_read[start:end], output.hidden_states
            )
            is_read = torch.from_numpy((positions >= 0) & is_counted[positions])
            positions = positions[is_read.numpy()]
            children = DrawnChildren.draw(
                output.logits[is_read],
                draft_logits[is_read],
                sampling,
                self.ranks,
                generator,
                self.drafter.d2t,
            )
            drafted_probs[positions] = children.expected_acceptance().cpu().numpy()
            if not lookup or not len(positions):
                continue
            begin, stop = np.searchsorted(
                lookup.token_positions, [positions[0], positions[-1] + 1]
            ).tolist()
            if begin < stop:
                rows = np.searchsorted(positions, lookup.token_positions[begin:stop])
                looked_up = (torch.from_numpy(rows), torch.from_numpy(lookup.tokens[begin:stop]))
                probs = children.looked_up_acceptance(*(part.to(step.device) for part in looked_up))
                looked_up_probs[begin:stop] = probs.cpu().numpy()
        return drafted_probs, looked_up_probs


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
