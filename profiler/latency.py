"""What the parts of a step cost on this machine, timed through the decoder's own functions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import Latency, SequoiaPlanError, TokenTree
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.grow import expand

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT = 128
LEAST_ROUNDS, MOST_ROUNDS = 5, 100
RAREST = 4
"""The largest sizes take part in every so manieth round."""
REST_UP_TO = 2
"""Up to this size what a step takes beyond its parts is timed, too."""


def measure_latency(
    pair: Pair,
    sampling: Sampling,
    most_tokens: float,
    seconds: float,
    context: int = CONTEXT,
    on_size: Callable[[int, float], None] = lambda size, median: None,
    largest: int = SIZES[-1],
) -> Latency:
    """All at once, for about `seconds` once the sizes are known; see `LatencyMeter`."""
    meter = LatencyMeter(pair, sampling, context, on_size, largest)
    meter.begin(most_tokens)
    return meter.finish(seconds)


class LatencyMeter:
    """Times trees of growing size, then all of them in turn, round by round, so that drift hits all alike; medians and quartiles are kept,
    drift taken out.

    A size whose pass takes k times a single token's takes part in every k-th round: time goes to the sizes that may be best. Rounds
    may lie apart: a machine shared with others is not the same from one minute to the next.

    Args:
        on_size: called with each size's first median.
        largest: no more nodes than these.
    """

    def __init__(
        self, pair: Pair, sampling: Sampling, context: int, on_size: Callable[[int, float], None] = lambda size, median: None, largest: int = SIZES[-1]
    ) -> None:
        self.pair, self.sampling, self.context, self.on_size = pair, sampling, context, on_size
        self.sizes = [size for size in SIZES if size <= largest]
        self.benches: list[_Bench] = []
        self.too_large: int | None = None
        self.rounds, self.seconds = 0, 0.0

    @torch.inference_mode()
    def begin(self, most_tokens: float) -> None:
        """Find the sizes. They grow until the target's part of a step costs `most_tokens` times that of one node: no tree yields more
        tokens, so none of that size can beat plain decoding. A size there is no memory for ends the growth, too, and is recorded.

        Args:
            most_tokens: a bound on any tree's expected tokens.
        """
        for size in self.sizes:
            try:
                bench = _Bench(self.pair, size, self.sampling, self.context)
                for _ in range(3):
                    bench.run()
            except (RuntimeError, SequoiaPlanError) as error:
                if not self.benches or not _out_of_memory(error):
                    raise
                self.too_large = size
                break
            self.benches.append(bench)
            self.on_size(size, bench.target())
            if bench.target() > most_tokens * self.benches[0].target():
                break
        plain = self.benches[0].target()
        for bench in self.benches:
            bench.every = min(RAREST, max(1, int(bench.target() / plain)))
            bench.forget()

    @torch.inference_mode()
    def round(self) -> None:
        """One sample of each size that is due."""
        started = time.perf_counter()
        for bench in self.benches:
            if self.rounds % bench.every == 0:
                bench.run()
            else:
                bench.skip()
        self.rounds += 1
        self.seconds += time.perf_counter() - started

    def finish(self, seconds: float) -> Latency:
        """Further rounds until they took about `seconds` in all, five at least; what was found."""
        while self.rounds < LEAST_ROUNDS or (self.rounds < MOST_ROUNDS and self.seconds < seconds):
            self.round()
        curves, sizes = ("target", "draft"), [bench.size for bench in self.benches]

        def by_size(rows: NDArray[np.float64]) -> dict[str, dict[int, float]]:
            return {name: dict(zip(sizes, map(_rounded, row), strict=True)) for name, row in zip(curves, rows, strict=True)}

        low, middle, high = map(by_size, drift_free_quartiles(np.array([[bench.samples[name] for bench in self.benches] for name in curves])))
        return Latency(
            target=middle["target"],
            draft=middle["draft"],
            overhead=round(statistics.median(bench.rest() for bench in self.benches if bench.size <= REST_UP_TO), 6),
            context=self.context,
            samples={bench.size: -(-self.rounds // bench.every) for bench in self.benches},
            quartiles={name: {size: (low[name][size], high[name][size]) for size in sizes} for name in curves},
            out_of_memory=self.too_large,
        )


def timed(device: torch.device, run: Callable[[], T]) -> tuple[T, float]:
    """What `run` returns, and the seconds until all of its work is done; on CUDA by the device's own clock."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        begin.record(stream)
        result = run()
        end.record(stream)
        end.synchronize()
        return result, begin.elapsed_time(end) / 1000
    started = time.perf_counter()
    result = run()
    return result, time.perf_counter() - started


def prefilled(pair: Pair, tree: TokenTree, context: int) -> SequoiaDecoder:
    """A decoder after a random prompt of `context` tokens, with room for a step."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    vocabulary = pair.target.get_input_embeddings().weight.shape[0]
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(0)).to(decoder.device)
    decoder.prefill(prompt, tree.depth, seed=0)
    return decoder


class _Bench:
    """Times one size: the target's part on a tree of `size` nodes, a draft pass of `size` tokens, a whole step.

    As the decoder runs a step, so its parts are run here: as CUDA graphs where it captures.
    """

    def __init__(self, pair: Pair, size: int, sampling: Sampling, context: int) -> None:
        self.size, self.sampling, self.every = size, sampling, 1
        ternary = TokenTree.from_parents([-1, *((node - 1) // 3 for node in range(1, size))])
        comb = TokenTree.from_parents([-1, *[0] * size, *range(1, size + 1)])  # its second draft pass reads `size` nodes
        self.step, self.comb = (prefilled(pair, tree, context) for tree in (ternary, comb))
        self.mask, self.comb_mask = (each.mask(each.length, each.extent(context - 1)) for each in (self.step, self.comb))
        self.rows = torch.zeros_like(self.comb.offsets)
        self.length, self.extent = self.step.length.clone(), self.step.extent(context - 1)
        self.samples: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        self.samples = {"grow": [], "target": [], "draft": [], "rest": []}

    def skip(self) -> None:
        """No sample in this round."""
        for each in self.samples.values():
            each.append(math.nan)

    def run(self) -> None:
        """One sample of each part. The length is put back, so that every step is the same step."""
        decoder, comb, sampling = self.step, self.comb, self.sampling

        def grow() -> Any:
            decoder.throw(sampling)
            return decoder.replayed("grow", lambda: decoder.grow(self.mask, sampling))

        growth = self._timed("grow", grow)

        def target() -> Tensor:
            return decoder.keep(decoder.judge(decoder.read(growth, self.mask), growth, sampling), growth)

        self._timed("target", lambda: decoder.replayed("target", target))
        decoder.length.copy_(self.length)

        def step() -> None:
            decoder.throw(sampling)
            decoder.run(self.extent, sampling).tolist()

        def host() -> None:
            decoder.mask(decoder.length, self.extent)
            decoder.length.tolist()

        if self.size <= REST_UP_TO and decoder.device.type == "cpu":  # a difference of passes would be all noise there
            self._timed("rest", host)
        elif self.size <= REST_UP_TO:
            _, seconds = timed(decoder.device, step)
            self.samples["rest"].append(seconds - self.samples["grow"][-1] - self.samples["target"][-1])
            decoder.length.copy_(self.length)

        def expansion() -> Any:
            assert comb.draft is not None
            return expand(comb.draft, comb.levels[1], self.rows, comb.length, comb.offsets, self.comb_mask, sampling, comb.bits[1:])

        def draft() -> Any:
            comb.throw(sampling)
            return comb.replayed("draft", expansion)

        self._timed("draft", draft)

    def target(self) -> float:
        return float(np.nanmedian(self.samples["target"]))

    def rest(self) -> float:
        """A step's time beyond its parts: on CUDA by difference, round by round."""
        return max(0.0, float(np.nanmedian(self.samples["rest"])))

    def _timed(self, name: str, run: Callable[[], T]) -> T:
        result, seconds = timed(self.step.device, run)
        self.samples[name].append(seconds)
        return result


def drift_free_quartiles(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [3, ..., sizes]: first quartile, median and third quartile of `times` [..., sizes, rounds], each round divided by what it
    is off the medians in the middle of all sizes: drift that hits all alike leaves their ratios, and so a speed-up, as they are, also
    between sizes that took part in different rounds. NaN is no sample."""
    off = times / np.nanmedian(times, -1, keepdims=True)
    drift = np.nanmedian(off.reshape(-1, times.shape[-1]), 0)
    quartiles: NDArray[np.float64] = np.nanquantile(times / drift, [0.25, 0.5, 0.75], axis=-1)
    return quartiles


def _out_of_memory(error: Exception) -> bool:
    """Of a device (PyTorch's own class), of the host (it says so in words), or of our KV cache."""
    words = ("KV cache:", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _rounded(seconds: float) -> float:
    """Microseconds are finer than any clock noise and keep the file readable."""
    return max(round(float(seconds), 6), 1e-6)
