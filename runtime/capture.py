"""Functions as CUDA graphs: one launch instead of thousands of kernels launched one by one."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Several
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.runtime.models.forward import rope_changes, text_config
from sequoia_plan.runtime.models.parallel import is_split

T = TypeVar("T")
MOST_GRAPHS = 128
"""That are kept; of more, the one that was not used for longest is forgotten."""


def on_one_cuda_device(model: Any) -> bool:
    """Is all of `model` on one CUDA device, in one process, and not compiled by someone else (`torch.compile(model)`, `model.compile()`)?"""
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    devices = {parameter.device for parameter in model.parameters()}
    return not compiled and not is_split(model) and len(devices) == 1 and devices.pop().type == "cuda"


def capturable(model: Any) -> bool:
    """Can passes of `model` be captured: is it on one CUDA device, with nothing in it decided on the host?"""
    return on_one_cuda_device(model) and not rope_changes(text_config(model))


def addresses(models: Iterable[Any]) -> tuple[int, ...]:
    """Where the weights of `models` are: graphs read them there, and `model.to(...)` moves them."""
    return tuple(tensor.data_ptr() for model in models for tensor in (*model.parameters(), *model.buffers()))


class Graphs:
    """Functions on one CUDA device, captured when they are first called and replayed from then on: one graph for each key.

    A graph reads and writes the memory that it was captured with: what goes in must be in tensors that stay, or among `inputs`; `clear`
    must follow when a tensor that stays is allocated anew. What a function returned is overwritten when it is replayed. A function that
    cannot be captured, as when it waits for the device, is run as it is from then on, with one warning; the others stay captured. All
    graphs share one pool: only one runs at a time. No more than `most` are kept.
    """

    def __init__(self, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self.device, self.most = device, most
        self.failed: set[Hashable] = set()
        self.clear()

    def clear(self, version: int = 0) -> None:
        """Forget every graph; `version` says which memory the next ones are captured with (`Sequence.version`)."""
        self.graphs: OrderedDict[Hashable, tuple[Callable[[], None], Any, tuple[Tensor, ...]]] = OrderedDict()
        self.version = version
        self.new_pool()

    def __call__(self, key: Hashable, run: Callable[..., T], changed: Callable[[], Several[Tensor]] = list, inputs: tuple[Tensor, ...] = ()) -> T:
        """`run(*inputs)`, replayed if `key` is known.

        Args:
            changed: gives what `run` both reads and changes; put back after each run that only prepares the capture.
            inputs: tensors that may be others at each call; a replay copies them to where the graph reads them.
        """
        if key not in self.graphs and key not in self.failed:
            try:
                self.graphs[key] = *self.capture(run, changed(), inputs), inputs
                if len(self.graphs) > self.most:
                    self.graphs.popitem(last=False)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.failed.add(key)
                name = key[0] if isinstance(key, tuple) else key
                reason = str(error).strip().split("\n")[0]
                warnings.warn(f"{name}: cannot be captured as a CUDA graph and runs slower, kernel by kernel: {reason:.200}", stacklevel=3)
        if key in self.failed:
            return run(*inputs)
        self.graphs.move_to_end(key)
        replay, result, captured_with = self.graphs[key]
        for mine, given in zip(captured_with, inputs, strict=True):
            if mine is not given:
                mine.copy_(given)
        replay()
        return result

    def new_pool(self) -> None:
        """Memory for graphs: PyTorch takes no further graph into a pool that has lost its last one."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)

    def capture(self, run: Callable[..., Any], changed: Several[Tensor], inputs: tuple[Tensor, ...]) -> tuple[Callable[[], None], Any]:
        """How to replay `run(*inputs)`, and what it returns. `changed` is as it was before, also if this fails.

        Raises:
            RuntimeError: if it cannot be captured.
        """
        with torch.cuda.device(self.device):
            before = [tensor.clone() for tensor in changed]
            here, waiting = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()

            def restore() -> None:
                for tensor, value in zip(changed, before, strict=True):
                    tensor.copy_(value)

            graph, begun = torch.cuda.CUDAGraph(), False
            self.stream.wait_stream(here)
            try:
                with torch.cuda.stream(here):  # where we come back to, even if ending the capture fails
                    with torch.cuda.stream(self.stream):
                        run(*inputs)  # libraries allocate their workspaces
                        restore()
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")  # PyTorch calls it a prototype
                            torch.cuda.set_sync_debug_mode("error")
                        run(*inputs)  # nothing waits for the device, or it raises
                        restore()
                        torch.cuda.set_sync_debug_mode(waiting)
                    begun = True
                    with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                        result = run(*inputs)
            except RuntimeError:  # also out of memory
                if begun:
                    self.abandon()
                here.wait_stream(self.stream)
                restore()
                raise
            finally:
                torch.cuda.set_sync_debug_mode(waiting)
                here.wait_stream(self.stream)
            return graph.replay, result

    def abandon(self) -> None:
        """After a capture that failed: PyTorch may not have told its allocator that the capture is over, and the pool may be damaged."""
        with contextlib.suppress(RuntimeError):  # it is over
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.new_pool()


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
