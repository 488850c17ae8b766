"""Acceptance on a prompt: the target writes a text with a tree, and one more pass reads it.

At each position of the text, children are drawn from the draft, and the verifier's probability of
accepting each is computed: less noisy than counting which one is accepted.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.profiler.children import DrawnChildren
from sequoia_plan.profiler.lookup_counts import LookupTrials
from sequoia_plan.profiler.observed import STREAMED_TREE, TREE, num_counted_levels
from sequoia_plan.profiler.traversal_paths import adding_to
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft.drafter import steps_of
from sequoia_plan.runtime.verify import LOOKUP_VERIFIERS

POSITIONS_AT_ONCE = 64
"""Positions that are read together: limits the memory for probabilities."""


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
        # the small tree, without levels that the draft cannot draft
        small = STREAMED_TREE if decoder.step.target.stream else TREE
        num_nodes = int(small.level_offsets[: (self.max_depth or small.depth) + 1][-1])
        self.tree = tree or TokenTree(small.parents[:num_nodes])
        if not tree and decoder.step.models.max_children == 1:
            self.tree = TokenTree.chain(self.tree.depth)
        self.num_levels = num_counted_levels(self.tree)
        self.decoder = decoder.with_tree(self.tree)
        self.ranks = min(ranks, drafter.vocabulary)
        self.end_tokens = set(pair.end_tokens)

    @torch.inference_mode()
    def __call__(
        self, prompt: Tensor, sampling: Sampling, max_new_tokens: int, seed: int
    ) -> dict[str, Any]:
        """Let the target write a text, and count trials and acceptance by level and node class.

        Each position of the text is a node of the tree that decodes it. With `traversal`, the
        counts are those of `sequoia`, and "reached" has how often each of both gets to a level
        (see `collect`). `prompt` int64 [n].
        """
        reached = torch.zeros(2, self.tree.depth, dtype=torch.float64)
        observe = adding_to(reached) if uses_traversal(sampling) else None
        self.decoder.step.verifier.observe = observe
        text, levels, node_classes = self._write(prompt, sampling, max_new_tokens, seed)
        # the row of the tables [levels * node classes, ...] that each position adds to
        rows = 2 * np.minimum(levels, self.num_levels - 1) + node_classes
        if self.max_depth:
            rows[levels > self.max_depth - 2] = -1  # not counted: the draft gives no children
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
            "reached": reached.tolist() if uses_traversal(sampling) else None,
            "lookup": lookup and lookup.tally(drafted_probs, looked_up_probs),
        }

    def _write(
        self, prompt: Tensor, sampling: Sampling, max_new_tokens: int, seed: int
    ) -> tuple[Tensor, Ints, Ints]:
        """Decode a text until a step has an end token, or there are `max_new_tokens`.

        Returns prompt and text without the end token, int64 [n]; and from the prompt's last token
        on the level and the node class of each position in the tree of its step, int64 [positions].
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
        written = list(itertools.takewhile(lambda token: token not in self.end_tokens, new_tokens))
        text = torch.tensor(prompt.tolist() + written, device=self.decoder.step.device)
        count = len(written) + 1
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
        """The probability that the child of each rank is accepted, at each counted position.

        `levels`: of the last positions of `text`, each in the tree of its step. Returns float64
        [positions, ranks], and [looked-up tokens, ranks] where a looked-up child comes first.
        """
        step, count = self.decoder.step, len(levels)
        drafted_probs = np.zeros((count, self.ranks))
        looked_up_probs = np.zeros((len(lookup.tokens) if lookup else 0, self.ranks))
        generator = torch.Generator(step.device).manual_seed(seed)
        all_slots = torch.arange(text.numel(), device=step.device)  # token i is in slot i
        first = text.numel() - count
        # a draft that reads hidden states needs those of a few tokens before the first position,
        # so the target reads them again; they are not counted and have no level
        num_repeated = min(first, self.tree.depth) if self.drafter.aux_hidden_state_layers else 0
        levels_read = [-1] * num_repeated + levels.tolist()
        if step.target.traits.chains_only:  # its states are those after the whole text
            step.target.prefill(step.sequence.target, text[: first - num_repeated])
        for start, end in pieces(levels_read):
            positions = np.arange(start, end) - num_repeated  # 0 is the prompt's last token
            slots = all_slots[first + positions]
            mask = additive_mask(all_slots <= slots[:, None], step.target.dtype)
            output = step.target(
                step.sequence.target, text[slots], slots, slots, mask, 0, step.models.hidden_states
            )
            draft_logits = self.drafter.logits_over_text(
                step.sequence, slots, levels_read[start:end], output.hidden_states
            )
            is_read = torch.from_numpy((positions >= 0) & is_counted[positions.clip(0)])
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
            if lookup and (is_here := np.isin(lookup.token_positions, positions)).any():
                indices = np.searchsorted(positions, lookup.token_positions[is_here])
                probs = children.looked_up_acceptance(
                    torch.from_numpy(indices).to(step.device),
                    torch.from_numpy(lookup.tokens[is_here]).to(step.device),
                )
                looked_up_probs[is_here] = probs.cpu().numpy()
        return drafted_probs, looked_up_probs


def pieces(levels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a text between steps into ranges of at most `POSITIONS_AT_ONCE`, or of one step."""
    start = 0
    for begin, end in steps_of(levels):
        if end - start > POSITIONS_AT_ONCE and begin > start:
            yield start, begin
            start = begin
    yield start, len(levels)
