"""What the parts of a step cost on this machine, timed through the decoder's own functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sequoia_plan.artifacts import Latency, SequoiaPlanError, TokenTree
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.grow import expand

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT = 128
LEAST_ROUNDS, MOST_ROUNDS = 5, 50


@torch.inference_mode()
def measure_latency(
    pair: Pair,
    sampling: Sampling,
    most_tokens: float,
    seconds: float,
    context: int = CONTEXT,
    on_size: Callable[[int, float], None] = lambda size, median: None,
) -> Latency:
    """Time trees of growing size, then all of them again in turn, so that drift hits all alike; medians and quartiles are kept.

    Sizes grow until the target's part of a step costs `most_tokens` times that of one node: no tree yields more tokens,
    so none of that size can beat plain decoding. A size there is no memory for ends the growth, too, and is recorded.

    Args:
        most_tokens: a bound on any tree's expected tokens, 1 / (1 - sum p).
        seconds: stop repeating after about this long; every size is timed at least five times.
        on_size: called with each size's first median.
    """
    benches: list[_Bench] = []
    too_large: int | None = None
    for size in SIZES:
        try:
            bench = _Bench(pair, size, sampling, context)
            for _ in range(3):
                bench.run()
        except (RuntimeError, SequoiaPlanError) as error:
            if not benches or not _out_of_memory(error):
                raise
            too_large = size
            break
        benches.append(bench)
        on_size(size, bench.target())
        if bench.target() > most_tokens * benches[0].target():
            break
    deadline = time.perf_counter() + seconds
    for bench in benches:
        bench.forget()
    rounds = 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < deadline):
        for bench in benches:
            bench.run()
        rounds += 1
    return Latency(
        target={bench.size: _rounded(bench.target()) for bench in benches},
        draft={bench.size: _rounded(bench.draft()) for bench in benches},
        overhead=round(statistics.median(bench.rest() for bench in benches), 6),
        context=context,
        rounds=rounds,
        quartiles={name: {bench.size: bench.quartiles(name) for bench in benches} for name in ("target", "draft")},
        out_of_memory=too_large,
    )


class _Bench:
    """Times one size: the target's part on a tree of `size` nodes, a draft pass of `size` tokens, a whole step."""

    def __init__(self, pair: Pair, size: int, sampling: Sampling, context: int) -> None:
        self.size, self.sampling = size, sampling
        ternary = TokenTree.from_parents([-1, *((node - 1) // 3 for node in range(1, size))])
        comb = TokenTree.from_parents([-1, *[0] * size, *range(1, size + 1)])  # its second draft pass reads `size` nodes
        self.step = self._decoder(pair, ternary, context)
        self.comb = self._decoder(pair, comb, context)
        self.samples: dict[str, list[float]] = {}
        self.forget()

    def _decoder(self, pair: Pair, tree: TokenTree, context: int) -> SequoiaDecoder:
        decoder = SequoiaDecoder(pair.target, pair.draft, tree)
        vocabulary = pair.target.get_input_embeddings().weight.shape[0]
        prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(0)).to(decoder.device)
        decoder.prefill(prompt, tree.depth, seed=0)
        return decoder

    def forget(self) -> None:
        self.samples = {"grow": [], "target": [], "draft": [], "step": []}

    def run(self) -> None:
        """One sample of each part. The length is put back, so that every step is the same step."""
        decoder, length = self.step, self.step.length.clone()
        extent = decoder.extent(int(length))
        mask = decoder.mask(length, extent)

        def grow() -> Any:
            decoder.throw(self.sampling)
            return decoder.grow(mask, self.sampling)

        def step() -> None:
            decoder.throw(self.sampling)
            decoder.step(extent, self.sampling).tolist()

        growth = self._timed("grow", grow)

        def target() -> None:
            decoder.keep(decoder.judge(growth, mask, self.sampling), growth)

        self._timed("target", target)
        decoder.length.copy_(length)
        self._timed("step", step)
        decoder.length.copy_(length)

        comb = self.comb
        mask = comb.mask(comb.length, comb.extent(int(comb.length)))
        rows = torch.zeros_like(comb.offsets)
        comb.throw(self.sampling)
        assert comb.draft is not None
        self._timed("draft", lambda: expand(comb.draft, comb.levels[1], rows, comb.length, comb.offsets, mask, self.sampling, comb.bits[1:]))  # type: ignore[arg-type]

    def target(self) -> float:
        return statistics.median(self.samples["target"])

    def draft(self) -> float:
        return statistics.median(self.samples["draft"])

    def quartiles(self, name: str) -> tuple[float, float]:
        """The first and the third of the times of "target" or "draft"."""
        first, _, third = statistics.quantiles(self.samples[name], n=4, method="inclusive")
        return _rounded(first), _rounded(third)

    def rest(self) -> float:
        """A step's time beyond its parts, from sums taken round by round."""
        parts = zip(self.samples["step"], self.samples["grow"], self.samples["target"], strict=True)
        return max(0.0, statistics.median(step - grow - target for step, grow, target in parts))

    def _timed(self, name: str, run: Callable[[], Any]) -> Any:
        device = self.step.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.samples[name].append(time.perf_counter() - started)
        return result


def _out_of_memory(error: Exception) -> bool:
    """Of a device (PyTorch's own class), of the host (it says so in words), or of our KV cache."""
    words = ("KV cache:", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _rounded(seconds: float) -> float:
    """Microseconds are finer than any clock noise and keep the file readable."""
    return max(round(seconds, 6), 1e-6)
