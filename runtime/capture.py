"""Functions as CUDA graphs: one launch instead of thousands of kernels launched one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.runtime.forward import rope_changes, text_config

T = TypeVar("T")


def capturable(model: Any) -> bool:
    """Does all of `model` lie on one CUDA device, in one process, not compiled by someone else, nothing in it decided on the host?"""
    alone = (getattr(model, "_tp_size", None) or 1) == 1 and not hasattr(model, "_orig_mod")
    devices = {parameter.device for parameter in model.parameters()}
    return alone and len(devices) == 1 and devices.pop().type == "cuda" and not rope_changes(text_config(model))


class Graphs:
    """Functions on one CUDA device, captured when they are first called and replayed from then on: one graph for each key.

    A graph reads and writes the memory that it was captured with: what goes in must lie in tensors that stay, and `clear` must
    follow when any of them is allocated anew. What a function returned is overwritten when it is replayed. Once a function cannot be
    captured, as when it waits for the device, all run as they are, with a warning. All graphs share one pool: only one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.possible = True
        self.clear()

    def clear(self) -> None:
        """Forget every graph."""
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool = torch.cuda.graph_pool_handle()  # PyTorch takes no further graph into a pool that has lost its last one

    def __call__(self, key: Hashable, run: Callable[[], T], changed: Sequence[Tensor] = ()) -> T:
        """`run()`, replayed if `key` is known.

        Args:
            changed: what `run` both reads and changes; put back after each run that only prepares the capture.
        """
        if self.possible and key not in self.graphs:
            with torch.cuda.device(self.device):
                self._capture(key, run, changed)
        if not self.possible:
            return run()
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _capture(self, key: Hashable, run: Callable[[], Any], changed: Sequence[Tensor]) -> None:
        before = [tensor.clone() for tensor in changed]
        here, waiting = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()

        def prepare() -> None:
            run()
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(here):  # where we come back to, even if ending the capture fails
                with torch.cuda.stream(self.stream):
                    prepare()  # libraries allocate their workspaces
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # PyTorch calls it a prototype
                        torch.cuda.set_sync_debug_mode("error")
                    prepare()  # nothing waits for the device, or it raises
                    torch.cuda.set_sync_debug_mode(waiting)
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    result = run()
            self.graphs[key] = graph, result
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.possible = False
            here.wait_stream(self.stream)
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"a step cannot be captured as a CUDA graph and runs slower, kernel by kernel: {reason:.200}", stacklevel=4)
        finally:
            torch.cuda.set_sync_debug_mode(waiting)
            here.wait_stream(self.stream)


def readback(values: Tensor) -> Callable[[], list[int]]:
    """Begin to bring `values` to the host; call what is returned for the numbers. On CUDA nothing waits before that call."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(values.device))

    def numbers() -> list[int]:
        arrived.synchronize()
        return host.tolist()

    return numbers
