"""Where the time of a step goes."""

import statistics
from functools import partial

import torch

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.timing import CONTEXT, random_prompt, timed
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.captured_step import CapturedStep

WARM_UP_ROUNDS = 3


@torch.inference_mode()
def breakdown(
    pair: Pair, tree: TokenTree, sampling: Sampling, context: int = CONTEXT, rounds: int = 20
) -> dict[str, float]:
    """Median seconds of a decoding step and of its parts, timed in turn, round by round.

    The parts run as the decoder runs them: as CUDA graphs where it captures.
    """
    step = CapturedStep.of(pair.target, pair.draft, tree)
    step.prefill(random_prompt(pair, context), tree.depth, seed=0)
    extent = step.extent(context - 1)
    samples = [time_parts(step, extent, sampling) for _ in range(WARM_UP_ROUNDS + rounds)]
    seconds = {
        name: statistics.median(sample[name] for sample in samples[WARM_UP_ROUNDS:])
        for name in ("step", "draft", "target", "verify")
    }
    model_seconds = seconds["draft"] + seconds["target"]
    seconds["host"] = seconds["step"] - model_seconds - seconds["verify"]
    return seconds | {"share_not_model": 1 - model_seconds / seconds["step"]}


def time_parts(step: CapturedStep, extent: int, sampling: Sampling) -> dict[str, float]:
    """Time the parts of a step and a whole one, once; the sequence stays as long as it is.

    `host` is what a step takes beyond its parts.
    """
    length = step.sequence.length.clone()
    root = int(length)
    step_seconds = timed(step.device, lambda: step.launch(root, sampling)(root))[1]
    step.sequence.length.copy_(length)  # undoes the tokens that were committed
    if seconds := step.part_seconds(sampling):
        *draft_passes, target, verify = seconds
        draft = sum(draft_passes)
    else:
        step.refill_random_numbers(sampling)
        drafted, draft = timed(step.device, partial(step.run_draft, extent, sampling))
        logits, target = timed(step.device, partial(step.run_target, extent))
        verify = timed(step.device, partial(step.run_verification, logits, drafted, sampling))[1]
    step.sequence.length.copy_(length)
    parts = {"draft": draft, "target": target, "verify": verify}
    return {"step": step_seconds, **parts, "host": step_seconds - sum(parts.values())}
