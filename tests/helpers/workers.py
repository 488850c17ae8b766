"""Worker threads of a compiled pass."""

from sequoia_plan.models.packed.packed_pass import Workers


def use_workers(backend, count):
    """Let so many threads run a backend's passes."""
    backend.runner.workers, backend.runner.scratch_rows = Workers(count), 0


def interrupt_first_worker(worker, *_):
    """To be called before the part of a worker thread."""
    if worker == 0:
        raise KeyboardInterrupt
