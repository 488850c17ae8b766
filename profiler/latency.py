"""The time of each part of a step on this machine, measured with the decoder's own functions."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from sequoia_plan.artifacts import ArgumentError, Latency, SequoiaPlanError, StreamCost, TokenTree
from sequoia_plan.profiler.size_timer import SizeTimer
from sequoia_plan.profiler.timing import CONTEXT, drift_free_quartiles, text_prompt, timed
from sequoia_plan.profiler.verification import VerificationTimer, fit_cost, trees_to_time
from sequoia_plan.runtime import Pair, Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.clock import RUN

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of nodes whose passes may be timed."""
MAX_CHAIN = 64
"""The most nodes that are timed where a node has at most one child."""
MIN_ROUNDS, MAX_ROUNDS = 5, 100
MAX_INTERVAL = 4
"""Even the largest sizes take part in one round of so many, and so do plain steps."""


class LatencyMeter:
    """Times passes of growing size, then all sizes in turn, round by round.

    `texts` fill the KV cache.
    """

    def __init__(
        self,
        pair: Pair,
        sampling: Sampling,
        context: int = CONTEXT,
        on_size: Callable[[int, float], None] = lambda size, median: None,
        max_size: int = SIZES[-1],
        texts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sampling, self.on_size = sampling, on_size
        self.step = CapturedStep.of(pair.target, pair.draft, TokenTree.chain(2))
        if context >= self.step.target.context:
            raise ArgumentError(
                f"context: found {context}, expected less than the model's, "
                f"{self.step.target.context}"
            )
        self.prompt = text_prompt(pair, context, texts)
        assert self.step.drafter is not None
        self.drafter = self.step.drafter
        if self.step.models.max_children == 1:
            max_size = min(max_size, self.drafter.drafting.max_depth or MAX_CHAIN)
        self.sizes = [size for size in SIZES if size <= max_size]
        self.timers: list[SizeTimer] = []
        self.verification_timers: list[VerificationTimer] = []
        self.samples: list[dict[Any, float]] = []
        """Seconds by round; see `_time`."""
        self.out_of_memory_size: int | None = None
        self.seconds = 0.0

    @torch.inference_mode()
    def begin(self, max_tokens: float) -> None:
        """Time ascending sizes while trees that yield `max_tokens` a step could pay for them."""
        drafter, sampling = self.drafter, self.sampling
        if self.step.models.graphs and not sampling.greedy:
            # for all sizes at once: graphs are captured anew if the memory of these numbers moves
            numbers_per_node = sampling.drawing_on(self.step.device).columns(drafter.vocabulary, 1)
            self.step.sequence.reserve_rows("bits", self.sizes[-1] * numbers_per_node)
        if stream := self.step.target.stream:
            stream.keep_most_chosen()
        plain_seconds, times_draft = 0.0, True  # whether draft passes of a size are timed, too
        for size in self.sizes:
            try:
                timer = SizeTimer(self.step, size, sampling, self.prompt, times_draft)
                runs = [timer.run() for _ in range(3)]  # the first may be slow, the median is not
            except (RuntimeError, SequoiaPlanError) as error:
                if not self.timers or not _is_out_of_memory(error):
                    raise
                self.out_of_memory_size = size
                break
            self.timers.append(timer)
            seconds = {part: statistics.median(run[part, n] for run in runs) for part, n in runs[0]}
            self.on_size(size, seconds["target"])
            # in plain decoding, each pass of a streamed target waits for weights
            plain_seconds = plain_seconds or max(seconds["target"], self._stream_seconds())
            max_seconds = max_tokens * plain_seconds  # of so many tokens in plain decoding
            draft_seconds = seconds.get("draft", 0.0)
            # a size whose pass takes as long as k plain passes takes part in every k-th round
            ratio = int(max(seconds["target"], draft_seconds) / plain_seconds)
            timer.interval = min(MAX_INTERVAL, max(1, ratio))
            if seconds["target"] > max_seconds:  # no larger tree can be faster than plain decoding
                break
            times_draft &= drafter.drafting.drafts_by_level and draft_seconds <= max_seconds
        max_depth = drafter.drafting.max_depth
        trees = trees_to_time(self.timers[-1].size, self.step.models.max_children, max_depth)
        self.verification_timers = [
            VerificationTimer(self.step.with_tree(tree), sampling, self.prompt, looks_up)
            for tree in trees  # the second one, or the only one, with a lookup as well
            for looks_up in ([False, True] if tree == trees[:2][-1] else [False])
        ]
        self.plain = self.step.with_tree(TokenTree.chain(1))
        self._time([])  # warms up verification and plain steps

    @torch.inference_mode()
    def round(self) -> None:
        """Time the passes of each size that is due in this round, and verify each tree once."""
        started, number = time.perf_counter(), len(self.samples)
        due = [timer for timer in self.timers if number % timer.interval == 0]
        self.samples.append(self._time(due))
        self.seconds += time.perf_counter() - started

    def finish(self, seconds: float) -> Latency:
        """Run rounds until all of them took about `seconds`, and return the measured times.

        There are `MIN_ROUNDS` to `MAX_ROUNDS` rounds; for the keys of `samples` see `_time`.
        """
        while (rounds := len(self.samples)) < MIN_ROUNDS or (
            rounds < MAX_ROUNDS and self.seconds < seconds
        ):
            self.round()
        medians: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
        quartiles: dict[str, dict[int, tuple[float, float]]] = {"target": {}, "draft": {}}
        of_passes = self._quartiles("target", "draft", "plain")
        plain = of_passes.pop(("plain", 1), None)  # whole steps, timed on a CPU alone
        for (part, size), (low, median, high) in of_passes.items():
            medians[part][size] = _rounded(median)
            quartiles[part][size] = _rounded(low), _rounded(high)
        overheads = [max(0.0, median) for _, median, _ in self._quartiles("overhead").values()]
        verification, with_lookup = (
            {tree: median for (_, tree), (_, median, _) in self._quartiles(part).items()}
            for part in ("verification", "lookup")
        )
        stream_cost = None
        if stream := self.step.target.stream:
            pass_seconds = statistics.median(sample["stream", 1] for sample in self.samples)
            stream_cost = StreamCost(_rounded(pass_seconds), stream.bytes, stream.expert_counts)
        return Latency(
            target=medians["target"],
            draft=medians["draft"],
            overhead=round(statistics.median(overheads or [0.0]), 6),
            plain=plain and _rounded(plain[1]),
            context=self.prompt.numel(),
            samples={
                timer.size: sum(("target", timer.size) in sample for sample in self.samples)
                for timer in self.timers
            },
            quartiles=quartiles,
            out_of_memory=self.out_of_memory_size,
            stream=stream_cost,
            verification=fit_cost(verification, with_lookup),
        )

    def _time(self, timers: Iterable[SizeTimer]) -> dict[Any, float]:
        """Run some timers of sizes, and all others, once.

        Returns seconds by (part, nodes); for the parts "verification" and "lookup" by (part, tree).
        """
        seconds: dict[Any, float] = {}
        for timer in timers:
            seconds |= timer.run()
        for tree_timer in self.verification_timers:
            # as in a step: the models' weights have just replaced what the processor's cache held
            self.timers[0].draft_pass()
            if not self.step.target.stream:
                self.plain.run_target(self.timers[0].extent)
            part = "lookup" if tree_timer.step.lookup else "verification"
            seconds[part, tree_timer.step.tree] = tree_timer.run()
        seconds["stream", 1] = self._stream_seconds()
        if self.step.device.type == "cpu" and len(self.samples) % MAX_INTERVAL == 0:
            seconds["plain", 1] = self._plain_seconds()
        return seconds

    def _plain_seconds(self) -> float:
        """Seconds of the last of some steps of plain decoding, one after the other."""
        sequence = self.step.sequence
        length, seconds = int(sequence.length), 0.0
        for _ in range(RUN):
            started = time.perf_counter()
            self.plain.launch(length, self.sampling)(length)
            seconds = time.perf_counter() - started
            sequence.length.fill_(length)
        return seconds

    def _stream_seconds(self) -> float:
        """Seconds of a pass of a streamed target right after another one, as in plain decoding.

        A streamed target's weights come from the host or the disk; the second pass waits for them.
        """
        if not self.step.target.stream:
            return 0.0
        timer = self.timers[0]
        run_target = partial(timer.step.run_target, timer.extent)
        run_target()
        return timed(self.step.device, run_target)[1]

    def _quartiles(self, *parts: Any) -> dict[Any, tuple[float, float, float]]:
        """First quartile, median and third quartile of these parts, by the keys of `_time`."""
        keys = dict.fromkeys(key for sample in self.samples for key in sample if key[0] in parts)
        if not keys:
            return {}
        samples = np.array([[sample.get(key, np.nan) for sample in self.samples] for key in keys])
        return dict(zip(keys, drift_free_quartiles(samples).T.tolist(), strict=True))


def _is_out_of_memory(error: Exception) -> bool:
    """True if a device (PyTorch's own class), the host (by its words) or our KV cache is full."""
    words = ("KV cache:", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _rounded(seconds: float) -> float:
    """Whole microseconds: finer than the noise of any clock, and readable."""
    return max(round(float(seconds), 6), 1e-6)
