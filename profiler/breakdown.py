"""Where the time of a step goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.latency import CONTEXT
from sequoia_plan.profiler.timing import random_prompt, timed
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import DraftedTree, draw_children
from sequoia_plan.runtime.models.forward import ForwardOutput
from sequoia_plan.runtime.verify import AcceptedPath

T = TypeVar("T")
PARTS = ("draft", "target", "verify", "commit", "host")
"""The parts that add up to a step."""
WARM_UP_ROUNDS = 3


@torch.inference_mode()
def breakdown(
    pair: Pair,
    tree: TokenTree,
    sampling: Sampling,
    context: int = CONTEXT,
    rounds: int = 20,
    **options: Any,
) -> dict[str, float]:
    """Median seconds of a decoding step and of its parts, timed in turn, round by round.

    The parts run as the decoder runs them: as CUDA graphs where it captures.
    """
    step = CapturedStep.of(pair.target, pair.draft, tree, **options)
    step.prefill(random_prompt(pair, context), tree.depth, seed=0)
    sequence, drafter, extent = step.sequence, step.drafter, step.extent(context - 1)
    # `extent`: number of slots of the KV cache that attention looks at; `columns`: int64 [extent],
    # for each of them the column of the tree's mask that applies
    length = sequence.length.clone()
    columns = step.tensors.columns(sequence.length, extent)
    step.refill_random_numbers(sampling)
    # times do not depend on tokens, so one drafted tree serves all rounds
    drafted = step.run_draft(extent, sampling)
    samples: dict[str, list[float]] = {
        name: [] for name in ("step", "forward", "draw", "target", "verify", "commit")
    }

    def forward() -> tuple[Tensor, ...]:
        """All draft passes, without drawing; returns the logits of each."""
        assert drafter is not None
        outputs: list[ForwardOutput] = []
        for draft_pass in step.passes:
            previous = outputs[-1] if outputs else None
            outputs.append(drafter.forward(draft_pass, sequence, columns, previous))
        return tuple(output.logits for output in outputs)

    def draw(*logits: Tensor) -> None:
        """Draw the children of all nodes from the logits of each pass."""
        assert drafter is not None
        parents_by_pass = [draft_pass.num_parents for draft_pass in step.passes]
        bits = step.random_bits(sampling).split(parents_by_pass)
        for draft_pass, pass_logits, pass_bits in zip(step.passes, logits, bits, strict=True):
            draw_children(drafter, draft_pass, pass_logits, sequence, sampling, pass_bits)

    def verify(logits: Tensor, draft_probs: Tensor, drawn: Tensor) -> AcceptedPath:
        """Verify the drafted tree with the target's logits."""
        return step.verify(logits, DraftedTree(draft_probs, drawn), sampling)

    def commit(*accepted: Tensor) -> Tensor:
        """Commit the accepted path; the arguments are the fields of `AcceptedPath`."""
        return step.commit(AcceptedPath(*accepted))

    def run_step() -> None:
        """A whole step, from its random numbers to reading its tokens back."""
        step.refill_random_numbers(sampling)
        step.run(extent, sampling).tolist()

    def time_part(name: str, function: Callable[..., T], *inputs: Tensor) -> T:
        """Run one part as the decoder does, and add its seconds to `samples`."""
        result, seconds = timed(
            step.device, lambda: step.replay(name, function, extent, sampling, inputs=inputs)
        )
        samples[name].append(seconds)
        return result

    for finished_rounds in range(WARM_UP_ROUNDS + rounds):
        if finished_rounds == WARM_UP_ROUNDS:  # forget the times so far
            for times in samples.values():
                times.clear()
        if step.passes:
            time_part("draw", draw, *time_part("forward", forward))
        logits = time_part("target", lambda: step.forward_target(extent))
        accepted = time_part("verify", verify, logits, drafted.draft_probs, drafted.drawn)
        time_part("commit", commit, accepted.path, accepted.count, accepted.bonus)
        sequence.length.copy_(length)  # undoes the tokens that were committed
        samples["step"].append(timed(step.device, run_step)[1])
        sequence.length.copy_(length)

    median = {name: statistics.median(times) if times else 0.0 for name, times in samples.items()}
    parts = {"draft": median["forward"] + median["draw"]}
    parts |= {name: median[name] for name in ("target", "verify", "commit")}
    parts["host"] = median["step"] - sum(parts.values())
    seconds_not_model = parts["verify"] + parts["commit"] + parts["host"]
    share_not_model = seconds_not_model / median["step"]
    return {
        "step": median["step"],
        **parts,
        "draw": median["draw"],
        "share_not_model": share_not_model,
    }
