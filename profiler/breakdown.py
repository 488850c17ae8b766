"""Where the time of a step goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.latency import CONTEXT, prefilled, timed
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.grow import beget, read

T = TypeVar("T")
PARTS = ("draft", "target", "verify", "keep", "host")
"""What a step's time adds up from."""
WARM_UP = 3


@torch.inference_mode()
def breakdown(pair: Pair, tree: TokenTree, sampling: Sampling, context: int = CONTEXT, rounds: int = 20) -> dict[str, float]:
    """Median seconds of a step and of its parts, timed in turn, round by round, as the decoder runs them (CUDA graphs where it captures).

    Args:
        context: tokens in the KV cache.

    Returns:
        step: a whole step, its random numbers thrown before and its tokens read back after. Its parts, which add up to it:
        draft: all draft passes, the drawing of children included; target: its forward pass; verify; keep: KV cache and tokens
        compacted; host: what is left of the step (small noise can make it negative). Besides:
        draw: the drawing of children within `draft`; share_not_model: (verify + keep + host) / step.
    """
    decoder = prefilled(pair, tree, context)
    length, extent = decoder.length.clone(), decoder.extent(context - 1)
    mask = decoder.mask(length, extent)
    decoder.throw(sampling)
    growth = decoder.replayed("grow", lambda: decoder.grow(mask, sampling))  # stands for any tree: times do not depend on tokens
    rows = torch.cat([decoder.tokens[context - 2 : context - 1] if context > 1 else growth.tokens[:1], growth.tokens])
    samples: dict[str, list[float]] = {name: [] for name in ("step", "forward", "draw", "target", "verify", "keep")}

    def forward() -> list[Tensor]:
        assert decoder.draft is not None
        return [read(decoder.draft, level, rows, decoder.length, decoder.offsets, mask) for level in decoder.levels]

    def draw(logits: list[Tensor]) -> None:
        assert decoder.draft is not None
        thrown = decoder.bits.split([level.expands for level in decoder.levels])
        for level, seen, bits in zip(decoder.levels, logits, thrown, strict=True):
            beget(decoder.draft, level, rows, seen, sampling, bits)

    def whole() -> None:
        decoder.throw(sampling)
        decoder.run(extent, sampling).tolist()

    def part(name: str, run: Callable[..., T], *given: Any) -> T:
        result, seconds = timed(decoder.device, lambda: decoder.replayed(name, lambda: run(*given)))
        samples[name].append(seconds)
        return result

    for done in range(WARM_UP + rounds):
        if done == WARM_UP:
            for times in samples.values():
                times.clear()
        if decoder.draft:
            part("draw", draw, part("forward", forward))
        logits = part("target", decoder.read, growth, mask)
        accepted = part("verify", decoder.judge, logits, growth, sampling)
        part("keep", decoder.keep, accepted, growth)
        decoder.length.copy_(length)
        samples["step"].append(timed(decoder.device, whole)[1])
        decoder.length.copy_(length)

    median = {name: statistics.median(times) if times else 0.0 for name, times in samples.items()}
    found = {"draft": median["forward"] + median["draw"]} | {name: median[name] for name in ("target", "verify", "keep")}
    found["host"] = median["step"] - sum(found.values())
    share = (found["verify"] + found["keep"] + found["host"]) / median["step"]
    return {"step": median["step"], **found, "draw": median["draw"], "share_not_model": share}
