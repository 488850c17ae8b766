"""Functions as CUDA graphs: one launch instead of thousands of kernels launched one by one."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.models.base.errors import first_line
from sequoia_plan.models.loaded_model import Backend

T = TypeVar("T")
_capture_lock = threading.RLock()
"""Held during a capture: the beginning of another one waits for the device, which breaks it."""
MAX_CAPTURES = 3
"""How often a capture is tried; an error may come from what another thread does meanwhile."""
MAX_GRAPHS = 128
"""Most graphs kept; the least recently used one goes."""
SYNCHRONIZING = "called a synchronizing CUDA operation"
"""How PyTorch's warning of an operation that waits for the device begins."""


def step_graphs(
    target: Backend, captures_draft: bool, device: torch.device, captured: bool | None
) -> Graphs | None:
    """What captures the parts of a step as CUDA graphs; None if no part is to be captured.

    `captures_draft`: can the draft's passes be captured, if there is one? `captured`: True captures
    all parts, False none, None those that can be.
    """
    if captured and device.type != "cuda":
        raise ArgumentError(
            f"captured: found {captured!r:.60}, and CUDA graphs need a CUDA device; leave it out"
        )
    is_possible = {
        "draft": captures_draft,
        "target": target.can_be_captured(),
        "verify": target.is_on_one_cuda_device(),
    }
    is_possible["step"] = all(is_possible.values())
    runs_a_model = is_possible["draft"] or is_possible["target"]
    if captured is None and is_possible["verify"] and runs_a_model:
        return Graphs(device, {part for part in is_possible if not is_possible[part]})
    return Graphs(device) if captured else None


class CapturedGraph(NamedTuple):
    """What replays a graph, the result that it writes, and the inputs that it reads."""

    replay: Callable[[], None]
    result: Any
    inputs: tuple[Tensor, ...]


class Graphs:
    """CUDA graphs of functions on one device, one for each key.

    A key is the name of a part of a step ("draft", "target", "verify", "step"), or a tuple that
    begins with it. Functions of the parts in `not_captured` run as they are.
    """

    def __init__(self, device: torch.device, not_captured: Collection[str] = ()) -> None:
        self.device, self.not_captured = device, set(not_captured)
        self.failed: Counter[Hashable] = Counter()
        self.warned: set[str] = set()
        self.new_stream()
        self.clear()

    def clear(self, version: int = 0) -> None:
        """Forget every graph: they hold addresses, and the sequence's memory has moved.

        `version`: the sequence's, which grows when its memory moves.
        """
        self.graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self.version = version
        # one for each part: a part's graph may write where another's, of the same pool, reads
        self.pools: defaultdict[Hashable, Any] = defaultdict(torch.cuda.graph_pool_handle)

    def __call__(
        self,
        key: Hashable,
        function: Callable[..., T],
        get_state: Callable[[], Sequence[Tensor]] = list,
        inputs: tuple[Tensor, ...] = (),
    ) -> T:
        """`function(*inputs)`, captured at the first call with `key` and replayed at later ones.

        `get_state` returns the tensors that the function changes, which a capture must restore. A
        replay writes its result to the same tensors as the one before.
        """
        if key not in self.graphs and self.may_capture(key):
            self._try_capture(key, function, get_state, inputs)
        if key not in self.graphs:
            return function(*inputs)
        self.graphs.move_to_end(key)
        graph = self.graphs[key]
        for captured_input, tensor in zip(graph.inputs, inputs, strict=True):
            if captured_input is not tensor:
                captured_input.copy_(tensor)
        graph.replay()
        return graph.result

    def may_capture(self, key: Hashable) -> bool:
        """True unless the key's part is excluded, or its captures have failed too often."""
        return _part_of(key) not in self.not_captured and self.failed[key] < MAX_CAPTURES

    def _try_capture(
        self,
        key: Hashable,
        function: Callable[..., object],
        get_state: Callable[[], Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
    ) -> None:
        """Capture `function(*inputs)` and keep the graph; count failures, and warn of the last."""
        try:
            replay, result = self.capture(_part_of(key), function, get_state(), inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            may_retry = "captur" in str(error)  # as in each of CUDA's errors 900 to 907
            self.failed[key] = self.failed[key] + 1 if may_retry else MAX_CAPTURES
            message = (
                f"{_part_of(key)}: cannot be captured as a CUDA graph and runs slower, kernel by "
                f"kernel: {first_line(error)}"
            )
            if message not in self.warned and not self.may_capture(key):
                self.warned.add(message)
                warnings.warn(message, stacklevel=4)
            return
        self.graphs[key] = CapturedGraph(replay, result, inputs)
        if len(self.graphs) > MAX_GRAPHS:
            part = _part_of(self.graphs.popitem(last=False)[0])
            if part not in map(_part_of, self.graphs):
                del self.pools[part]  # PyTorch captures nothing into one that lost its last graph

    def new_stream(self) -> None:
        """Take another stream to capture on; PyTorch has 32, and hands them out in turn."""
        self.stream = torch.cuda.Stream(self.device)

    def capture(
        self,
        part: Hashable,
        function: Callable[..., T],
        state: Sequence[Tensor],
        inputs: tuple[Tensor, ...],
    ) -> tuple[Callable[[], None], T]:
        """Capture `function(*inputs)`, restore `state`; returns what replays it, and the result."""
        with _capture_lock, torch.cuda.device(self.device):
            state_before = [tensor.clone() for tensor in state]
            caller_stream = torch.cuda.current_stream()

            def restore_state() -> None:
                """Undo what a run of the function changed."""
                for tensor, value in zip(state, state_before, strict=True):
                    tensor.copy_(value)

            graph, has_begun = torch.cuda.CUDAGraph(), False
            self.stream.wait_stream(caller_stream)
            try:
                # the outer context restores the caller's stream even if ending the capture fails
                with torch.cuda.stream(caller_stream):
                    with torch.cuda.stream(self.stream):
                        function(*inputs)  # kernels are compiled, libraries are initialised
                        restore_state()
                        with waiting_is_an_error():
                            function(*inputs)
                        restore_state()
                    clear_workspaces()
                    has_begun = True
                    with torch.cuda.graph(
                        graph,
                        pool=self.pools[part],
                        stream=self.stream,
                        capture_error_mode="thread_local",
                    ):
                        result = function(*inputs)
            except RuntimeError:  # torch.OutOfMemoryError is one too
                if has_begun:
                    self.abandon(part)
                caller_stream.wait_stream(self.stream)
                restore_state()
                raise
            finally:
                clear_workspaces()
                caller_stream.wait_stream(self.stream)
            return graph.replay, result

    def abandon(self, part: Hashable) -> None:
        """Clean up after a failed capture.

        PyTorch may not have told its allocator that the capture is over, and the pool may be
        damaged.
        """
        with contextlib.suppress(RuntimeError):  # raised if the allocator knows already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pools[part])
        del self.pools[part]
        self.new_stream()


def _part_of(key: Hashable) -> Hashable:
    """The name of a step's part with which a key begins."""
    return key[0] if isinstance(key, tuple) else key


def clear_workspaces() -> None:
    """Let cuBLAS allocate its workspaces anew; it keeps one for each stream.

    Before a capture, so that the graph's workspace is in the graph's own memory pool: anybody may
    clear all workspaces, as torch.compile does, and a replay would then write to memory that is
    free. After it, so that nothing else computes with the graph's workspace.
    """
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """A context in which this thread must not wait for the device.

    PyTorch can report waiting only for all threads at once. So it is told to warn: warnings of this
    thread become a RuntimeError at the end, those of other threads are dropped.
    """
    own_thread, waits = threading.get_ident(), list[str]()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=SYNCHRONIZING)
        show = warnings.showwarning

        def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            """Collect this thread's warnings of waiting, and show all others."""
            if not str(message).startswith(SYNCHRONIZING):
                show(message, *args, **kwargs)
            elif threading.get_ident() == own_thread:
                waits.append(str(message))

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        raise RuntimeError(waits[0])


def read_back(numbers: Tensor) -> Callable[[], list[int]]:
    """Start to copy `numbers` to the host, which does not wait; call the result to get them."""
    if not numbers.is_cuda:
        return numbers.tolist
    host_numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host_numbers.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def wait_and_read() -> list[int]:
        """Wait for the copy to end."""
        copied.synchronize()
        return host_numbers.tolist()

    return wait_and_read
