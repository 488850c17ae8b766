"""PyTorch's own threads, where something else computes with all processors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
