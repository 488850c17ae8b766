"""The time of each part of a step on this machine, measured with the decoder's own functions."""

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

from sequoia_plan.artifacts import (
    Latency,
    SequoiaPlanError,
    StreamCost,
    TokenTree,
    VerificationCost,
)
from sequoia_plan.profiler.draft_passes import representative_pass
from sequoia_plan.profiler.verification import (
    ShapeTimer,
    bushy,
    fit,
    shapes_to_time,
)
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import draw_children

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of nodes whose passes may be timed."""
CONTEXT = 128
"""Tokens in the KV cache while passes are timed, unless told otherwise."""
MIN_ROUNDS, MAX_ROUNDS = 5, 100
MAX_INTERVAL = 4
"""Even the largest sizes take part in one round of so many."""
BUSY_CYCLES = 200_000
"""GPU cycles, about 0.1 ms: as long as launching a graph takes, and much less than launching the
kernels of a pass one by one."""
MAX_OVERHEAD_SIZE = 2
"""The overhead of a step is timed with trees of up to so many nodes."""


def measure_latency(
    pair: Pair,
    sampling: Sampling,
    max_tokens: float,
    seconds: float,
    context: int = CONTEXT,
    on_size: Callable[[int, float], None] = lambda size, median: None,
    max_size: int = SIZES[-1],
) -> Latency:
    """Time the parts of a step: target, draft passes, verification and overhead.

    First each size is timed a few times, to find out which sizes are worth timing. Then all of them
    are timed in turn, round by round (`LatencyMeter`).
    """
    meter = LatencyMeter(pair, sampling, context, on_size, max_size)
    meter.begin(max_tokens)
    return meter.finish(seconds)


class LatencyMeter:
    """Times passes of growing size, then all sizes in turn, round by round."""

    def __init__(
        self,
        pair: Pair,
        sampling: Sampling,
        context: int,
        on_size: Callable[[int, float], None] = lambda size, median: None,
        max_size: int = SIZES[-1],
        further_samplings: Sequence[Sampling] = (),
        texts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.samplings = list(dict.fromkeys([sampling, *further_samplings]))
        self.step = CapturedStep.of(pair.target, pair.draft, TokenTree.chain(2))
        self.sampling, self.on_size = sampling, on_size
        self.prompt = text_prompt(pair, context, texts)
        self.sizes = [size for size in SIZES if size <= max_size]
        self.timers: list[SizeTimer] = []
        self.shape_timers: list[ShapeTimer] = []
        self.shape_samples: list[list[list[float]]] = []
        """Seconds of verification by round, sampling and shape."""
        self.stream_samples: list[float] = []
        self.out_of_memory_size: int | None = None
        self.rounds, self.seconds = 0, 0.0

    @torch.inference_mode()
    def begin(self, max_tokens: float) -> None:
        """Find the sizes to time, and time each a few times."""
        drafter = self.step.drafter
        assert drafter is not None
        if self.step.models.graphs and not self.sampling.greedy:
            # reserve random numbers for all sizes at once: if their memory moved later, every
            # graph would be captured anew
            numbers_per_node = self.sampling.drawing.columns(drafter.vocabulary, 1)
            self.step.sequence.reserve_random_bits(self.sizes[-1] * numbers_per_node)
        # seconds of a pass of plain decoding, and of the slowest pass worth timing
        plain_seconds, max_seconds = 0.0, math.inf
        for size in self.sizes:
            previous = self.timers[-1] if self.timers else None
            # The smallest size always times its draft pass. A larger one does so if passes differ
            # in width, and the last size's draft pass was timed and took at most `max_seconds`
            # (`draft_seconds` gives inf if it was not timed).
            times_draft = previous is None or (
                drafter.drafting.drafts_by_level and previous.draft_seconds() <= max_seconds
            )
            try:
                timer = SizeTimer(self.step, size, self.sampling, self.prompt, times_draft)
                for _ in range(3):  # the median is not that of a slow first run
                    timer.run()
            except (RuntimeError, SequoiaPlanError) as error:
                if not self.timers or not _is_out_of_memory(error):
                    raise
                self.out_of_memory_size = size
                break
            self.timers.append(timer)
            self.on_size(size, timer.target_seconds())
            if size == 1:
                self._time_stream()
            # in plain decoding, each pass of a streamed target waits for weights: `_time_stream`
            plain_seconds = max([self.timers[0].target_seconds(), *self.stream_samples])
            max_seconds = max_tokens * plain_seconds
            if timer.target_seconds() > max_seconds:
                break
        # A size takes part in every k-th round, where k is its `interval`. The samples so far serve
        # only to choose k: they are dropped, and latencies come from the rounds alone.
        for timer in self.timers:
            draft_seconds = timer.draft_seconds() if timer.times_draft else 0.0
            slowest = max(timer.target_seconds(), draft_seconds)
            timer.interval = min(MAX_INTERVAL, max(1, int(slowest / plain_seconds)))
            timer.clear()
        self._begin_verification(drafter.vocabulary, drafter.drafting.max_depth)
        self.shape_samples, self.stream_samples = [], []

    @torch.inference_mode()
    def round(self) -> None:
        """Time the passes of each size that is due in this round, and verify each shape once."""
        started = time.perf_counter()
        for timer in self.timers:
            if self.rounds % timer.interval == 0:
                timer.run()
            else:
                timer.skip()
        self._time_shapes()
        self._time_stream()
        self.rounds += 1
        self.seconds += time.perf_counter() - started

    def finish(self, seconds: float) -> Latency:
        """Run rounds until all of them took about `seconds`, and return the measured times.

        There are at least `MIN_ROUNDS` rounds, and at most `MAX_ROUNDS`.
        """
        while self.rounds < MIN_ROUNDS or (self.rounds < MAX_ROUNDS and self.seconds < seconds):
            self.round()
        target_timers = [("target", timer.size, timer) for timer in self.timers]
        draft_timers = [("draft", timer.width, timer) for timer in self.timers if timer.times_draft]
        timed_passes = [*target_timers, *draft_timers]  # (model, tokens in the pass, timer)

        def by_size(times: NDArray[np.float64]) -> dict[str, dict[int, float]]:
            """Seconds by model and number of tokens, from one time for each of `timed_passes`."""
            seconds_by_size: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
            for (name, size, _), pass_seconds in zip(timed_passes, times, strict=True):
                seconds_by_size[name][size] = _rounded(pass_seconds)
            return seconds_by_size

        samples = np.array([timer.samples[name] for name, _, timer in timed_passes])
        low, median, high = map(by_size, drift_free_quartiles(samples))
        quartiles = {
            name: {size: (first, high[name][size]) for size, first in low[name].items()}
            for name in low
        }
        overheads = [
            timer.overhead_seconds() for timer in self.timers if timer.size <= MAX_OVERHEAD_SIZE
        ]
        stream, stream_cost = self.step.target.stream, None
        if stream:
            pass_seconds = _rounded(statistics.median(self.stream_samples))
            stream_cost = StreamCost(pass_seconds, stream.bytes)
        return Latency(
            target=median["target"],
            draft=median["draft"],
            overhead=round(statistics.median(overheads), 6),
            context=self.prompt.numel(),
            # rounds divided by the interval, rounded up
            samples={timer.size: -(-self.rounds // timer.interval) for timer in self.timers},
            quartiles=quartiles,
            out_of_memory=self.out_of_memory_size,
            stream=stream_cost,
            verification=self.verification_cost(self.sampling),
        )

    def verification_cost(self, sampling: Sampling) -> VerificationCost:
        """The cost of verification with one of the samplings, fitted to the times of all shapes."""
        # drift is taken out of all samplings together, which keeps their ratios
        samples = np.moveaxis(np.array(self.shape_samples), 0, -1)  # [samplings, shapes, rounds]
        _, medians, _ = drift_free_quartiles(samples)
        trees = [timer.step.tree for timer in self.shape_timers]
        seconds = medians[self.samplings.index(sampling)].tolist()
        return fit(trees, seconds)

    def _begin_verification(self, vocabulary: int, max_depth: int | None) -> None:
        """Choose the trees whose verification is timed, and verify each once."""
        for tree in shapes_to_time(self.timers[-1].size, vocabulary, max_depth):
            step = self.step.with_tree(tree)
            step.prefill(self.prompt, tree.depth, seed=0)
            self.shape_timers.append(ShapeTimer(step, self.samplings))
        self._time_shapes()  # warms up

    def _time_stream(self) -> None:
        """Time a pass of a streamed target right after another one, as in plain decoding.

        A streamed target's weights come from the host or the disk; the second pass waits for them.
        """
        if self.step.target.stream:
            timer = self.timers[0]
            run_target = partial(timer.step.run_target, timer.extent)
            run_target()
            self.stream_samples.append(timed(self.step.device, run_target)[1])

    def _time_shapes(self) -> None:
        """Time the verification of each shape with each sampling once."""
        seconds: list[list[float]] = [[] for _ in self.samplings]
        for timer in self.shape_timers:
            for sampling, sampling_seconds in zip(self.samplings, seconds, strict=True):
                # as in a step: a model's weights have just replaced what the processor's cache held
                self.timers[0].draft_pass()
                timer.prepare(sampling)
                run = partial(timer.run, sampling)
                sampling_seconds.append(timed(self.step.device, run)[1])
                timer.restore()
        self.shape_samples.append(seconds)


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


def text_prompt(pair: Pair, context: int, texts: Sequence[Sequence[int]]) -> Tensor:
    """int64 [context]: the first tokens of `texts`, repeated if too few; else random ones."""
    tokens = list(itertools.islice(itertools.chain.from_iterable(texts), context))
    if not tokens:
        return random_prompt(pair, context)
    return torch.tensor(tokens, device=pair.target.device).repeat(-(-context // len(tokens)))[
        :context
    ]


def random_prompt(pair: Pair, context: int) -> Tensor:
    """int64 [context]: `context` random tokens of the target's vocabulary, the same each time."""
    vocabulary = pair.target.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (context,), generator=generator)
    return prompt.to(pair.target.device)


class SizeTimer:
    """Times one size: the target's pass, a draft pass, and the overhead of a step.

    The parts run as the decoder runs them: as CUDA graphs where it captures. `prompt` int64 [n];
    `columns` int64 [extent].
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
        num_children = 3
        self.step = step.with_tree(bushy(size, num_children, step.drafter.drafting.max_depth))
        # with room for a child of each node, which `draft_pass` draws
        self.step.prefill(prompt, size + self.step.tree.depth, seed=0)
        self.extent = self.step.extent(prompt.numel() - 1)
        self.length = step.sequence.length.clone()
        self.tokens = self._draft_tokens()
        self.columns = self.step.tensors.columns(self.length, self.extent)
        self.draft_input, self.previous = representative_pass(step.drafter, self.step.tensors)
        self.width = self.draft_input.input_slots.numel()
        self.samples: dict[str, list[float]] = {}
        self.clear()

    @torch.no_grad()
    def _draft_tokens(self) -> Tensor:
        """int64 [size]: the root and the nodes that the draft draws after the prompt.

        What a pass reads decides which experts of a mixture it needs.
        """
        self.step.refill_random_numbers(self.sampling)
        self.step.draft(self.extent, self.sampling)
        slots = self.length + self.step.tensors.nodes
        return self.step.sequence.tokens[slots]

    def clear(self) -> None:
        """Forget all samples."""
        self.samples = {"target": [], "draft": [], "rest": []}

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


def drift_free_quartiles(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """First quartile, median and third quartile of repeated times, without common drift.

    `times` float64 [..., sizes, rounds]; returns float64 [3, ..., sizes].
    """
    slowdowns = times / np.nanmedian(times, -1, keepdims=True)
    drift = np.nanmedian(slowdowns.reshape(-1, times.shape[-1]), 0)
    quartiles: NDArray[np.float64] = np.nanquantile(times / drift, [0.25, 0.5, 0.75], axis=-1)
    return quartiles


def _is_out_of_memory(error: Exception) -> bool:
    """True if a device (PyTorch's own class), the host (by its words) or our KV cache is full."""
    words = ("KV cache:", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _rounded(seconds: float) -> float:
    """Whole microseconds: finer than the noise of any clock, and readable."""
    return max(round(float(seconds), 6), 1e-6)
