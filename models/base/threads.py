"""How many threads compute on a CPU, and PyTorch's own where something else computes with all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sequoia_plan.artifacts.processor import usable_cores


def num_threads() -> int:
    """PyTorch's number, but no more than cores: the threads of a pass wait for each other."""
    return min(torch.get_num_threads(), usable_cores())


@contextmanager
def one_thread_of_torch(is_wanted: bool) -> Iterator[None]:
    """A context in which PyTorch computes with one thread, if that is wanted.

    Its other threads go on spinning after an operation, on the processors that a pass needs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if is_wanted else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
