"""Where the time of a step goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.latency import CONTEXT, random_prompt, timed
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft.drafter import Growth, draw_children
from sequoia_plan.runtime.models.forward import Reading
from sequoia_plan.runtime.verify import Accepted

T = TypeVar("T")
PARTS = ("draft", "target", "verify", "keep", "host")
"""What a step's time adds up from."""
WARM_UP = 3


@torch.inference_mode()
def breakdown(pair: Pair, tree: TokenTree, sampling: Sampling, context: int = CONTEXT, rounds: int = 20, **options: Any) -> dict[str, float]:
    """Median seconds of a step and of its parts, timed in turn, round by round, as the decoder runs them (CUDA graphs where it captures).

    Args:
        context: tokens in the KV cache.
        options: of `SequoiaDecoder`.

    Returns:
        step: a whole step, its random numbers drawn before and its tokens read back after. Its parts, which add up to it:
        draft: all draft passes, the drawing of children included; target: its forward pass; verify; keep: KV cache and tokens
        compacted; host: what is left of the step (small noise can make it negative). Besides:
        draw: the drawing of children within `draft`; share_not_model: (verify + keep + host) / step.
    """
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, **options)
    decoder.prefill(random_prompt(pair, context), tree.depth, seed=0)
    sequence, drafter, extent = decoder.sequence, decoder.drafter, decoder.extent(context - 1)
    length, columns = sequence.length.clone(), decoder.structure.columns(sequence.length, extent)
    decoder.refill_random_numbers(sampling)
    growth = decoder.run_draft(extent, sampling)  # stands for any tree: times do not depend on tokens
    samples: dict[str, list[float]] = {name: [] for name in ("step", "forward", "draw", "target", "verify", "keep")}

    def forward() -> tuple[Tensor, ...]:
        assert drafter is not None
        readings: list[Reading] = []
        for step in decoder.passes:
            readings.append(drafter.read(step, sequence, columns, readings[-1] if readings else None))
        return tuple(reading.logits for reading in readings)

    def draw(*logits: Tensor) -> None:
        assert drafter is not None
        bits = decoder.random_bits(sampling).split([step.expands for step in decoder.passes])
        for step, seen, mine in zip(decoder.passes, logits, bits, strict=True):
            draw_children(drafter, step, seen, sequence, sampling, mine)

    def judge(logits: Tensor, laws: Tensor, drawn: Tensor) -> Accepted:
        return decoder.judge(logits, Growth(laws, drawn), sampling)

    def keep(*accepted: Tensor) -> Tensor:
        return decoder.keep(Accepted(*accepted))

    def whole() -> None:
        decoder.refill_random_numbers(sampling)
        decoder.run(extent, sampling).tolist()

    def part(name: str, run: Callable[..., T], *inputs: Tensor) -> T:
        result, seconds = timed(decoder.device, lambda: decoder.replayed(name, run, extent, sampling, inputs=inputs))
        samples[name].append(seconds)
        return result

    for done in range(WARM_UP + rounds):
        if done == WARM_UP:
            for times in samples.values():
                times.clear()
        if decoder.passes:
            part("draw", draw, *part("forward", forward))
        logits = part("target", lambda: decoder.read(extent))
        accepted = part("verify", judge, logits, growth.laws, growth.drawn)
        part("keep", keep, accepted.path, accepted.count, accepted.bonus)
        sequence.length.copy_(length)
        samples["step"].append(timed(decoder.device, whole)[1])
        sequence.length.copy_(length)

    median = {name: statistics.median(times) if times else 0.0 for name, times in samples.items()}
    found = {"draft": median["forward"] + median["draw"]} | {name: median[name] for name in ("target", "verify", "keep")}
    found["host"] = median["step"] - sum(found.values())
    share = (found["verify"] + found["keep"] + found["host"]) / median["step"]
    return {"step": median["step"], **found, "draw": median["draw"], "share_not_model": share}
