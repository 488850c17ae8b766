"""The time of a step besides its passes: a base and a slope by nodes, from a few trees."""

from collections.abc import Mapping
from functools import partial

import numpy as np
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, VerificationCost
from sequoia_plan.profiler.timing import timed
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import DraftedTree

CHAIN_SIZES, WIDE_SIZES = (1, 2, 8), (8, 64, 512)
"""Nodes of the trees that are timed."""


def bushy(size: int, max_depth: int | None = None, children: int = 3) -> TokenTree:
    """A tree of `size` nodes in which each node has so many children, until no nodes are left.

    Nodes are filled up breadth-first; more children where the tree would be too deep.
    """
    while True:
        tree = TokenTree.from_parents([-1, *((node - 1) // children for node in range(1, size))])
        # no number of children makes a tree of several nodes flatter than two levels
        if max_depth is None or tree.depth <= max(max_depth, 2):
            return tree
        children += 1


def trees_to_time(max_nodes: int, max_children: int, max_depth: int | None) -> list[TokenTree]:
    """Chains and wide trees."""
    chains = [TokenTree.chain(min(size, max_depth or size)) for size in CHAIN_SIZES]
    wide = [bushy(size, max_depth) for size in WIDE_SIZES]
    return [t for t in chains + wide if t.size <= max_nodes and t.branching <= max_children]


class StepWithoutPasses(CapturedStep):
    """A step in which neither model runs: their outputs are those of a pass before it."""

    drafted: DraftedTree
    logits_of_target: Tensor
    logits_of_draft: Tensor | None = None

    def draft(self, extent: int, sampling: Sampling) -> DraftedTree:
        """What was drafted; where one pass serves all levels, drawing is not part of it."""
        if self.logits_of_draft is not None:
            bits = self.random_bits(sampling)
            sampling.draw_children(self.logits_of_draft, self.tree.branching, bits)
        return self.drafted

    def forward_target(self, extent: int) -> Tensor:
        """The logits of the target's pass."""
        return self.logits_of_target


class VerificationTimer:
    """Times all of a step but the models' passes, again and again; with `looks_up` a lookup, too.

    On CUDA, where the host works beside the device, that is verifying and committing.
    """

    def __init__(
        self, step: CapturedStep, sampling: Sampling, prompt: Tensor, looks_up: bool = False
    ) -> None:
        by_match = {1: TokenTree(TokenTree.chain(8).parents, looks_up=True)}
        family = TokenTree(step.tree.parents, by_match=by_match) if looks_up else None
        self.step = step = StepWithoutPasses(step.models, step.tree, family)
        step.prefill(prompt, step.tree.depth, seed=0)
        self.sampling, self.length = sampling, step.sequence.length.clone()
        extent = step.extent(prompt.numel() - 1)
        step.refill_random_numbers(sampling)
        step.drafted = CapturedStep.draft(step, extent, sampling)
        step.logits_of_target = CapturedStep.forward_target(step, extent)
        if step.drafter and step.passes and not step.drafter.drafting.drafts_by_level:
            columns = step.tensors.columns(self.length, extent)
            output = step.drafter.forward(step.passes[0], step.sequence, columns)
            step.logits_of_draft = output.logits

    def run(self) -> float:
        """Seconds of a step, whose tokens are taken back."""
        step = self.step
        step.sequence.num_unread = 0
        if step.device.type == "cpu":
            length = int(self.length)
            seconds = timed(step.device, lambda: step.launch(length, self.sampling)(length))[1]
            seconds -= sum(step.part_seconds(self.sampling)[:-1])  # passes that ran in one call
        else:
            seconds = timed(step.device, self._verify)[1]
        step.sequence.length.copy_(self.length)
        return seconds

    def _verify(self) -> None:
        """Draw the children if drawing counts, verify and commit."""
        step, sampling = self.step, self.sampling
        if step.logits_of_draft is not None:
            step.refill_random_numbers(sampling)
            step.replay("drawing", partial(step.draft, 0, sampling), sampling)
        step.run_verification(step.logits_of_target, step.drafted, sampling)


def fit_cost(
    verification: Mapping[TokenTree, float], with_lookup: Mapping[TokenTree, float]
) -> VerificationCost:
    """Fit the seconds of verifying a tree as base + per_node * nodes, both 0 or more.

    By least squares of relative errors; the root, the same in all trees, is in the base. The third
    cost is the most that a lookup adds. `verification`: seconds by tree; `with_lookup`: of some of
    these with a lookup.
    """
    seconds = np.array(list(verification.values()))
    nodes = np.array([tree.size for tree in verification]) - 1.0
    # dividing by a tree's seconds makes 1 the value to predict, and errors relative
    terms = np.stack([np.ones_like(nodes), nodes], 1) / seconds[:, None]
    costs, *_ = np.linalg.lstsq(terms, np.ones(len(nodes)), rcond=None)
    if min(costs) < 0:  # then the best solution without a negative one lacks it
        kept = int(np.argmax(costs))
        costs = np.zeros(2)
        costs[kept] = terms[:, kept].sum() / np.square(terms[:, kept]).sum()
    more_seconds = [with_lookup[tree] - verification[tree] for tree in with_lookup]
    return VerificationCost(float(costs[0]), float(costs[1]), max([0.0, *more_seconds]))
