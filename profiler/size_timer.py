"""The times of one number of nodes: a pass of the target, a draft pass, and a step's overhead."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.profiler.draft_passes import representative_pass
from sequoia_plan.profiler.timing import timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import draw_children

MAX_OVERHEAD_SIZE = 2
"""The overhead of a step is timed with trees of up to so many nodes."""
NUM_CHILDREN = 3
"""Of a node of the trees that are timed."""


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
        self.step = step.with_tree(bushy(size, NUM_CHILDREN, step.drafter.drafting.max_depth))
        # with room for a child of each node, which `draft_pass` draws
        self.step.prefill(prompt, size + self.step.tree.depth, seed=0)
        self.extent = self.step.extent(prompt.numel() - 1)
        self.length = step.sequence.length.clone()
        self.tokens = self._draft_tokens()
        self.columns = self.step.tensors.columns(self.length, self.extent)
        self.draft_input, self.previous = representative_pass(step.drafter, self.step.tensors)
        self.width = self.draft_input.input_slots.numel()
        self.samples: dict[str, list[float]] = {"target": [], "draft": [], "rest": []}

    @torch.no_grad()
    def _draft_tokens(self) -> Tensor:
        """int64 [size]: the root and the nodes that the draft draws after the prompt.

        What a pass reads decides which experts of a mixture it needs.
        """
        self.step.refill_random_numbers(self.sampling)
        self.step.draft(self.extent, self.sampling)
        slots = self.length + self.step.tensors.nodes
        return self.step.sequence.tokens[slots]

    def take_part_every(self, plain_seconds: float, max_interval: int) -> None:
        """Choose the interval by the samples so far, and forget them.

        A size whose pass takes as long as k plain passes takes part in every k-th round.
        """
        draft_seconds = self.draft_seconds() if self.times_draft else 0.0
        slowest = max(self.target_seconds(), draft_seconds)
        self.interval = min(max_interval, max(1, int(slowest / plain_seconds)))
        self.samples = {name: [] for name in self.samples}

    def skip(self) -> None:
        """Take no sample in this round."""
        for seconds in self.samples.values():
            seconds.append(math.nan)

    def run(self) -> None:
        """Time each part once."""
        if stream := self.step.target.stream:
            # as in a step, where the target's weights are loaded ahead while the draft runs
            stream.wait_until_full()
        # other sizes have drawn into the same slots since
        slots = self.length + self.step.tensors.nodes
        self.step.sequence.tokens.index_copy_(0, slots, self.tokens)
        run_target = partial(self.step.run_target, self.extent)
        self.samples["target"].append(timed(self.step.device, run_target)[1])
        if self.times_draft:
            self.samples["draft"].append(timed(self.step.device, self.draft_pass)[1])
        if self.size <= MAX_OVERHEAD_SIZE:
            self.samples["rest"].append(self._time_overhead())

    def draft_pass(self) -> tuple[Tensor, Tensor]:
        """One draft pass over as many tokens as are timed: random numbers, forward, drawing.

        A DFlash pass draws nothing: there, drawing is timed with verification.
        """
        sequence, sampling, drafter = self.step.sequence, self.sampling, self.step.drafter
        assert drafter is not None
        numbers_per_node = sampling.drawing.columns(drafter.vocabulary, 1)
        new_nodes = self.draft_input.new_nodes
        num_random = 0 if sampling.greedy else new_nodes.numel() * numbers_per_node
        sequence.refill_random_numbers(num_random)

        def forward_and_draw() -> tuple[Tensor, Tensor]:
            """What may run as one CUDA graph."""
            output = drafter.forward(self.draft_input, sequence, self.columns, self.previous)
            if not new_nodes.numel():
                return output.logits, new_nodes
            bits = sequence.bits[: self.size * numbers_per_node].view(self.size, numbers_per_node)
            return draw_children(drafter, self.draft_input, output.logits, sequence, sampling, bits)

        return self.step.replay("draft pass", forward_and_draw, sampling)

    def target_seconds(self) -> float:
        """Median seconds of the target's pass."""
        return float(np.nanmedian(self.samples["target"]))

    def draft_seconds(self) -> float:
        """Median seconds of a draft pass; inf if it is not timed."""
        return float(np.nanmedian(self.samples["draft"])) if self.times_draft else math.inf

    def overhead_seconds(self) -> float:
        """Median seconds of a step beyond its parts."""
        return max(0.0, float(np.nanmedian(self.samples["rest"])))

    def _time_overhead(self) -> float:
        """Seconds of a step beyond drafting, the target's pass and verification.

        On CUDA, this is the difference of a whole step and these parts. On the CPU the difference
        would be all noise, so what a step does besides (setting up the attention mask, reading the
        result) is timed by itself.
        """
        step, sampling, extent, device = self.step, self.sampling, self.extent, self.step.device

        def run_host_part() -> None:
            """What a step on the CPU does besides its parts."""
            step.tensors.columns(step.sequence.length, extent)
            step.sequence.length.tolist()

        def run_step() -> None:
            """A whole step, from its random numbers to reading its tokens back."""
            step.refill_random_numbers(sampling)
            step.run(extent, sampling).tolist()

        if device.type == "cpu":
            return timed(device, run_host_part)[1]
        drafted, draft_seconds = timed(device, lambda: step.run_draft(extent, sampling))
        logits, target_seconds = timed(device, lambda: step.run_target(extent))
        _, verify_seconds = timed(device, lambda: step.run_verification(logits, drafted, sampling))
        step.sequence.length.copy_(self.length)  # undoes the tokens that were committed
        step_seconds = timed(device, run_step)[1]
        step.sequence.length.copy_(self.length)
        return step_seconds - draft_seconds - target_seconds - verify_seconds
