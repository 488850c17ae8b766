"""A decoding step as a CUDA graph: one launch instead of thousands of kernels launched one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sequoia_plan.runtime.sampling import Sampling

if TYPE_CHECKING:
    from sequoia_plan.runtime.decode import SequoiaDecoder

WARM_UP = 2
"""Runs before a capture, as torch.cuda.graph asks for: libraries allocate their workspaces on first use."""


def capturable(model: Any) -> bool:
    """Does all of `model` lie on one CUDA device, in one process, not compiled by someone else?"""
    alone = (getattr(model, "_tp_size", None) or 1) == 1 and not hasattr(model, "_orig_mod")
    return alone and {parameter.device.type for parameter in model.parameters()} == {"cuda"} and len({p.device for p in model.parameters()}) == 1


class CapturedSteps:
    """The steps of one decoder, captured on first use: one graph for each extent and sampling.

    A graph reads and writes the decoder's own memory (tokens, length, random numbers, caches); `clear` must follow when any
    of it is allocated anew. All graphs share one pool, since only one runs at a time.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, Sampling], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def clear(self) -> None:
        """Forget every graph."""
        self.graphs.clear()

    def __call__(self, decoder: SequoiaDecoder, extent: int, sampling: Sampling) -> Tensor:
        """`decoder.step(extent, sampling)`, replayed."""
        key = extent, sampling
        if key not in self.graphs:
            self.graphs[key] = self._capture(decoder, extent, sampling)
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _capture(self, decoder: SequoiaDecoder, extent: int, sampling: Sampling) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        tokens, length = decoder.tokens.clone(), decoder.length.clone()
        stream = torch.cuda.Stream(decoder.device)
        stream.wait_stream(torch.cuda.current_stream(decoder.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # the caches need no care: a step only writes slots the next one may overwrite
                decoder.step(extent, sampling)
                decoder.tokens.copy_(tokens)
                decoder.length.copy_(length)
        torch.cuda.current_stream(decoder.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = decoder.step(extent, sampling)
        return graph, result
