"""Repeated times: a clock for both kinds of devices, and medians without the machine's drift."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.runtime import Pair

T = TypeVar("T")
CONTEXT = 128
"""Tokens in the KV cache while passes are timed, unless told otherwise."""
BUSY_CYCLES = 200_000
"""GPU cycles, about 0.1 ms: as long as launching a graph takes, and much less than launching the
kernels of a pass one by one."""


def timed(device: torch.device, run: Callable[[], T]) -> tuple[T, float]:
    """What `run` returns, and the seconds until all of its work is done.

    On CUDA the device's own clock measures. The device is kept busy (`BUSY_CYCLES`) while the host
    launches the work, so the time does not include the launch: in decoding, the host launches steps
    ahead and the device does not wait for it.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record(stream)
        result = run()
        end.record(stream)
        end.synchronize()
        return result, begin.elapsed_time(end) / 1000
    started = time.perf_counter()
    result = run()
    return result, time.perf_counter() - started


def drift_free_quartiles(times: Floats) -> Floats:
    """First quartile, median and third quartile of repeated times, without common drift.

    Each round's times are divided by how much slower than its own median the median size was.
    `times` float64 [..., sizes, rounds], NaN where a size took no part; returns [3, ..., sizes].
    """
    slowdowns = times / np.nanmedian(times, -1, keepdims=True)
    drift = np.nanmedian(slowdowns.reshape(-1, times.shape[-1]), 0)
    return np.nanquantile(times / drift, [0.25, 0.5, 0.75], axis=-1)


def text_prompt(pair: Pair, context: int, texts: Sequence[Sequence[int]]) -> Tensor:
    """int64 [context]: the first tokens of `texts`, repeated if too few; else random ones."""
    repeated = itertools.cycle(itertools.chain.from_iterable(texts))
    tokens = list(itertools.islice(repeated, context))
    if not tokens:
        return random_prompt(pair, context)
    return torch.tensor(tokens, device=pair.target.device)


def random_prompt(pair: Pair, context: int) -> Tensor:
    """int64 [context]: random tokens of the target's vocabulary, the same each time."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(pair.target.num_embeddings, (context,), generator=generator)
    return prompt.to(pair.target.device)
