"""What the parts of a step cost on this machine, timed through the decoder's own functions."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import Latency, SequoiaPlanError, Stream, TokenTree, Verification
from sequoia_plan.profiler.verification import ShapeTimer, bushy, fit, order_of_rounds, shapes
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft.drafter import draw_children

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT = 128
LEAST_ROUNDS, MOST_ROUNDS = 5, 100
RAREST = 4
"""The largest sizes take part in one round of four."""
BUSY_CYCLES = 200_000
"""About 0.1 ms of a GPU: as long as it takes to launch a graph, and much less than to launch the kernels of a pass one by one."""
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
    """Times passes of growing size, then all of them in turn, round by round, so that drift hits all alike; medians and quartiles are kept,
    drift taken out. In the same rounds it times the verification of a few shapes.

    A size whose pass takes k times a single token's takes part in one round of k: time goes to the sizes that may be best. Rounds
    may be apart: a machine shared with others is not the same from one minute to the next. All sizes share one sequence.

    Args:
        on_size: called with each size's first median.
        largest: no more nodes than these.
        others: further settings that verification is timed under, as with another verifier.
    """

    def __init__(
        self,
        pair: Pair,
        sampling: Sampling,
        context: int,
        on_size: Callable[[int, float], None] = lambda size, median: None,
        largest: int = SIZES[-1],
        others: Sequence[Sampling] = (),
    ) -> None:
        self.judged = list(dict.fromkeys([sampling, *others]))
        self.decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(2))
        self.sampling, self.on_size = sampling, on_size
        self.prompt = random_prompt(pair, context)
        self.sizes = [size for size in SIZES if size <= largest]
        self.timers: list[SizeTimer] = []
        self.shapes: list[ShapeTimer] = []
        self.shape_samples: list[list[list[float]]] = []
        self.stream_samples: list[float] = []
        self.too_large: int | None = None
        self.rounds, self.seconds = 0, 0.0

    @torch.inference_mode()
    def begin(self, most_tokens: float) -> None:
        """Find the sizes. They grow until the target's pass costs `most_tokens` times that of one node: no tree yields more
        tokens, so none of that size can beat plain decoding. The same holds for draft passes, each width of which is timed up to there.
        A size there is no memory for ends the growth, too, and is recorded.

        Args:
            most_tokens: a bound on any tree's expected tokens.
        """
        drafter = self.decoder.drafter
        assert drafter is not None
        if self.decoder.graphs and not self.sampling.greedy:  # numbers for any size: if they moved, every graph would be captured anew
            self.decoder.sequence.reserve_random_numbers(self.sizes[-1] * self.sampling.drawing.columns(drafter.vocabulary, 1))
        longest = math.inf
        for size in self.sizes:
            try:
                drafts = not self.timers or (drafter.drafting.by_level and self.timers[-1].draft() <= longest)
                timer = SizeTimer(self.decoder, size, self.sampling, self.prompt, drafts)
                for _ in range(3):
                    timer.run()
            except (RuntimeError, SequoiaPlanError) as error:
                if not self.timers or not _out_of_memory(error):
                    raise
                self.too_large = size
                break
            self.timers.append(timer)
            self.on_size(size, timer.target())
            if size == 1:
                self._time_stream()
            plain = max([self.timers[0].target(), *self.stream_samples])
            longest = most_tokens * plain
            if timer.target() > longest:
                break
        for timer in self.timers:
            timer.every = min(RAREST, max(1, int(max(timer.target(), timer.draft() if timer.drafts else 0.0) / plain)))
            timer.forget()
        for tree in shapes(self.timers[-1].size, drafter.vocabulary, drafter.drafting.deepest):
            judged = self.decoder.with_tree(tree)
            judged.prefill(self.prompt, tree.depth, seed=0)
            self.shapes.append(ShapeTimer(judged, self.judged))
        self._time_shapes()  # warm
        self.shape_samples, self.stream_samples = [], []

    @torch.inference_mode()
    def round(self) -> None:
        """One sample of each size that is due, and of each shape."""
        started = time.perf_counter()
        for timer in self.timers:
            if self.rounds % timer.every == 0:
                timer.run()
            else:
                timer.skip()
        self._time_shapes()
        self._time_stream()
        self.rounds += 1
        self.seconds += time.perf_counter() - started

    def finish(self, seconds: float) -> Latency:
        """Further rounds until they took about `seconds` in all, five at least; what was found."""
        while self.rounds < LEAST_ROUNDS or (self.rounds < MOST_ROUNDS and self.seconds < seconds):
            self.round()
        stream = self.decoder.target.stream
        timed_sizes = [("target", timer.size, timer) for timer in self.timers] + [("draft", timer.width, timer) for timer in self.timers if timer.drafts]

        def by_size(times: NDArray[np.float64]) -> dict[str, dict[int, float]]:
            found: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
            for (name, size, _), seconds in zip(timed_sizes, times, strict=True):
                found[name][size] = _rounded(seconds)
            return found

        low, middle, high = map(by_size, drift_free_quartiles(np.array([timer.samples[name] for name, _, timer in timed_sizes])))
        return Latency(
            target=middle["target"],
            draft=middle["draft"],
            overhead=round(statistics.median(timer.rest() for timer in self.timers if timer.size <= REST_UP_TO), 6),
            context=self.prompt.numel(),
            samples={timer.size: -(-self.rounds // timer.every) for timer in self.timers},
            quartiles={name: {size: (first, high[name][size]) for size, first in sizes.items()} for name, sizes in low.items()},
            out_of_memory=self.too_large,
            stream=Stream(_rounded(statistics.median(self.stream_samples)), stream.bytes) if stream else None,
            verification=self.verification(self.sampling),
        )

    def verification(self, sampling: Sampling) -> Verification:
        """What was found for one of the settings."""
        medians = drift_free_quartiles(np.moveaxis(np.array(self.shape_samples), 0, -1))[1]  # drift of all settings together: ratios stay
        return fit([shape.decoder.tree for shape in self.shapes], medians[self.judged.index(sampling)].tolist(), order_of_rounds(self.decoder, sampling))

    def _time_stream(self) -> None:
        """One sample of a streamed target's pass right after another one."""
        if self.decoder.target.stream:
            first = self.timers[0]
            first.decoder.run_target(first.extent)
            self.stream_samples.append(timed(self.decoder.device, lambda: first.decoder.run_target(first.extent))[1])

    def _time_shapes(self) -> None:
        """One sample of each shape under each setting."""
        seconds: list[list[float]] = [[] for _ in self.judged]
        for shape, (sampling, mine) in itertools.product(self.shapes, zip(self.judged, seconds, strict=True)):
            self.timers[0].draft_pass()  # as in a step, a model's weights were in the processor's cache before
            shape.prepare(sampling)
            mine.append(timed(self.decoder.device, partial(shape.run, sampling))[1])
            shape.restore()
        self.shape_samples.append(seconds)


def timed(device: torch.device, run: Callable[[], T]) -> tuple[T, float]:
    """What `run` returns, and the seconds until all of its work is done; on CUDA by the device's own clock. There the device is kept busy
    before the clock starts: while steps are launched ahead it never waits for the launch of a graph, so that is no part of the time."""
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


def random_prompt(pair: Pair, context: int) -> Tensor:
    """int64 [context], the same tokens each time."""
    vocabulary = pair.target.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(0)).to(pair.target.device)


class SizeTimer:
    """Times one size: the target's pass over `size` nodes, a draft pass over `size` tokens, and what a step takes beyond its parts.

    As the decoder runs a step, so its parts are run here: as CUDA graphs where it captures.

    Args:
        decoder: gives models and the sequence, which holds `prompt` afterwards.
        drafts: time draft passes, too. Where every pass is as wide, one size is enough.
    """

    def __init__(self, decoder: SequoiaDecoder, size: int, sampling: Sampling, prompt: Tensor, drafts: bool = True) -> None:
        self.size, self.sampling, self.drafts, self.every = size, sampling, drafts, 1
        self.decoder = decoder.with_tree(bushy(size, 3, decoder.drafter.drafting.deepest if decoder.drafter else None))
        self.decoder.prefill(prompt, size + self.decoder.tree.depth, seed=0)  # with room for a child of each node
        self.extent = self.decoder.extent(prompt.numel() - 1)
        self.length = decoder.sequence.length.clone()
        self.columns = self.decoder.structure.columns(self.length, self.extent)
        assert self.decoder.drafter is not None
        self.drafted, self.before = self.decoder.drafter.trial(self.decoder.structure)
        self.width = self.drafted.reads.numel()
        self.samples: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.samples = {"target": [], "draft": [], "rest": []}

    def skip(self) -> None:
        """No sample in this round."""
        for each in self.samples.values():
            each.append(math.nan)

    def run(self) -> None:
        """One sample of each part."""
        if stream := self.decoder.target.stream:
            stream.fill()  # as after drafting
        self._timed("target", lambda: self.decoder.run_target(self.extent))
        if self.drafts:
            self._timed("draft", self.draft_pass)
        if self.size <= REST_UP_TO:
            self.samples["rest"].append(self._beyond_the_parts())

    def draft_pass(self) -> tuple[Tensor, Tensor]:
        """One draft pass over `width` tokens: its random numbers, the pass, the drawing of a child of each where that is a part of it."""
        decoder, sequence, sampling, drafter = self.decoder, self.decoder.sequence, self.sampling, self.decoder.drafter
        assert drafter is not None
        columns = sampling.drawing.columns(drafter.vocabulary, 1)
        sequence.refill_random_numbers(0 if sampling.greedy else self.drafted.nodes.numel() * columns)

        def expand() -> tuple[Tensor, Tensor]:
            logits = drafter.read(self.drafted, sequence, self.columns, self.before).logits
            if not self.drafted.nodes.numel():
                return logits, self.drafted.nodes
            return draw_children(drafter, self.drafted, logits, sequence, sampling, sequence.bits[: self.size * columns].view(self.size, columns))

        return decoder.replayed("draft pass", expand, sampling)

    def target(self) -> float:
        """Median seconds of the target's pass."""
        return float(np.nanmedian(self.samples["target"]))

    def draft(self) -> float:
        """Median seconds of a draft pass; inf if it is not timed."""
        return float(np.nanmedian(self.samples["draft"])) if self.drafts else math.inf

    def rest(self) -> float:
        """Median seconds of a step beyond its parts."""
        return max(0.0, float(np.nanmedian(self.samples["rest"])))

    def _timed(self, name: str, run: Callable[[], T]) -> T:
        result, seconds = timed(self.decoder.device, run)
        self.samples[name].append(seconds)
        return result

    def _beyond_the_parts(self) -> float:
        """On CUDA the difference of a step and its parts; on the CPU, where that would be all noise, what the host does by itself."""
        decoder, sampling, extent = self.decoder, self.sampling, self.extent

        def host() -> None:
            decoder.structure.columns(decoder.sequence.length, extent)
            decoder.sequence.length.tolist()

        def step() -> None:
            decoder.refill_random_numbers(sampling)
            decoder.run(extent, sampling).tolist()

        if decoder.device.type == "cpu":
            return timed(decoder.device, host)[1]
        growth, drafted = timed(decoder.device, lambda: decoder.run_draft(extent, sampling))
        logits, target = timed(decoder.device, lambda: decoder.run_target(extent))
        _, judged = timed(decoder.device, lambda: decoder.run_verification(logits, growth, sampling))
        decoder.sequence.length.copy_(self.length)
        whole = timed(decoder.device, step)[1]
        decoder.sequence.length.copy_(self.length)
        return whole - drafted - target - judged


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
