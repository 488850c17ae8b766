"""The times of one number of nodes: a pass of the target, a draft pass, and a step's overhead."""

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.breakdown import time_parts
from sequoia_plan.profiler.timing import timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.decoding_models import MAX_TREE_NODES
from sequoia_plan.runtime.draft.drafter import draw_children

MAX_OVERHEAD_SIZE = 2
"""The overhead of a step is timed with trees of up to so many nodes."""


class SizeTimer:
    """Times one size: the target's pass, a draft pass, and the overhead of a step.

    The parts run as the decoder runs them: as CUDA graphs where it captures. A size takes part in
    one round of `interval`. `prompt` int64 [n].
    """

    def __init__(
        self,
        step: CapturedStep,
        size: int,
        sampling: Sampling,
        prompt: Tensor,
        times_draft: bool = True,
    ) -> None:
        self.size, self.sampling, self.times_draft, self.interval = size, sampling, times_draft, 1
        assert step.drafter is not None
        self.drafter = step.drafter
        num_children = min(3, step.models.max_children)
        self.step = step.with_tree(bushy(size, step.drafter.drafting.max_depth, num_children))
        # on a CPU a pass below the root is timed in a tree whose `size` nodes have one child each
        pairs = TokenTree.from_parents([-1, *[0] * size, *range(1, size + 1)])
        self.pairs: CapturedStep | None = None
        fits = size <= step.models.max_children and pairs.size <= MAX_TREE_NODES
        if step.device.type == "cpu" and step.drafter.drafting.drafts_by_level and fits:
            self.pairs = step.with_tree(pairs)
            self.pairs.prefill(prompt, pairs.depth, seed=0)
        # with room for a child of each node, which `draft_pass` draws
        self.step.prefill(prompt, size + self.step.tree.depth, seed=0)
        self.extent = self.step.extent(prompt.numel() - 1)
        self.length = step.sequence.length.clone()
        self.tokens = self._draft_tokens()
        self.num_accepted = torch.tensor([(size + 1) // 2], device=step.device)
        self.columns = self.step.tensors.columns(self.length, self.extent)
        self.draft_input, self.previous = step.drafter.representative_pass(self.step.tensors)

    @torch.no_grad()
    def _draft_tokens(self) -> Tensor:
        """int64 [size]: the root and the nodes that the draft draws after the prompt.

        What a pass reads decides which experts of a mixture it needs.
        """
        self.step.refill_random_numbers(self.sampling)
        self.step.draft(self.extent, self.sampling)
        return self.step.sequence.tokens[self.length + self.step.tensors.nodes]

    def run(self) -> dict[tuple[str, int], float]:
        """Time each part once; returns its seconds, by its name and number of nodes."""
        device, stream = self.step.device, self.step.target.stream
        # other sizes have drawn into the same slots since
        slots = self.length + self.step.tensors.nodes
        self.step.sequence.tokens.index_copy_(0, slots, self.tokens)

        def run_target() -> None:
            """A pass; recurrent layers then keep the half that is accepted."""
            self.step.run_target(self.extent)
            self.step.sequence.target.roll_back(self.num_accepted)

        seconds = {}
        pass_seconds: list[float] = []
        if self.pairs and self.times_draft:  # on a CPU, a tree whose second draft pass is timed
            pass_seconds = self.pairs.time_passes(self.sampling, of_target=False)
        if pass_seconds:  # empty where steps are not compiled
            seconds["draft", self.size] = pass_seconds[1]
            self.step.sequence.tokens.index_copy_(0, slots, self.tokens)
        if stream:
            # as in a step, where the target's weights are loaded ahead while the draft runs
            stream.wait_until_full()
        if self.pairs and (pass_seconds := self.step.time_passes(self.sampling, of_target=True)):
            return seconds | {("target", self.size): pass_seconds[0]}
        for _ in range(1 if stream else 2):  # the second counts: in decoding, a step ran before
            if self.times_draft:
                width = self.draft_input.input_slots.numel()
                seconds["draft", width] = timed(device, self.draft_pass)[1]
            seconds["target", self.size] = timed(device, run_target)[1]
        if device.type != "cpu" and self.size <= MAX_OVERHEAD_SIZE:
            host_seconds = time_parts(self.step, self.extent, self.sampling)["host"]
            seconds["overhead", self.size] = host_seconds
        return seconds

    def draft_pass(self) -> tuple[Tensor, Tensor]:
        """One draft pass over as many tokens as are timed: random numbers, forward, drawing.

        A DFlash pass draws nothing: there, drawing is timed with verification.
        """
        sequence, sampling, drafter = self.step.sequence, self.sampling, self.drafter
        numbers_per_node = sampling.drawing_on(self.step.device).columns(drafter.vocabulary, 1)
        new_nodes = self.draft_input.new_nodes
        num_random = 0 if sampling.greedy else new_nodes.numel() * numbers_per_node
        sequence.refill_random_numbers(num_random)

        def forward_and_draw() -> tuple[Tensor, Tensor]:
            """What may run as one CUDA graph."""
            output = drafter.forward(self.draft_input, sequence, self.columns, self.previous)
            if not new_nodes.numel():
                return output.logits, new_nodes
            bits = sequence.bits[: self.size * numbers_per_node].view(self.size, numbers_per_node)
            slots = sequence.length + self.draft_input.new_nodes
            return draw_children(
                drafter, self.draft_input, output.logits, sequence, slots, sampling, bits
            )

        return self.step.replay("draft pass", forward_and_draw, sampling)
