"""The time of each part of a step on this machine, measured with the decoder's own functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sequoia_plan.artifacts import (
    Latency,
    SequoiaPlanError,
    StreamCost,
    TokenTree,
    VerificationCost,
)
from sequoia_plan.profiler.size_timer import MAX_OVERHEAD_SIZE, SizeTimer
from sequoia_plan.profiler.timing import drift_free_quartiles, text_prompt, timed
from sequoia_plan.profiler.verification import VerificationTimer, fit, trees_to_time
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.captured_step import CapturedStep

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of nodes whose passes may be timed."""
CONTEXT = 128
"""Tokens in the KV cache while passes are timed, unless told otherwise."""
MIN_ROUNDS, MAX_ROUNDS = 5, 100
MAX_INTERVAL = 4
"""Even the largest sizes take part in one round of so many."""


class LatencyMeter:
    """Times passes of growing size, then all sizes in turn, round by round.

    Passes are timed with the first sampling, verification with each; `texts` fill the KV cache.
    """

    def __init__(
        self,
        pair: Pair,
        samplings: Sequence[Sampling],
        context: int = CONTEXT,
        on_size: Callable[[int, float], None] = lambda size, median: None,
        max_size: int = SIZES[-1],
        texts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.samplings, self.on_size = list(dict.fromkeys(samplings)), on_size
        self.step = CapturedStep.of(pair.target, pair.draft, TokenTree.chain(2))
        self.prompt = text_prompt(pair, context, texts)
        self.sizes = [size for size in SIZES if size <= max_size]
        self.timers: list[SizeTimer] = []
        self.verification_timers: list[VerificationTimer] = []
        self.verification_samples: list[list[list[float]]] = []
        """Seconds by round, sampling and tree."""
        self.stream_samples: list[float] = []
        self.out_of_memory_size: int | None = None
        self.rounds, self.seconds = 0, 0.0

    @torch.inference_mode()
    def begin(self, max_tokens: float) -> None:
        """Time each size a few times, up to one that costs more than `max_tokens` plain passes."""
        drafter, sampling = self.step.drafter, self.samplings[0]
        assert drafter is not None
        if self.step.models.graphs and not sampling.greedy:
            # reserve random numbers for all sizes at once: if their memory moved later, every
            # graph would be captured anew
            numbers_per_node = sampling.drawing.columns(drafter.vocabulary, 1)
            self.step.sequence.reserve_rows("bits", self.sizes[-1] * numbers_per_node)
        plain_seconds, times_draft = 0.0, True
        for size in self.sizes:
            try:
                timer = SizeTimer(self.step, size, sampling, self.prompt, times_draft)
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
            times_draft = (
                times_draft
                and drafter.drafting.drafts_by_level
                and timer.draft_seconds() <= max_seconds
            )
        for timer in self.timers:
            timer.take_part_every(plain_seconds, MAX_INTERVAL)
        for tree in trees_to_time(
            self.timers[-1].size, drafter.vocabulary, drafter.drafting.max_depth
        ):
            step = self.step.with_tree(tree)
            step.prefill(self.prompt, tree.depth, seed=0)
            self.verification_timers.append(VerificationTimer(step, self.samplings))
        self._time_verification()  # warms up
        self.verification_samples, self.stream_samples = [], []

    @torch.inference_mode()
    def round(self) -> None:
        """Time the passes of each size that is due in this round, and verify each tree once."""
        started = time.perf_counter()
        for timer in self.timers:
            if self.rounds % timer.interval == 0:
                timer.run()
            else:
                timer.skip()
        self._time_verification()
        self._time_stream()
        self.rounds += 1
        self.seconds += time.perf_counter() - started

    def finish(self, seconds: float) -> Latency:
        """Run rounds until all of them took about `seconds`, and return the measured times.

        There are at least `MIN_ROUNDS` rounds, and at most `MAX_ROUNDS`.
        """
        while self.rounds < MIN_ROUNDS or (self.rounds < MAX_ROUNDS and self.seconds < seconds):
            self.round()
        passes = [("target", timer.size, timer) for timer in self.timers]
        passes += [("draft", timer.width, timer) for timer in self.timers if timer.times_draft]
        samples = np.array([timer.samples[model] for model, _, timer in passes])
        medians: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
        quartiles: dict[str, dict[int, tuple[float, float]]] = {"target": {}, "draft": {}}
        for (model, size, _), (low, median, high) in zip(
            passes, drift_free_quartiles(samples).T, strict=True
        ):
            medians[model][size] = _rounded(median)
            quartiles[model][size] = _rounded(low), _rounded(high)
        overheads = [
            timer.overhead_seconds() for timer in self.timers if timer.size <= MAX_OVERHEAD_SIZE
        ]
        stream, stream_cost = self.step.target.stream, None
        if stream:
            pass_seconds = _rounded(statistics.median(self.stream_samples))
            stream_cost = StreamCost(pass_seconds, stream.bytes)
        return Latency(
            target=medians["target"],
            draft=medians["draft"],
            overhead=round(statistics.median(overheads), 6),
            context=self.prompt.numel(),
            # rounds divided by the interval, rounded up
            samples={timer.size: -(-self.rounds // timer.interval) for timer in self.timers},
            quartiles=quartiles,
            out_of_memory=self.out_of_memory_size,
            stream=stream_cost,
            verification=self.verification_cost(self.samplings[0]),
        )

    def verification_cost(self, sampling: Sampling) -> VerificationCost:
        """The cost of verification with one of the samplings."""
        # drift is taken out of all samplings together, which keeps their ratios
        samples = np.moveaxis(np.array(self.verification_samples), 0, -1)
        _, medians, _ = drift_free_quartiles(samples)
        sizes = [timer.step.tree.size for timer in self.verification_timers]
        return fit(sizes, medians[self.samplings.index(sampling)].tolist())

    def _time_stream(self) -> None:
        """Time a pass of a streamed target right after another one, as in plain decoding.

        A streamed target's weights come from the host or the disk; the second pass waits for them.
        """
        if self.step.target.stream:
            timer = self.timers[0]
            run_target = partial(timer.step.run_target, timer.extent)
            run_target()
            self.stream_samples.append(timed(self.step.device, run_target)[1])

    def _time_verification(self) -> None:
        """Time the verification of each tree with each sampling once."""
        seconds: list[list[float]] = [[] for _ in self.samplings]
        for timer in self.verification_timers:
            for sampling, sampling_seconds in zip(self.samplings, seconds, strict=True):
                # as in a step: a model's weights have just replaced what the processor's cache held
                self.timers[0].draft_pass()
                timer.restore()
                sampling_seconds.append(timed(self.step.device, partial(timer.run, sampling))[1])
                timer.restore()
        self.verification_samples.append(seconds)


def _is_out_of_memory(error: Exception) -> bool:
    """True if a device (PyTorch's own class), the host (by its words) or our KV cache is full."""
    words = ("KV cache:", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _rounded(seconds: float) -> float:
    """Whole microseconds: finer than the noise of any clock, and readable."""
    return max(round(float(seconds), 6), 1e-6)
